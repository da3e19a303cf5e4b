"""All of a run but the broker is killed in its middle; the same command goes on from the checkpoint.

The broker lives on because a killed one may lose what it confirmed into a queue made just before (CONTRIBUTING).
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from tests.processes import command
from trinity_agents.trainer.history import lineage
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
BATCHES = 24
DIFFERENCE = "rollout/rollout_vs_train_logprob_diff/max"

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.broker, pytest.mark.timeout(400)]


async def test_after_everything_died_no_rollout_is_made_by_other_weights_than_the_checkpoints(
    tmp_path: Path, broker_url: str, unique_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", broker_url)
    folder = tmp_path / "run"
    settings = (
        f"name={unique_run}",
        f"buffer.total_steps={BATCHES}",
        "trainer.save_interval=5",
        "explorer.eval_interval=1000",
        "synchronizer.sync_method=collective",
        "synchronizer.sync_interval=1",
        "synchronizer.sync_offset=0",
    )
    async with LocalRun(SMOKE, folder, settings) as run:
        await run.until_progress(12, 150.0)
        assert run.process is not None
        # their engine is a child of nobody here: it may be adopted, with newer weights than the checkpoint's
        family = psutil.Process(run.process.pid).children(recursive=True)
        run.process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # some end with their parents
                child.kill()
        await run.ended(30.0)
    before = len(run.metrics())
    async with LocalRun(SMOKE, folder, settings) as run:
        code, output = await run.ended(250.0)
    assert code == 0, output
    entries = lineage(folder / "history", 2, BATCHES)
    assert [entry["batch"] for entry in entries] == list(range(1, BATCHES + 1))
    uids = [uid for entry in entries for uid in entry["uids"]]
    # what was sampled by weights that no checkpoint holds is left out by whole groups, and told
    dropped = sum(value for _, value in run.values("sample/dropped_stale_groups"))
    assert len(uids) == len(set(uids)) == (BATCHES * 16 - dropped) * 8
    assert dropped <= 16, "at most the batch that was under way"
    # with interval 1 and offset 0 each batch is made by the weights that train on it: any older or newer show here
    lines = run.metrics()[before:]
    again = [(line["step"], line[DIFFERENCE]) for line in lines if DIFFERENCE in line]
    assert again
    assert again[0][0] <= 13
    trained = [entry["progress"] for entry in entries if entry["uids"]]
    assert [step for step, _ in again] == [step for step in trained if step >= again[0][0]]
    assert max(value for _, value in again) < 1e-4, again
    assert {line["sample/staleness/max"] for line in lines if "sample/staleness/max" in line} == {0.0}
    code, told, _ = await command("audit", str(folder), "--checkpoint", "all")
    assert (code, told.splitlines()[-1]) == (0, "proven"), told
