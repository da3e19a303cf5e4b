"""Lookup from a name in a configuration to its class or function: built-in table, entry points, dotted path."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from trinity_mq.runtime.errors import describe_error
from trinity_mq.runtime.plugins import UnknownNameError, import_named, registered_plugins

T = TypeVar("T")


class Registry(Mapping[str, str]):
    """Built-in names, as a mapping to ``module:attribute``, and names that a decorator adds::

        @WORKFLOWS.register_module("my_workflow")
        class MyWorkflow(Workflow): ...

    In a folder of ``plugin_dirs`` the decorator suffices: the configuration may name ``my_workflow`` in every agent,
    because such files are searched for the decorator before they are imported. Elsewhere the module must have been
    imported.

    Args:
        builtin: The built-in names.
        names: The variable names of the registry. Plug-in files are searched for them.
    """

    def __init__(self, builtin: Mapping[str, str], *names: str) -> None:
        self._builtin, self.names = dict(builtin), names
        self._added: dict[str, Any] = {}

    def __getitem__(self, name: str) -> str:
        return self._builtin[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._builtin)

    def __len__(self) -> int:
        return len(self._builtin)

    def register_module(self, name: str) -> Callable[[T], T]:
        """Return the decorator that registers a class or function under ``name``.

        Raises:
            ValueError: The name is built in, or another class is registered under it.
        """

        def register(target: T) -> T:
            registered = self._added.get(name)
            if name in self._builtin or (registered is not None and _path_of(registered) != _path_of(target)):
                owner = self._builtin.get(name) or _path_of(registered)
                raise ValueError(
                    f"{self.names[0]}: {name!r} is {owner} already; register {_path_of(target)} as another"
                )
            self._added[name] = target
            return target

        return register

    def find(self, kind: str, name: str) -> Any | None:
        """Return the object registered under ``name``, in this process or in a plug-in folder; None if no object is.

        Raises:
            UnknownNameError: Several plug-ins register the name, or its plug-in cannot be imported.
        """
        if name in self._added:
            return self._added[name]
        places = registered_plugins(self.names).get(name, [])
        if len(places) > 1:
            raise UnknownNameError(f"{kind} {name!r} is registered by {' and by '.join(places)}: rename one of them")
        return import_named(kind, places[0]) if places else None

    def added(self) -> list[str]:
        """Return the names that decorators add."""
        return sorted({*self._added, *registered_plugins(self.names)})


def _path_of(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"


def lookup(kind: str, name: str, table: Mapping[str, str], entry_group: str | None = None) -> Any:
    """Return the object that ``name`` refers to.

    Args:
        kind: Kind of the object, for messages: ``workflow``, ``reward function``, ``operator``.
        name: A key of ``table``, a name under the entry-point group, or a dotted path ``package.module.Class``.
        table: Built-in names, each with ``module:attribute``, loaded on first use. A built-in never imports another
            built-in.
        entry_group: Entry-point group under which installed packages add names. None: no entry points.

    Raises:
        UnknownNameError: The name does not exist, or its module cannot be imported.
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
        except (Exception, SystemExit) as error:  # an import may raise any error
            raise UnknownNameError(
                f"{kind} {name!r} of an installed package ({added[name].value}) cannot be loaded: "
                f"{describe_error(error)}"
            ) from error
    registry = table if isinstance(table, Registry) else None
    if registry is not None and (registered := registry.find(kind, name)) is not None:
        return registered
    choices = sorted({*table, *added, *(registry.added() if registry is not None else ())})
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(choices)}."
    raise UnknownNameError(f"unknown {kind} {name!r}; {hint} Your own is named by its dotted path, package.module.Name")


def name_of(kind: str, obj: Any, table: Mapping[str, str]) -> str:
    """Return a name for which :func:`lookup` returns ``obj``, also in another process.

    Raises:
        UnknownNameError: ``obj`` was defined inside a function or a script, so no other process can import it.
    """
    module, path = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if module is None or path is None or module == "__main__" or "." in path:
        raise UnknownNameError(
            f"{kind} {obj!r} cannot be imported by another process; put it at the top of a module, "
            "outside of the script that is run"
        )
    spec = f"{module}:{path}"
    return next((name for name, target in table.items() if target == spec), f"{module}.{path}")


@functools.cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
