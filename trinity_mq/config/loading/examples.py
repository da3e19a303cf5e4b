"""The examples that are part of the package: ``example:NAME`` is the file ``examples/NAME.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_mq.errors import CommandError, suggest

EXAMPLE = "example:"
"""Prefix of a target that names a shipped example."""
EXAMPLES = Path(__file__).parents[2] / "examples"
"""Folder of the shipped examples. In a checkout it is a link to ``examples``."""

STARTER = "starter"
"""Folder below :data:`EXAMPLES` with the files that ``trinity-mq init`` copies."""


def example_names() -> list[str]:
    """Return the names of the shipped examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def example_text(name: str) -> str:
    """Return the YAML text of a shipped example.

    Raises:
        CommandError: No shipped example has this name.
    """
    if name not in example_names():
        raise CommandError(f"there is no example {name!r}; {suggest(name, example_names())} (`trinity-mq examples`)")
    return (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")


def example_settings(settings: Any) -> Any:
    """Return the settings of a shipped example with paths such as ``examples/frozen_lake/train.jsonl`` replaced by the
    paths of the shipped files, so that the example runs in any folder.
    """
    if isinstance(settings, Mapping):
        return {key: example_settings(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [example_settings(value) for value in settings]
    if isinstance(settings, str) and (settings == "examples" or settings.startswith("examples/")):
        return str(EXAMPLES.parent / settings)
    return settings
