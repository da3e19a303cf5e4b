"""Names in a configuration and the objects that they refer to: built-in tables, decorators, entry points of installed
packages, dotted paths, and the user's own modules in plug-in folders, which every agent of a run can import.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

from trinity_mq.config.plugin_files import find_registered, module_tree, plugin_files, registered_paths
from trinity_mq.config.trinity_imports import TRINITY, is_old_line, old_imports, required_imports, rewritten
from trinity_mq.errors import suggest
from trinity_mq.runtime.errors import FatalError, describe_error, display_path

T = TypeVar("T")

NO_NAMES: Mapping[str, str] = MappingProxyType({})
"""Table of a kind without built-in names."""

_added: dict[Path, None] = {}


class UnknownNameError(FatalError, ValueError):
    """An unknown name. The message lists similar names, or explains why a dotted path cannot be imported."""


def add_plugins(folders: Sequence[str]) -> list[Path]:
    """Make the modules in ``folders`` importable in this process and in the processes that it starts with
    multiprocessing.

    The folders are appended to ``sys.path``, so that no file in them replaces a module that others import.
    ``my_file.py`` with a class ``Mine`` gives the dotted path ``my_file.Mine``. No module is executed here. Adding a
    folder twice changes nothing.

    Args:
        folders: The folders. Relative folders start at the working directory of the process.

    Returns:
        The absolute folders.

    Raises:
        FatalError: A folder does not exist, or one of its modules is hidden by another module of the same name.
    """
    paths = [Path(folder).expanduser().resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if not path.is_dir():
            raise FatalError(
                f"plugin_dirs: there is no folder {folder!r} ({path}); relative folders start where the command is run"
            )
        if str(path) not in sys.path:
            sys.path.append(str(path))
    importlib.invalidate_caches()
    for path in paths:
        for file in plugin_files(path):
            _check_not_hidden(file)
        _added[path] = None
    return paths


def plugin_names() -> list[str]:
    """Return the dotted paths of the public top-level classes in the added folders, such as ``my_file.Mine``.

    The files are read, not executed. A file that is not valid Python is left out; importing it gives the reason.
    """
    return sorted(
        f"{file.stem}.{node.name}"
        for folder in _added
        for file in plugin_files(folder)
        for node in module_tree(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def registered_plugins(registries: Sequence[str]) -> dict[str, list[str]]:
    """Return the objects that modules in the added folders register by decorator: dotted paths by registered name.

    The files are read, not executed: ``@WORKFLOWS.register_module("mine")`` above a class ``Mine`` of ``my_file.py``
    gives ``{"mine": ["my_file.Mine"]}``.

    Args:
        registries: Names of the objects with ``register_module``, such as ``WORKFLOWS``.
    """
    paths_by_name: dict[str, list[str]] = {}
    for (registry, name), places in registered_paths(list(_added)).items():
        if registry in registries:
            paths_by_name.setdefault(name, []).extend(path for path, _ in places)
    return paths_by_name


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

    @property
    def modules(self) -> dict[str, Any]:
        """The objects that this process has registered, by name."""
        return dict(self._added)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the object that a built-in name, a registered name or a dotted path refers to; ``default`` if the name
        is unknown or None.

        Raises:
            UnknownNameError: Its module cannot be imported, or lacks the attribute that a dotted path names.
        """
        is_named = name is not None and ("." in name or name in self or name in self.added())
        return resolve(self.names[0], name, self) if is_named else default

    @overload
    def register_module(
        self,
        name: str | None = None,
        module_cls: None = None,
        *,
        module_name: str | None = None,
        force: bool = False,
        lazy: bool = False,
    ) -> Callable[[T], T]: ...
    @overload
    def register_module(
        self,
        name: str | None = None,
        module_cls: T = ...,
        *,
        module_name: str | None = None,
        force: bool = False,
        lazy: bool = False,
    ) -> T: ...
    def register_module(
        self,
        name: str | None = None,
        module_cls: Any = None,
        *,
        module_name: str | None = None,
        force: bool = False,
        lazy: bool = False,
    ) -> Any:
        """Return the decorator that registers a class or function under ``name``. With ``module_cls``, register it and
        return it.

        Args:
            name: Registered name. None: ``module_name``, or the name of the class or function.
            module_cls: Class or function to register.
            module_name: Another name of ``name``, as in Trinity-RFT.
            force: Whether to replace another class that is registered under the name.
            lazy: Without effect, as in Trinity-RFT.

        Raises:
            ValueError: The name is built in, or another class is registered under it.
        """

        def register(target: T) -> T:
            key = name or module_name or str(getattr(target, "__name__", target))
            registered = self._added.get(key)
            if key in self._builtin or (
                registered is not None and _path_of(registered) != _path_of(target) and not force
            ):
                owner = self._builtin.get(key) or _path_of(registered)
                raise ValueError(f"{self.names[0]}: {key!r} is {owner} already; register {_path_of(target)} as another")
            self._added[key] = target
            return target

        return register if module_cls is None else register(module_cls)

    def find(self, kind: str, name: str) -> Any | None:
        """Return the object registered under ``name``, in this process or in a plug-in folder; None if there is none.

        Raises:
            UnknownNameError: Several plug-ins register the name, or its plug-in cannot be imported.
        """
        if name in self._added:
            return self._added[name]
        try:
            place = find_registered(list(_added), self.names, kind, name)
        except ValueError as error:
            raise UnknownNameError(str(error)) from None
        return None if place is None else _at_path(kind, place[0])

    def added(self) -> list[str]:
        """Return the names that decorators add."""
        return sorted({*self._added, *registered_plugins(self.names)})


def _path_of(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"


def resolve(kind: str, name: str, table: Mapping[str, str] = NO_NAMES, entry_group: str | None = None) -> Any:
    """Return the object that ``name`` refers to.

    Args:
        kind: Kind of the object, for messages: ``workflow``, ``reward function``, ``operator``.
        name: A key of ``table``, a name under the entry-point group, a name that a decorator registers, or a dotted
            path ``package.module.Class``.
        table: Built-in names, each with ``module:attribute``, loaded on first use. A built-in never imports another
            built-in. A :class:`Registry` also has the names that its decorator adds.
        entry_group: Entry-point group under which installed packages add names. None: no entry points.

    Raises:
        UnknownNameError: The name does not exist, its module cannot be imported, or plug-ins register a built-in name
            or the same name several times. The message lists near misses.
    """
    try:
        if name in table:
            if _added and isinstance(table, Registry) and (others := registered_plugins(table.names).get(name)):
                raise UnknownNameError(
                    f"{kind} {name!r} is built in, and {' and '.join(others)} registers this name too: register yours "
                    f"under another name, or choose it by its dotted path, {others[0]}"
                )
            return _built_in(kind, name, table[name])
        if "." in name:
            return _at_path(kind, name)
        added = _entry_points(entry_group) if entry_group else {}
        if name in added:
            return _installed(kind, added[name])
        registry = table if isinstance(table, Registry) else None
        if registry is not None and (registered := registry.find(kind, name)) is not None:
            return registered
        raise _unknown_name(kind, name, {*table, *added, *(registry.added() if registry is not None else ())})
    except UnknownNameError as error:
        if name not in plugin_names() and (
            similar := [path for path in _similar_plugins(name) if path not in str(error)]
        ):
            raise UnknownNameError(f"{error} (in plugin_dirs there is {' and '.join(similar)})") from error.__cause__
        raise


def create(kind: str, name: str, table: Mapping[str, str], entry_group: str, base: type) -> Any:
    """Return a new object of the class that ``name`` refers to.

    Raises:
        UnknownNameError: The name does not exist, or does not refer to a subclass of ``base``.
    """
    cls = resolve(kind, name, table, entry_group)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UnknownNameError(f"{kind} {name!r} is {cls!r}, wanted a subclass of {_path_of(base)}")
    return cls()


def _unknown_name(kind: str, name: str, choices: Collection[str]) -> UnknownNameError:
    hint = suggest(name, sorted(choices), "known:", count=3, cutoff=0.5)
    end = "" if hint.endswith("?") else "."
    return UnknownNameError(
        f"unknown {kind} {name!r}; {hint}{end} Your own is named by its dotted path, package.module.Name, or by its "
        "registered name, with the folder of its file in plugin_dirs"
    )


def _built_in(kind: str, name: str, spec: str) -> Any:
    module, _, attribute = spec.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UnknownNameError(
            f"{kind} {name!r} needs a package that is not installed: {error}; install it next to trinity-mq"
        ) from error


def _installed(kind: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # an import may raise any error
        raise UnknownNameError(
            f"{kind} {point.name!r} of an installed package ({point.value}) cannot be loaded: {describe_error(error)}"
        ) from error


def _describe_import_error(error: BaseException) -> str:
    """Return error and place in one line. The place of a syntax error is the line with the wrong text."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({display_path(error.filename)}:{error.lineno})"
    return describe_error(error)


def _at_path(kind: str, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    _check_imports(kind, name, module)
    try:
        holder = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise any error while it is imported
        if (failed := _failed_import(kind, name, error)) is not None:
            raise failed from error
        is_absent = (
            isinstance(error, ModuleNotFoundError) and module.partition(".")[0] == (error.name or "").partition(".")[0]
        )
        advice = (
            ". It must be in the working directory, on PYTHONPATH or installed where this runs" if is_absent else ""
        )
        raise UnknownNameError(
            f"{kind} {name!r}: module {module!r} cannot be imported: {_describe_import_error(error)}{advice}"
        ) from error
    try:
        return getattr(holder, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(holder), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"{kind} {name!r}: module {module!r} has no {attribute!r}{hint}") from None


def _check_imports(kind: str, name: str, module: str) -> None:
    """Refuse a module in a plug-in folder that imports names of Trinity-RFT.

    Raises:
        UnknownNameError: The module imports such names. The message quotes the line and gives the line to write.
    """
    if module in sys.modules:
        return
    for file in (folder / f"{module}.py" for folder in _added):
        for node in required_imports(module_tree(file)) if file.is_file() else ():
            raise _old_import(kind, name, file, node)


def _failed_import(kind: str, name: str, error: BaseException) -> UnknownNameError | None:
    """Return the error about the import of Trinity-RFT that failed in a module, None if it was another import."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] != TRINITY:
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    for node in old_imports(module_tree(Path(frame.filename))):
        if node.lineno == frame.lineno:
            return _old_import(kind, name, Path(frame.filename), node)
    return None


def _old_import(kind: str, name: str, file: Path, node: ast.ImportFrom | ast.Import) -> UnknownNameError:
    result, place = rewritten(node), display_path(str(file))
    lines = "; ".join(line for line in result.lines if not is_old_line(line))
    advice = [f"write `{lines}`"] if lines else []
    advice += [f"{old} has no counterpart: {reason}" for _, old, reason in result.missing]
    return UnknownNameError(
        f"{kind} {name!r}: {place}:{node.lineno} has an import of Trinity-RFT, `{ast.unparse(node)}`: "
        f"{'; '.join(advice)}. `trinity-mq migrate {place} -o new.py` rewrites all such lines"
    )


def name_of(kind: str, obj: Any, table: Mapping[str, str]) -> str:
    """Return a name for which :func:`resolve` returns ``obj``, also in another process.

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


def _similar_plugins(name: str) -> list[str]:
    """Return the other classes in the plug-in folders whose names resemble the last part of ``name``."""
    core_names = {full: _core_name(full) for full in plugin_names() if full != name}
    similar = difflib.get_close_matches(_core_name(name), set(core_names.values()), n=3)
    return [repr(full) for full, core in core_names.items() if core in similar]


def _core_name(name: str) -> str:
    """Return the distinguishing part of a dotted path: most workflow classes are called SomethingWorkflow."""
    last = name.rpartition(".")[2]
    return last.lower().removesuffix("workflow").strip("_") or last


def _check_not_hidden(file: Path) -> None:
    loaded = sys.modules.get(file.stem)
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec(file.stem)
    actual = None if spec is None else spec.origin
    if actual is None or Path(actual).resolve() != file.resolve():
        raise FatalError(
            f"plugin_dirs: another module of the same name ({actual or loaded!r}) hides {file}; give the file a "
            "different name"
        )
