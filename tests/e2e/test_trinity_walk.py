"""The walk of docs/from-trinity.md, as written and in its order: the commands work, and print what the page shows."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.unit.trinity_rft.test_convert import database
from trinity_mq.config import ModelConfig
from trinity_mq.models import ensure_model_folder

ROOT = Path(__file__).parents[2]
SECTION = "\n## A walk in an hour\n"
TINY = {
    "characters": "\n ,.?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "max_position_embeddings": 1024,
}
MARK = "@@ next"

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.extended, pytest.mark.timeout(600)]


def steps() -> list[tuple[str, list[str]]]:
    """Return the commands of the console blocks, each with the lines of output that the page shows."""
    page = (ROOT / "docs" / "from-trinity.md").read_text(encoding="utf-8")
    text = page.partition(SECTION)[2].partition("\n## ")[0]
    lines = "".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL)).splitlines()
    commands: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    return commands


def shows(answer: str, shown: list[str]) -> bool:
    """Return whether the lines of the page are lines of the output, in their order, and without ``...`` all of them.
    Seconds and decimal numbers may differ.
    """
    lines = answer.strip("\n").splitlines()
    patterns = [
        re.sub(r"\d+\\\.\d+|\d+(?=\\ s\b)", r"[\\d.]+", re.escape(line)).replace(r"\.\.\.", ".*")
        for line in shown
        if line != "..."
    ]
    rest = iter(lines)
    in_order = all(any(re.fullmatch(pattern, line) for line in rest) for pattern in patterns)
    return in_order and ("..." in shown or len(lines) == len(shown))


def old_run(folder: Path) -> None:
    """Write what a run of Trinity-RFT left: a checkpoint, with the weights of its last sync, and a buffer."""
    sizes = {"max_model_len": 1024, "max_prompt_tokens": 512, "max_response_tokens": 512}
    model = ensure_model_folder(ModelConfig.model_validate({"tiny": TINY, **sizes}), folder / "model", 0)
    actor = folder / "global_step_5" / "actor"
    shutil.copytree(model, actor / "huggingface")
    weights = actor / "huggingface" / "model.safetensors"
    save_file(load_file(weights), actor / "model.safetensors")
    weights.unlink()
    shutil.rmtree(model)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    (folder / "buffer").mkdir()
    database(folder / "buffer" / "explorer_output.db")


async def test_each_command_works_and_prints_what_is_shown(tmp_path: Path) -> None:
    project = tmp_path / "my-project"
    shutil.copytree(ROOT / "examples" / "trinity-project", project)
    old_run(project / "checkpoints" / "word-sums" / "gsm8k")
    script = tmp_path / "bin" / "trinity-mq"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m trinity_mq.cli.main "$@"\n')
    script.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRINITY_MQ_BROKER_URL")}
    environment["PATH"] = f"{script.parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'agents'}"
    commands = steps()
    text = "".join(f"{command} || echo ended with $?\necho; echo '{MARK}'\n" for command, _ in commands)
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", text, cwd=project, env=environment, start_new_session=True,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            await process.communicate()
    answers = output.decode().split(f"\n{MARK}\n")
    assert len(answers) == len(commands) + 1
    for (command, shown), answer in zip(commands, answers, strict=False):
        assert "ended with" not in answer, f"{command}\n{answer}"
        assert shows(answer, shown), f"{command}\n{answer}"
    assert (project / "first-weights" / "model.safetensors").is_file()
    left = project / "checkpoints" / "word-sums" / "gsm8k"
    assert (left / "global_step_5" / "actor" / "model.safetensors").is_file(), "a run leaves the files of the old one"
