"""The base of every configuration section."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Threads = Literal["auto"] | Annotated[int, Field(ge=1)]
"""A number of threads, or ``auto``: an equal share of the cores for each trainer process and each engine of the run."""


@dataclass(frozen=True, slots=True)
class NameIn:
    """Check of a setting that names a row of a table, or a plug-in that ``trinity_mq.runtime.plugins.resolve`` loads.

    A plug-in is a dotted path, or a name that an installed package adds under the entry-point group.
    """

    kind: str
    names: Collection[str]
    entry_group: str

    def __call__(self, name: str) -> str:
        """Return ``name``, or raise ValueError if it is neither a row nor a plug-in."""
        if name in self.names or "." in name or entry_points(group=self.entry_group, name=name):
            return name
        raise ValueError(
            f"unknown {self.kind} {name!r}; wanted {', '.join(self.names)} or the dotted path of your own, module.Name"
        )


def _finite(value: Any, where: str = "args") -> Any:
    """Return ``value``; raise ValueError if a number in it, at any depth, is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, wanted a finite number")
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _finite(item, f"{where}.{key}")
    return value


def expand_user(path: str) -> Path:
    """Return a path with the home of ``~`` or ``~user`` filled in.

    Raises:
        ValueError: This machine does not know the user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path!r}: this machine knows no user of this name; write the whole path") from error


UserFile = Annotated[str | None, AfterValidator(lambda value: str(expand_user(value)) if value else None)]
"""Path of a file of the user, with the home of ``~`` filled in. None: no file; an empty text also becomes None."""
FiniteArgs = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Keyword arguments for code of the user. Their numbers are finite."""


class Section(BaseModel):
    """A frozen and closed section: an unknown key is an error, and no value changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
