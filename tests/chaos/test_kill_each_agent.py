"""SIGKILL each kind of process in one run: it ends by itself, every batch decided once, no experience counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_agents.trainer.history import lineage
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCHES = 60

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(500)]


async def test_killing_each_kind_of_process_costs_time_and_nothing_else(tmp_path: Path) -> None:
    victims = ["runner-0", "engine", "fork server", "operator-0", "trainer-0", "explorer-0", "engine"]
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run", ("trainer.save_interval=7",)) as run:
        for number, victim in enumerate(victims, start=1):
            await run.until_progress(8 * number, 120.0)
            run.kill(victim)
        code, output = await run.ended(300.0)
    assert code == 0, output
    # the lineage of the final checkpoint, from the ids kept in the run folder
    history = lineage(tmp_path / "run" / "history", 2, BATCHES)
    assert [entry["batch"] for entry in history] == list(range(1, BATCHES + 1))
    assert len({entry["ticket"] for entry in history}) == BATCHES
    assert all(entry["outcome"] == "trained" for entry in history)
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len(uids) == len(set(uids))
    for entry in history:
        runs = {tuple(map(int, uid.split("/")[1:3])) for uid in entry["uids"]}
        missing = {(task, one) for task in range(16) for one in range(8)} - runs
        lost = f"batch {entry['batch']} has not (task, run) {sorted(missing)}\n{output[-3000:]}"
        assert len(runs) == len(entry["uids"]) == 16 * 8, lost
    evaluated = [step for step, _ in run.values("eval/max3_held_out/accuracy/mean@1")]
    assert evaluated.count(BATCHES) == 1
    assert evaluated[0] == 0
