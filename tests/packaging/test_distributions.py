"""Wheel and sdist: what is in them, and what they can do in an environment that has never seen the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1200)]

PACKAGES = ("trinity_mq/", "agents/trinity_agents/")
IN_SDIST = (
    *("README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "MANIFEST.in"),
    *("constraints-cpu.txt", "deploy/requirements-hashed.txt"),
)
EXAMPLES = "trinity_mq/examples"
"""A link in the checkout; its files are in wheel and sdist."""
MADE = re.compile(r"PKG-INFO|setup\.cfg|[^/]*\.egg-info/.*|agents/[^/]*\.egg-info/.*")
SIMULATE = """
import sys, tempfile
from pathlib import Path
import trinity_mq, trinity_agents
from trinity_agents.simulation import Simulation
from trinity_mq.testing.virtual_time import run_virtually
for package in (trinity_mq, trinity_agents):
    assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
sim = Simulation(Path(tempfile.mkdtemp()), batches=4)
run_virtually(sim.run(), limit=1000)
print(sim.learners[0].steps, trinity_mq.__version__)
"""


def in_wheel(built: Built) -> set[str]:
    with zipfile.ZipFile(built.wheel) as wheel:
        return {name for name in wheel.namelist() if not name.endswith("/")}


def metadata(built: Built) -> str:
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return wheel.read(name).decode()


def test_the_wheel_holds_every_tracked_file_of_the_packages_and_nothing_else(built):
    code = {name.removeprefix("agents/") for name in built.tracked if name.startswith(PACKAGES)}
    code.remove(EXAMPLES)
    code |= {f"trinity_mq/{name}" for name in built.tracked if name.startswith("examples/")}
    found = in_wheel(built)
    assert {name for name in found if ".dist-info/" not in name} == code
    for name in ("trinity_mq/py.typed", "trinity_agents/py.typed", "trinity_mq/page/static/dash.js"):
        assert name in found
    assert any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", name) for name in found)


def test_the_sdist_holds_what_a_wheel_is_built_of_and_the_schemas_and_nothing_untracked(built):
    with tarfile.open(built.sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = {
        name
        for name in built.tracked
        if name.startswith(PACKAGES)
        or name in IN_SDIST
        or re.fullmatch(r"schemas/[^/]+\.json|schemas/README\.md", name)
    }
    wanted.remove(EXAMPLES)
    wanted |= {f"trinity_mq/{name}" for name in built.tracked if name.startswith("examples/")}
    assert len([name for name in wanted if name.startswith("schemas/")]) > 20
    assert {name for name in found if not MADE.fullmatch(name)} == wanted
    assert not found & set(UNTRACKED)


def test_the_metadata_say_licence_python_and_dependencies(built):
    said = Parser().parsestr(metadata(built))
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    assert said["Requires-Python"] == ">=3.11"
    needed = {re.match(r"[\w.-]+", one)[0].lower() for one in said.get_all("Requires-Dist") if "extra ==" not in one}
    assert {"aio-pika", "torch", "pydantic"} <= needed
    assert not needed & {"pytest", "mypy", "ruff", "build"}


class TestInACleanEnvironment:
    def test_nothing_conflicts_and_no_tool_of_development_came_along(self, clean):
        clean.pip("check")
        listing = "from importlib.metadata import distributions; print(*(one.name.lower() for one in distributions()))"
        names = set(clean.run("-c", listing).split())
        assert "trinity-mq" in names
        assert not names & {"pytest", "mypy", "ruff", "hypothesis", "trl", "build"}

    def test_the_command_and_its_subcommands_are_there(self, clean):
        said = clean.command("--help")
        for word in ("run", "doctor", "validate", "submit"):
            assert re.search(rf"^\s+{word}\s", said, re.MULTILINE)

    def test_an_example_is_valid(self, clean):
        shutil.copy(ROOT / "examples" / "smoke.yaml", clean.folder)
        assert "smoke" in clean.command("validate", "smoke.yaml")

    def test_it_writes_the_schemas_that_the_checkout_publishes(self, clean):
        clean.command("schema", "--out", "schemas")
        made = {path.name: path.read_text() for path in (clean.folder / "schemas").glob("*.json")}
        assert len(made) > 20
        assert made == {name: (ROOT / "schemas" / name).read_text() for name in made}

    def test_a_whole_run_on_memory_bus_in_virtual_time(self, clean):
        assert clean.run("-c", SIMULATE).splitlines()[-1].startswith("[1, 2, 3, 4] ")


def test_the_sdist_installs_the_same_files(built: Built, clean: Clean, tmp_path: Path):
    """Into an environment that has the dependencies, from the file alone."""
    ran([clean.python, "-m", "venv", tmp_path / "venv"], tmp_path, 120)
    python = tmp_path / "venv" / "bin" / "python"
    ran([python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", built.sdist], tmp_path, 300)
    assert "doctor" in ran([python.with_name("trinity-mq"), "--help"], tmp_path, 60), (
        "it needs no dependency to say that"
    )
    listing = "from importlib.metadata import files; print(*files('trinity-mq'), sep='\\n')"
    found, wanted = (
        {line for line in ran([one, "-c", listing], tmp_path, 60).splitlines() if line.startswith("trinity_")}
        for one in (python, clean.python)
    )
    code = {name for name in found if ".dist-info/" not in name and "__pycache__" not in name}
    assert code == {name for name in wanted if ".dist-info/" not in name and "__pycache__" not in name}
    assert len(code) > 400


ROOT = Path(__file__).parents[2]
UNTRACKED = (
    "runs/leftover/metrics.jsonl", "models/weights.safetensors", "data/gsm8k.jsonl", "notes.txt", ".env",
    "trinity_mq/notes.txt", "trinity_mq/config/secret.json", "agents/trinity_agents/trainer/dump.tmqx",
    "schemas/clients/local.json",
)  # fmt: skip
"""What may lie about in a checkout, and must not get into a distribution."""


def tracked() -> list[str]:
    """Return the files of the checkout that git tracks and that are there."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"what is tracked is not known: {done.stderr.strip()}")
    return [name for name in done.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


def ran(command: Sequence[str | Path], cwd: Path, seconds: float, **environment: str) -> str:
    """Run a command without the checkout on Python's path, and return what it printed; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=kept | environment, timeout=seconds, check=False, **streams)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    """The distributions, and the tracked files that they were built of."""

    wheel: Path
    sdist: Path
    tracked: list[str]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build an sdist, and a wheel from it, as a release is built: in an environment of its own."""
    pytest.importorskip("build", reason="the extra supply is not installed")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = tracked()
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    for name in UNTRACKED:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("not tracked")
    ran([sys.executable, "-m", "build", "--outdir", out, source], out, 300)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist, names)


@dataclass(frozen=True)
class Clean:
    """An environment with the wheel, its pinned dependencies, and nothing else; and an empty folder to work in."""

    python: Path
    folder: Path

    def run(self, *words: str | Path, seconds: float = 120.0) -> str:
        """Run Python in the folder, where no checkout is."""
        return ran([self.python, *words], self.folder, seconds, HF_HUB_OFFLINE="1")

    def pip(self, *words: str | Path, seconds: float = 900.0) -> str:
        """Run pip."""
        return self.run("-m", "pip", "--disable-pip-version-check", "-q", *words, seconds=seconds)

    def command(self, *words: str | Path) -> str:
        """Run ``trinity-mq``."""
        return ran([self.python.with_name("trinity-mq"), *words], self.folder, 120.0)


@pytest.fixture(scope="session")
def clean(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """Make the environment: minutes, of which pip's cache saves most the next time."""
    folder = tmp_path_factory.mktemp("clean")
    ran([sys.executable, "-m", "venv", folder / "venv"], folder, 120)
    (folder / "work").mkdir()
    found = Clean(folder / "venv" / "bin" / "python", folder / "work")
    found.pip("install", "-c", ROOT / "constraints-cpu.txt", built.wheel)
    return found


# -- type hints as a package that depends on this one sees them: mypy --strict against the installed wheel

DOWNSTREAM = Path(__file__).with_name("downstream")
WANTED = re.compile(r"# E: ([\w-]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def mypy_output(clean: Clean) -> str:
    """The whole package checked at once: most of the time goes into the dependencies."""
    folder = clean.folder / "downstream"
    folder.mkdir()
    for name in ("good.py", "bad.py"):
        (folder / name).write_text((DOWNSTREAM / name).read_text(encoding="utf-8"), encoding="utf-8")
    words = ["--strict", "--python-executable", clean.python, "--no-error-summary", "--hide-error-context"]
    # exit code 1: the errors of bad.py
    mypy = (
        f"{sys.executable} -m mypy --no-pretty --config-file= {' '.join(map(str, words))} good.py bad.py; test $? = 1"
    )
    return ran(["sh", "-c", mypy], folder, 600)


def lines(output: str, name: str) -> set[tuple[int, str]]:
    matches = re.findall(rf"^{name}:(\d+): error: .*\[([\w-]+)\]$", output, re.MULTILINE)
    return {(int(number), code) for number, code in matches}


def test_the_documented_interface_passes_strict(mypy_output):
    assert lines(mypy_output, "good.py") == set(), mypy_output


def test_every_wrong_use_is_an_error(mypy_output):
    text = (DOWNSTREAM / "bad.py").read_text(encoding="utf-8")
    wanted = {(number, found[1]) for number, line in enumerate(text.splitlines(), 1) if (found := WANTED.search(line))}
    assert len(wanted) > 10
    assert lines(mypy_output, "bad.py") == wanted, mypy_output


def test_no_error_is_in_the_package_itself(mypy_output):
    assert [
        line for line in mypy_output.splitlines() if "error:" in line and not line.startswith(("good.py", "bad.py"))
    ] == []
