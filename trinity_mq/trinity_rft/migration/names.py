"""The names of workflows and rewards of Trinity-RFT that have another name or a condition here, or are not supported:
one table, ``registered_names.csv``. Names that are not in the table are the same, or belong to plug-ins.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from trinity_mq.trinity_rft.migration.transfer import LeftOut, SettingsTransfer, resolve_environment

OLD_KEYS = {"workflow": "default_workflow_type", "reward": "default_reward_fn_type"}
"""Keys of Trinity-RFT in a taskset, and of the default of all tasksets, by the kind of the name."""
NEW_KEYS = {"workflow": "workflow", "reward": "reward_fn"}
"""Keys here, by the kind of the name."""
DEFAULTS = "buffer.explorer_input."
"""Section with the defaults of all tasksets."""


@dataclass(frozen=True, slots=True)
class RegisteredName:
    """A registered name of Trinity-RFT, a row of the table."""

    kind: str
    """``workflow`` or ``reward``."""
    name: str
    new_name: str
    """Name here. Empty: the same."""
    refused: str
    """``yes`` if nothing here does its work."""
    text: str
    """The reason why it is refused or has another name, or what it needs on this machine."""


@cache
def registered_names() -> Mapping[tuple[str, str], RegisteredName]:
    """Return the rows of the table by kind and name."""
    text = files("trinity_mq.trinity_rft").joinpath("registered_names.csv").read_text(encoding="utf-8")
    rows = [RegisteredName(**row) for row in csv.DictReader(text.splitlines())]
    return {(row.kind, row.name): row for row in rows}


def put_name(item: SettingsTransfer, kind: str, default: str | None) -> None:
    """Set the workflow or the reward of a taskset by its name here, say what it needs, or refuse it.

    Args:
        item: The transfer of the taskset.
        kind: ``workflow`` or ``reward``.
        default: The name if the taskset has none. None: no name is set.
    """
    old = OLD_KEYS[kind]
    own = item.take(old)
    value, key = (default, f"{DEFAULTS}{old}") if own is None else (own, item.old_key(old))
    if value is None:
        return
    row = registered_names().get((kind, str(resolve_environment(value))))
    if row is None:
        item.put(NEW_KEYS[kind], value)
    elif row.refused:
        item.lost(LeftOut(key, value, row.text, matters=True, is_purpose=True))
    elif row.new_name:
        item.put(NEW_KEYS[kind], row.new_name, f"was {value}: {row.text}")
    else:
        item.put(NEW_KEYS[kind], value, row.text)
        item.note(key, value, row.text)
