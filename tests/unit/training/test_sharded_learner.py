"""A learner on two ranks over gloo does what one process does, and each goes on from the other's checkpoints."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.sharded_rank import experiences, flats_of, settings, train
from tests.unit.training.test_learner import Opener
from trinity_mq.runtime.errors import EXIT_RESTART
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.parallel.ranks import own_device, own_rank, world_size

WHOLE = ["grpo", "kl_cov", "mini_batches", "dpo", "ppo", "lora"]

pytestmark = pytest.mark.timeout(240)  # two processes import torch and FSDP


async def run_ranks(folder: Path, out: Path, *cases: str, begins: Path | None = None, **environment: str) -> Any:
    """Train the cases on two ranks to step 3, from a checkpoint of step 2 if one is given; return the exit code of rank
    0 and what both said.
    """
    out.mkdir()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.training.sharded_rank", str(folder), str(out), str(begins or "")),
        *cases,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **environment},
    )
    try:
        async with asyncio.timeout(200):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode()


async def two_ranks(folder: Path, out: Path, *cases: str, begins: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return what rank 0 found of each case."""
    code, said = await run_ranks(folder, out, *cases, begins=begins)
    assert code == 0, said
    return {case: torch.load(out / case / "found.pt", weights_only=True) for case in cases}


def apart(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Return what does not depend on the time, nor on how a step is cut."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("time/", "perf/")) and not math.isnan(value)
    }


async def test_weights_metrics_and_checkpoints_are_those_of_one_process(
    folder: Path, opened: Opener, tmp_path: Path
) -> None:
    alone: dict[str, tuple[list[dict[str, float]], TorchLearner]] = {}
    for case in WHOLE:
        learner = await opened(settings(case))
        alone[case] = (await train(learner, case, 1, 3), learner)
    out = tmp_path / "out"
    found = await two_ranks(folder, out, *WHOLE)
    for case, (metrics, learner) in alone.items():
        assert apart(found[case]["flats"], await flats_of(learner)) < 1e-6, case
        assert found[case]["canary"] == pytest.approx(await learner.canary_logprobs([2, 3, 4, 5]), abs=1e-5), case
        for one, other in zip(found[case]["metrics"], metrics, strict=True):
            assert comparable(one) == pytest.approx(comparable(other), abs=1e-5, rel=1e-4), case
        # a checkpoint of two ranks is gone on from by one process
        again = await opened(settings(case), checkpoint=out / case / "saved")
        assert apart(await flats_of(again), found[case]["flats"]) == 0.0, case
        await again.step(experiences(case, 4), 4)
        await learner.step(experiences(case, 4), 4)
        assert apart(await flats_of(again), await flats_of(learner)) < 1e-6, case


async def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(folder: Path, opened: Opener, tmp_path: Path) -> None:
    learner = await opened(settings("grpo"))
    (tmp_path / "damaged").mkdir()
    await learner.save(tmp_path / "damaged")
    for part in (tmp_path / "damaged" / "state").iterdir():
        part.write_bytes(b"no")
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", DAMAGED=str(tmp_path / "damaged"))
    assert code == 0, said
    found = torch.load(tmp_path / "out" / "grpo" / "found.pt", weights_only=True)
    await train(learner, "grpo", 1, 3)
    assert apart(found["flats"], await flats_of(learner)) < 1e-6


async def test_a_checkpoint_that_one_rank_alone_cannot_read_is_passed_over_by_all(
    folder: Path, opened: Opener, tmp_path: Path
) -> None:
    learner = await opened(settings("grpo"))
    await train(learner, "grpo", 1, 2)
    (tmp_path / "whole").mkdir()
    await learner.save(tmp_path / "whole")
    whole = str(tmp_path / "whole")
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", DAMAGED=whole, FAILS_AT="open", FAILS_WITH="damage")
    assert code == 0, said
    first = await opened(settings("grpo"))
    await train(first, "grpo", 1, 3)
    found = torch.load(tmp_path / "out" / "grpo" / "found.pt", weights_only=True)
    assert apart(found["flats"], await flats_of(first)) < 1e-6


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("step", "fault"),
        pytest.param("step", "memory", marks=pytest.mark.extended),
        *(pytest.param(one, "fault", marks=pytest.mark.extended) for one in ("canary", "copy", "gather")),
    ],
)
async def test_a_command_that_fails_on_one_rank_fails_on_rank_0_with_its_reason(
    folder: Path, tmp_path: Path, command: str, fault: str
) -> None:
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", FAILS_AT=command, FAILS_WITH=fault)
    assert code != 0, said
    reasons = {"memory": "rank 1 failed first: no memory is left", "fault": "on rank 1 of 2: it does not load"}
    assert reasons[fault] in said
    assert not list((tmp_path / "out").glob("*/saved/state")), "no part of a checkpoint"


@pytest.mark.parametrize(
    "command",
    ["step", *(pytest.param(one, marks=pytest.mark.extended) for one in ("open", "canary", "copy", "gather"))],
)
async def test_a_rank_that_dies_at_any_command_ends_rank_0_for_a_restart(
    folder: Path, tmp_path: Path, command: str
) -> None:
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", KILLED_AT=command)
    assert code == EXIT_RESTART, said
    assert "rank error: " in said
    assert not list((tmp_path / "out").glob("*/saved/state")), "no part of a checkpoint"


@pytest.mark.parametrize("command", ["step", pytest.param("open", marks=pytest.mark.extended)])
async def test_without_rank_0_the_others_end(folder: Path, tmp_path: Path, command: str) -> None:
    """Their end closes the output that is read here."""
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", KILLS_RANK_0_AT=command)
    assert code == -signal.SIGKILL, said


def test_what_a_cluster_says_of_ranks_of_its_own_is_not_about_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (own_rank(), own_device(0), world_size(1)) == (0, 0, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (own_rank(), own_device(0), world_size(1)) == (3, 1, 8)
