"""Ranks of a trainer are killed, and frozen: it begins anew as a whole, and no experience counts twice."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from trinity_agents.trainer.history import last_generation, lineage
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
BATCHES = 50

pytestmark = [
    pytest.mark.extended,
    pytest.mark.chaos,
    pytest.mark.e2e,
    pytest.mark.any_broker,
    pytest.mark.timeout(500),
]


def rank_1(run: LocalRun) -> psutil.Process:
    pid = run.pid("trainer-0")
    assert pid is not None
    [child] = [one for one in psutil.Process(pid).children() if "trainer" in one.cmdline()]
    return child


async def test_killed_and_frozen_ranks_cost_time_and_nothing_else(tmp_path: Path) -> None:
    settings = (
        "trainer.nproc=2",
        "trainer.rank_timeout=10",
        "trainer.save_interval=7",
        f"buffer.total_steps={BATCHES}",
    )
    ended: list[psutil.Process] = []
    async with LocalRun(SMOKE, tmp_path / "run", settings) as run:
        for number, signum in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            await run.until_progress(10 * number, 180.0)
            ended.append(rank_1(run))
            ended[-1].send_signal(signum)
        await run.until_progress(30, 180.0)
        ended.append(rank_1(run))
        run.kill("trainer-0")
        code, output = await run.ended(300.0)
    assert code == 0, output
    assert not [one for one in ended if one.is_running()]
    generation = last_generation(tmp_path / "run" / "history")
    assert generation == 4, "each time the trainer as a whole began anew, once"
    history = lineage(tmp_path / "run" / "history", generation, BATCHES)
    assert [entry["batch"] for entry in history] == list(range(1, BATCHES + 1))
    assert all(entry["outcome"] == "trained" for entry in history)
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len(uids) == len(set(uids)) == BATCHES * 16 * 8
    accuracy = dict(run.values("eval/max3_held_out/accuracy/mean@1"))
    assert accuracy[BATCHES] >= accuracy[0] + 0.3
