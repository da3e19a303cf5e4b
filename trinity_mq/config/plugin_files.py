"""The user's modules in the folders of ``plugin_dirs``, read without executing them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Registration:
    """A class or function that a module registers under a name."""

    registry: str
    """Name of the registry's variable, such as ``WORKFLOWS``."""
    name: str
    """Registered name."""
    owner: str
    """Name of the class or function in its module."""
    parameters: tuple[str, ...] = ()
    """Parameters of the class's ``__call__``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Literal that the class's ``default_config`` returns, empty without such a literal."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Literals that the class body assigns to names."""


def plugin_files(folder: Path) -> Iterator[Path]:
    """Yield the modules of a folder. Modules with a leading underscore are private to the folder."""
    return (file for file in sorted(folder.glob("*.py")) if file.stem.isidentifier() and not file.stem.startswith("_"))


def module_tree(file: Path) -> ast.Module:
    """Return the syntax tree of a module. It is empty if the file cannot be read or is not valid Python."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def registered_paths(folders: Sequence[Path]) -> dict[tuple[str, str], list[tuple[str, Registration]]]:
    """Return the registrations in the modules of ``folders``: dotted path and registration, by registry and name."""
    result: dict[tuple[str, str], list[tuple[str, Registration]]] = {}
    for folder in folders:
        for file in plugin_files(folder):
            try:
                changed = file.stat().st_mtime_ns
            except OSError:  # a broken link
                continue
            for entry in registrations(file, changed):
                result.setdefault((entry.registry, entry.name), []).append((f"{file.stem}.{entry.owner}", entry))
    return result


def find_registered(
    folders: Sequence[Path], registries: Sequence[str], kind: str, name: str
) -> tuple[str, Registration] | None:
    """Return the dotted path and the registration of a name, None if no module in ``folders`` registers it.

    Raises:
        ValueError: Several modules register the name; the message begins with ``kind``.
    """
    paths = registered_paths(folders)
    places = [place for registry in registries for place in paths.get((registry, name), [])]
    if len(places) > 1:
        owners = " and by ".join(path for path, _ in places)
        raise ValueError(f"{kind} {name!r} is registered by {owners}: rename one of them")
    return places[0] if places else None


@functools.lru_cache(maxsize=1024)
def registrations(file: Path, _changed: int) -> list[Registration]:
    """Return the registrations in a module: by decorator, ``@WORKFLOWS.register_module("mine")``, or by a call,
    ``WORKFLOWS.register_module("mine", Mine)``.

    Args:
        file: The module.
        _changed: Time of its last change, so that a changed file is read again.
    """
    body = module_tree(file).body
    owners = {
        node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    result = []
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if registered := _registered(decorator):
                    result.append(_described(*registered, node))
        elif isinstance(node, ast.Expr) and (registered := _registered(node.value)):
            assert isinstance(node.value, ast.Call)
            match _argument(node.value, 1, "module_cls"):
                case ast.Name(id=owner) if owner in owners:
                    result.append(_described(*registered, owners[owner]))
    return result


def _registered(node: ast.expr) -> tuple[str, str] | None:
    """Return registry and name of a call of ``register_module``, None for another expression."""
    match node:
        case ast.Call(
            func=ast.Attribute(attr="register_module", value=ast.Name(id=registry) | ast.Attribute(attr=registry))
        ):
            match _argument(node, 0, "module_name", "name"):
                case ast.Constant(value=str(name)):
                    return registry, name
    return None


def _argument(call: ast.Call, place: int, *names: str) -> ast.expr | None:
    if len(call.args) > place:
        return call.args[place]
    return next((keyword.value for keyword in call.keywords if keyword.arg in names), None)


def _described(registry: str, name: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Registration:
    if not isinstance(node, ast.ClassDef):
        return Registration(registry, name, node.name)
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    called = methods.get("__call__")
    arguments = () if called is None else (*called.args.posonlyargs, *called.args.args, *called.args.kwonlyargs)
    attributes = {}
    for item in node.body:
        match item:
            case (
                ast.Assign(targets=[ast.Name(id=key)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=key), value=ast.expr() as value)
            ):
                attributes[key] = _literal(value)
    return Registration(
        registry,
        name,
        node.name,
        tuple(argument.arg for argument in arguments),
        _returned_literal(methods.get("default_config")),
        attributes,
    )


def _returned_literal(method: ast.FunctionDef | None) -> Mapping[str, Any]:
    for node in [] if method is None else method.body:
        if isinstance(node, ast.Return) and node.value is not None:
            value = _literal(node.value)
            return value if isinstance(value, dict) else {}
    return {}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
