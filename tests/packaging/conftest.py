"""Distributions built from what git tracks, and a clean environment in which the wheel is installed: once a session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

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
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def ran(command: Sequence[str | Path], cwd: Path, seconds: float, **environment: str) -> str:
    """Run a command without the checkout on Python's path, and return what it printed; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
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
        shutil.copy(ROOT / name, source / name)
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
