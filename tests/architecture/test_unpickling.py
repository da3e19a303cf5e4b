"""Nothing in the library unpickles without limits what another process or another person wrote."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("trinity_mq", "agents") for path in (ROOT / folder).rglob("*.py"))
RESTRICTED = {
    "trinity_mq/experience/legacy/unpickle.py",
    "trinity_mq/training/checkpoints/state.py",
}
"""Modules with an unpickler that admits a list of names."""
UNLIMITED = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "read_pickle", "FileSystemReader"}
LIBRARIES = {"cloudpickle", "dill", "joblib", "marshal", "shelve"}


def faults(source: str, *, may_subclass: bool = False) -> Iterator[str]:
    """Yield what loads pickles without limits in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            names = {one.name for one in node.names}
            yield from (f"line {node.lineno}: {one}" for one in modules if one.partition(".")[0] in LIBRARIES)
            unlimited = {"load", "loads", "Unpickler"} if "pickle" in modules else {"FileSystemReader"}
            yield from (f"line {node.lineno}: {one}" for one in names & unlimited if not may_subclass)
        elif isinstance(node, ast.Call):
            yield from (f"line {node.lineno}: {one}" for one in unlimited_call(node))


def unlimited_call(node: ast.Call) -> Iterator[str]:
    """Yield what a call loads without limits."""
    called, options = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
    if called == "torch.load" and options.get("weights_only") == "True":
        return
    if any(called == one or called.endswith(f".{one}") for one in UNLIMITED):
        yield called
    if options.get("weights_only") == "False" or options.get("allow_pickle") == "True":
        yield f"{called}, {options}"
    if called == "yaml.load" and not options.get("Loader", "").endswith("SafeLoader"):
        yield called


def test_no_module_unpickles_without_limits() -> None:
    seen: dict[str, list[str]] = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        seen[name] = list(faults(path.read_text(encoding="utf-8"), may_subclass=name in RESTRICTED))
    assert len(seen) > 500
    assert {name: found for name, found in seen.items() if found} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle\npickle.Unpickler(file).load()",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import joblib",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "import torch\ntorch.distributed.checkpoint.FileSystemReader('x')",
    ],
)
def test_each_way_to_do_so_would_be_seen(source: str) -> None:
    assert list(faults(source))


def test_what_is_limited_is_not_taken_for_it() -> None:
    assert not list(faults("import torch\ntorch.load('x', weights_only=True)\nimport json\njson.loads('1')"))
