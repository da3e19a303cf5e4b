"""The imports of Trinity-RFT's plug-ins: one table from a public name there to its import here, ``imports.csv`` of the
package ``trinity_mq.trinity_rft``, for the error about such an import and for ``trinity-mq migrate plugin.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from trinity_mq.config.trinity_names import table_rows

TRINITY = "trinity"
"""Top-level package of Trinity-RFT."""
PLUGINS = "trinity.plugins."
"""Prefix of the names of plug-in modules there. Here the modules of a folder in ``plugin_dirs`` are imported by their
own names."""
ANY = "*"
"""Name in a row that applies to all names of a module and of its submodules without a row of their own."""


@dataclass(frozen=True, slots=True)
class OldImport:
    """A public name of Trinity-RFT, a row of the table."""

    module: str
    """Module there."""
    name: str
    """Name in the module, or ``*``."""
    new_module: str
    """Module here. Empty: the name has no counterpart."""
    new_name: str
    """Name here."""
    comment: str
    """Reason why the name has no counterpart, or a difference."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """An import statement of Trinity-RFT, and the statements that replace it."""

    node: ast.ImportFrom | ast.Import
    lines: tuple[str, ...]
    """Statements with the same effect. Names without a counterpart keep their import."""
    missing: tuple[tuple[int, str, str], ...]
    """Names without a counterpart, each with its line and the reason."""


@cache
def trinity_imports() -> Sequence[OldImport]:
    """Return the rows of the table."""
    return table_rows("trinity_mq.trinity_rft", "imports.csv", OldImport)


@cache
def _tables() -> tuple[dict[tuple[str, str], OldImport], dict[str, set[tuple[str, str]]]]:
    """Return the rows by module and name, and the imports here by name."""
    rows = {(row.module, row.name): row for row in trinity_imports()}
    imports: dict[str, set[tuple[str, str]]] = {}
    for row in rows.values():
        if row.new_module:
            imports.setdefault(row.name, set()).add((row.new_module, row.new_name))
    return rows, imports


def counterpart(module: str, name: str) -> OldImport:
    """Return the row of a name. A plug-in module's name is imported here from the module itself, without the prefix
    :data:`PLUGINS`. If another name does not have its own row, return the only import here of the same name, since
    modules there also export the names that they import; else the row of its module or of a package above. Without any
    row, the result says that the name does not have a counterpart.
    """
    rows, imports = _tables()
    if module.startswith(PLUGINS):
        return OldImport(module, name, module.removeprefix(PLUGINS), name, "")
    if (row := rows.get((module, name))) is not None:
        return row
    if len(places := imports.get(name, set())) == 1:
        return OldImport(module, name, *next(iter(places)), "")
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        if (row := rows.get((".".join(parts[:count]), ANY))) is not None:
            return OldImport(module, name, "", "", row.comment)
    return OldImport(module, name, "", "", "it is not a public name of Trinity-RFT 0.6")


def old_imports(tree: ast.AST) -> Iterator[ast.ImportFrom | ast.Import]:
    """Yield the import statements of Trinity-RFT in a module, in the order of its lines."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import) and _is_old(node)]
    yield from sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def required_imports(tree: ast.AST) -> Iterator[ast.ImportFrom | ast.Import]:
    """Yield the import statements of Trinity-RFT without which a module cannot be used: all except imports in a ``try``
    statement or below ``TYPE_CHECKING``, which may fail.
    """
    waiting = list(ast.iter_child_nodes(tree))[::-1]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom | ast.Import):
            if _is_old(node):
                yield node
        elif not isinstance(node, ast.Try) and not _is_type_checking(node):
            waiting.extend(list(ast.iter_child_nodes(node))[::-1])


def rewritten(node: ast.ImportFrom | ast.Import) -> Rewritten:
    """Return the statements that replace an import statement of Trinity-RFT."""
    if isinstance(node, ast.Import):
        return _rewritten_modules(node)
    names_by_module: dict[str, list[str]] = {}
    missing: list[tuple[int, str, str]] = []
    for alias in node.names:
        row = counterpart(str(node.module), alias.name)
        if not row.new_module:
            missing.append((alias.lineno, f"{node.module}.{alias.name}", row.comment))
            names_by_module.setdefault(str(node.module), []).append(_with_alias(alias.name, alias.asname))
            continue
        bound = alias.asname or alias.name
        names_by_module.setdefault(row.new_module, []).append(
            _with_alias(row.new_name, None if bound == row.new_name else bound)
        )
    lines = tuple(f"from {module} import {', '.join(names)}" for module, names in names_by_module.items())
    return Rewritten(node, lines, tuple(missing))


def is_old_line(line: str) -> bool:
    """Return whether an import statement imports from Trinity-RFT."""
    return any(True for _ in old_imports(ast.parse(line)))


def _rewritten_modules(node: ast.Import) -> Rewritten:
    """Rewrite an ``import`` statement. A whole module of Trinity-RFT does not have a counterpart, except a plug-in
    module with an alias.
    """
    kept, missing = [], []
    for alias in node.names:
        module = alias.name
        if module.startswith(PLUGINS) and alias.asname:
            kept.append(_with_alias(module.removeprefix(PLUGINS), alias.asname))
            continue
        kept.append(_with_alias(module, alias.asname))
        if module.partition(".")[0] == TRINITY:
            reason = "a module as a whole; import the names that are used, `from module import name`"
            missing.append((alias.lineno, module, reason))
    return Rewritten(node, (f"import {', '.join(kept)}",), tuple(missing))


def _with_alias(name: str, alias: str | None) -> str:
    return name if alias is None else f"{name} as {alias}"


def _is_old(node: ast.ImportFrom | ast.Import) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and str(node.module).partition(".")[0] == TRINITY
    return any(alias.name.partition(".")[0] == TRINITY for alias in node.names)


def _is_type_checking(node: ast.AST) -> bool:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
    return False
