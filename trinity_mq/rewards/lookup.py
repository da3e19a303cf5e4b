"""From a name in a configuration to the class or function it means: built-in table, entry points, dotted path."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trinity_mq.runtime.plugins import UnknownNameError, import_named


def lookup(kind: str, name: str, table: Mapping[str, str], entry_group: str | None = None) -> Any:
    """Return what ``name`` means.

    Args:
        kind: For messages: ``workflow``, ``reward function``, ``operator``.
        name: A key of ``table``, a name under the entry-point group, or a dotted path ``package.module.Class``.
        table: Built-in names, each with ``module:attribute``, loaded on first use: one built-in never imports another.
        entry_group: Entry points that installed packages add names with.

    Raises:
        UnknownNameError: No such name, or the module it points to cannot be imported.
    """
    if name in table:
        module, _, attribute = table[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if "." in name:
        return import_named(kind, name)
    added = _entry_points(entry_group) if entry_group else {}
    if name in added:
        try:
            return added[name].load()
        except Exception as error:  # whatever the package does while it is imported
            raise UnknownNameError(
                f"{kind} {name!r} of an installed package ({added[name].value}) cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
    known = sorted({*table, *added})
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known)}."
    raise UnknownNameError(f"unknown {kind} {name!r}; {hint} Your own is named by its dotted path, package.module.Name")


def name_of(kind: str, found: Any, table: Mapping[str, str]) -> str:
    """Return a name under which :func:`lookup` gives ``found`` again, also in another process.

    Raises:
        UnknownNameError: ``found`` was made inside a function or a script, where no other process can import it.
    """
    module, path = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if module is None or path is None or module == "__main__" or "." in path:
        raise UnknownNameError(
            f"{kind} {found!r} cannot be imported by another process; put it at the top of a module, "
            "outside of the script that is run"
        )
    spec = f"{module}:{path}"
    return next((name for name, target in table.items() if target == spec), f"{module}.{path}")


@functools.cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
