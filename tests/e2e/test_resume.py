"""On-policy training with real processes: no token is older than its train step, also when all of the run but the
broker is killed in its middle and the same command continues from the checkpoint.

The broker lives on because a killed one may lose what it confirmed into a queue made just before (CONTRIBUTING).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import command, completed
from trinity_agents.trainer.history import lineage
from trinity_mq.observability.timeline import spans
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
BATCHES = 24
KILLED_AFTER = 12
DIFFERENCE = "rollout/rollout_vs_train_logprob_diff/max"

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.broker, pytest.mark.timeout(400)]


async def test_each_batch_is_made_by_the_weights_that_train_on_it_also_after_everything_died(
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
        await run.until_progress(KILLED_AFTER, 150.0)
        assert run.process is not None
        # their engine is a child of nobody here: it may be adopted, with newer weights than the checkpoint's
        family = psutil.Process(run.process.pid).children(recursive=True)
        run.process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # some end with their parents
                child.kill()
        await run.ended(30.0)
    before = len(run.metrics())
    run, output = await completed(SMOKE, folder, settings, seconds=250.0)
    entries = lineage(folder / "history", 2, BATCHES)
    assert [entry["batch"] for entry in entries] == list(range(1, BATCHES + 1))
    uids = [uid for entry in entries for uid in entry["uids"]]
    # what was sampled by weights that no checkpoint holds is left out by whole groups, and told
    dropped = sum(value for _, value in run.values("sample/dropped_stale_groups"))
    assert len(uids) == len(set(uids)) == (BATCHES * 16 - dropped) * 8
    assert dropped <= 16, "at most the batch that was under way"

    first, resumed = run.metrics()[:before], run.metrics()[before:]
    trained = [entry["progress"] for entry in entries if entry["uids"]]
    begins = steps_on_policy(resumed)[0]
    assert begins <= KILLED_AFTER + 1
    assert steps_on_policy(resumed) == [step for step in trained if step >= begins]
    assert steps_on_policy(first)[:KILLED_AFTER] == list(range(1, KILLED_AFTER + 1))
    check_the_timeline(first)
    for phase in ("wait", "pause", "transfer", "apply", "resume"):
        values = run.values(f"sync/{phase}_ms")
        assert values, phase
        assert all(0 <= value < 60_000 for _, value in values), (phase, values)
    names = {event["name"] for event in json.loads((folder / "timeline.json").read_text())["traceEvents"]}
    expected = {f"{what} {step}" for what in ("explore", "train") for step in trained}
    # the killed explorer may not have written the line of the batch that it had just closed
    written = max(span.step for span in spans(first) if span.what == "explore")
    assert expected - names <= {f"explore {written + 1}"}
    assert "timeline" in output
    code, told, _ = await command("audit", str(folder), "--checkpoint", "all")
    assert (code, told.splitlines()[-1]) == (0, "proven"), told


def steps_on_policy(lines: Sequence[dict[str, Any]]) -> list[int]:
    """Return the train steps of these metrics, whose tokens all were sampled by the weights that trained on them: with
    interval 1 and offset 0 any older or newer weights show here.
    """
    values = {name: [line[name] for line in lines if name in line] for name in (DIFFERENCE, "actor/ratio_max")}
    assert max(math.expm1(value) for value in values[DIFFERENCE]) < 1e-4, "of exp(|new - old|), the ratio either way"
    assert max(abs(value - 1) for value in values["actor/ratio_max"]) < 1e-4
    assert {line["sample/staleness/max"] for line in lines if "sample/staleness/max" in line} == {0.0}
    return [line["step"] for line in lines if DIFFERENCE in line]


def check_the_timeline(lines: Sequence[dict[str, Any]]) -> None:
    """One period after another, as in the documented timeline: the batch, then its step, then the sync.

    The explorer hears of its batch's last slice from the runner, the trainer from the operator: neither waits for the
    other.
    """
    every = spans(lines)
    explored, trained, synced = (
        {span.step: span for span in every if span.what == what} for what in ("explore", "train", "sync")
    )
    assert 0 in synced
    for step in range(1, KILLED_AFTER):
        assert explored[step].start < trained[step].start
        assert explored[step].end < synced[step].end
        assert trained[step].end <= synced[step].start + 0.02
        if step > 1:
            assert synced[step - 1].start < explored[step].start, "on-policy: it was opened after the commit"
