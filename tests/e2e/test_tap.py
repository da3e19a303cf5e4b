"""A run that trains on what another one sees, as real processes, each on a private broker of its own."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.metric_names import undocumented
from tests.processes import completed
from trinity_agents.trainer.history import last_generation, lineage
from trinity_mq.cli.main import main
from trinity_mq.testing.runs import LocalRun

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(400)]

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"


def entries(run: Path, progress: int) -> list[dict[str, Any]]:
    """Return what the checkpoint of this progress was made of."""
    history = run / "history"
    return lineage(history, last_generation(history), progress)


async def test_it_learns_from_what_another_run_sees_each_batch_once_though_it_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["name=second", f"source.tap={first}", "trainer.save_interval=7", "seed=1"]
    async with LocalRun(SMOKE, first, ["name=first", "buffer.total_steps=90"]) as seen:
        await seen.until_progress(3, 120.0)
        async with LocalRun(SMOKE, second, [*words, "buffer.total_steps=null"]) as learns:
            await learns.until_progress(12, 120.0)
            learns.kill("trainer-0")
            await learns.until_progress(25, 120.0)
            assert learns.process is not None
            learns.process.send_signal(signal.SIGINT)
            code, output = await learns.ended(60.0)
            assert code == 130, output
        code, output = await seen.ended(200.0)
        assert code == 0, output
    # the other run is over, and its private broker with it
    learns, output = await completed(SMOKE, second, [*words, "buffer.total_steps=null"], seconds=120.0)
    assert "starting the private broker of run 'first'" in output
    trained = entries(second, 90)
    assert [one["batch"] for one in trained] == list(range(1, 91)), "each batch once, in order"
    assert {one["outcome"] for one in trained} == {"trained"}
    assert [one["uids"] for one in trained] == [one["uids"] for one in entries(first, 90)]
    assert main(["audit", str(second), "--offline"]) == 0, capsys.readouterr().out
    assert undocumented({name for line in learns.metrics() for name in line}) == set()
