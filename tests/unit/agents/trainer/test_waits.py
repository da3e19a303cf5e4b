"""How long the trainer waits for data, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_agents.simulation import Simulation
from trinity_mq.testing.virtual_time import run_virtually


def test_a_trainer_that_is_faster_than_the_rollouts_waits_for_them(tmp_path: Path) -> None:
    sim = Simulation(
        tmp_path, ("explorer.eval_interval=100",), batches=4, step_seconds=1.0, runner_seconds=lambda task_slice: 9.0
    )
    run_virtually(sim.run(), limit=1000)
    waits, shares = sim.values("time/wait_data"), sim.values("trainer/idle_frac")
    assert [step for step, _ in waits] == [step for step, _ in shares] == [1, 2, 3, 4]
    for (_, seconds), (_, share) in zip(waits[1:], shares[1:], strict=True):
        assert seconds == pytest.approx(9.0, abs=1.0)
        assert 0.8 < share < 1.0


def test_a_trainer_that_is_slower_does_not_wait(tmp_path: Path) -> None:
    overrides = ("synchronizer.sync_style=fully_async", "synchronizer.max_staleness=9")
    sim = Simulation(tmp_path, overrides, batches=4, step_seconds=30.0, runner_seconds=lambda task_slice: 0.5)
    run_virtually(sim.run(), limit=1000)
    assert [seconds for _, seconds in sim.values("time/wait_data")][1:] == pytest.approx([0.0] * 3, abs=0.1)
    assert all(share < 0.01 for _, share in sim.values("trainer/idle_frac")[1:])
