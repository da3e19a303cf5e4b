"""Plug-in folders: the user's own modules, which every agent of a run can import."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.runtime.errors import FatalError, describe_error

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
        for file in _modules(path):
            _check_not_hidden(file)
        _added[path] = None
    return paths


def plugin_names() -> list[str]:
    """Return the dotted paths of the classes in the added folders, such as ``my_file.Mine``.

    The files are read, not executed. A file that is not valid Python is left out; importing it gives the reason.
    """
    return sorted(
        f"{file.stem}.{node.name}"
        for folder in _added
        for file in _modules(folder)
        for node in _statements(file)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def registered_plugins(registries: Sequence[str]) -> dict[str, list[str]]:
    """Return the objects that modules in the added folders register by decorator: dotted paths by registered name.

    The files are read, not executed: ``@WORKFLOWS.register_module("mine")`` above a class ``Mine`` of ``my_file.py``
    gives ``{"mine": ["my_file.Mine"]}``.

    Args:
        registries: Names of the objects with ``register_module``, such as ``WORKFLOWS``.
    """
    files = [file for folder in _added for file in _modules(folder)]
    paths_by_name: dict[str, list[str]] = {}
    for file in files:
        for registry, name, owner in _registrations(file, file.stat().st_mtime_ns):
            if registry in registries:
                paths_by_name.setdefault(name, []).append(f"{file.stem}.{owner}")
    return paths_by_name


@functools.lru_cache(maxsize=1024)
def _registrations(file: Path, _changed: int) -> list[tuple[str, str, str]]:
    """Return registry, registered name and decorated name of each registration in a file."""
    registrations = []
    for node in _statements(file):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in node.decorator_list:
            match call:
                case ast.Call(
                    func=ast.Attribute(
                        attr="register_module", value=ast.Name(id=registry) | ast.Attribute(attr=registry)
                    ),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    registrations.append((registry, name, node.name))
    return registrations


def import_named(kind: str, name: str) -> Any:
    """Return the object with the dotted path ``name``, such as ``package.module.Class``.

    Args:
        kind: Kind of the object for error messages: ``workflow``, ``estimator``.
        name: The path.

    Raises:
        UnknownNameError: The module cannot be imported, or has no such attribute.
    """
    module, _, attribute = name.rpartition(".")
    try:
        holder = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise any error while it is imported
        raise UnknownNameError(
            f"{kind} {name!r}: module {module!r} cannot be imported: {describe_error(error)}. "
            "It must be on PYTHONPATH or installed where this runs"
        ) from error
    try:
        return getattr(holder, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(holder), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"{kind} {name!r}: module {module!r} has no {attribute!r}{hint}") from None


def _modules(folder: Path) -> Iterator[Path]:
    """Yield the modules of a folder. Modules with a leading underscore are private to the folder."""
    return (file for file in sorted(folder.glob("*.py")) if file.stem.isidentifier() and not file.stem.startswith("_"))


def _statements(file: Path) -> list[ast.stmt]:
    try:
        return ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _check_not_hidden(file: Path) -> None:
    loaded = sys.modules.get(file.stem)
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec(file.stem)
    actual = None if spec is None else spec.origin
    if actual is None or Path(actual).resolve() != file.resolve():
        raise FatalError(
            f"plugin_dirs: {file} is hidden by another module of that name ({actual or loaded!r}); give the file a "
            "name of its own"
        )
