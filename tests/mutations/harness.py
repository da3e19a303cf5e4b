"""Makes one change in a copy of the project, and runs a test there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutations.table import Mutation

ROOT = Path(__file__).parents[2]
LIMIT = 240.0
"""Seconds that a test may take."""
COPIED = ("trinity_mq", "agents", "tests", "examples", "schemas", "docs", "conftest.py", "pyproject.toml")


def copied(folder: Path) -> Path:
    """Return a copy of what tests of the library need; compiled modules stay valid in it."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_with(mutation: Mutation, copy: Path, *options: str) -> tuple[int, str]:
    """Make the change in ``copy``, run its test there, undo the change; return pytest's exit code and what it said."""
    original, path = ROOT / mutation.file, copy / mutation.file
    text = original.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.code, mutation.becomes), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'agents'}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, f"tests/{mutation.test}"],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    finally:
        shutil.copy2(original, path)
    return ended.returncode, ended.stdout + ended.stderr
