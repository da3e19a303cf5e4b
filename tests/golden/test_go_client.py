"""The Go client's own tests: its decoder against the golden bodies, hostile ones, replies out of order."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.golden.forms import GOLDEN

CLIENT = Path(__file__).parents[2] / "schemas" / "clients" / "go"
PACKAGES = ("trinitymq", "trinitymq/cmd/trinity-mq-submit")
UNAVAILABLE = 69

pytestmark = pytest.mark.timeout(180)  # the first of them compiles


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "go-cache"  # shared with the tests on a broker


def go(cache: Path, *words: str) -> str:
    """Return what a go command said; skip where there is no Go or not the libraries."""
    environment = os.environ | {"GOCACHE": str(cache), "TRINITY_MQ_GOLDEN": str(GOLDEN)}
    done = subprocess.run(
        [CLIENT / "offline", "go", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_go_test_go_vet_and_gofmt(cache: Path) -> None:
    said = go(cache, "test", "-count=1", "-v", *PACKAGES)
    # as many cases as there are bodies: none is left out by its name
    bodies = len(list((GOLDEN / "experiences").glob("v1.*.tmqx")))
    assert bodies > 10
    assert said.count("--- PASS: TestGoldenExperiences/") == bodies
    go(cache, "vet", *PACKAGES)
    if gofmt := shutil.which("gofmt"):
        assert subprocess.run([gofmt, "-l", CLIENT], capture_output=True, text=True, check=True).stdout == ""
