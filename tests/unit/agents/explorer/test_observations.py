"""What selectors are told: each finished ticket once, whatever is dropped later and whenever the explorer is killed."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from trinity_agents.explorer.state import ExplorerState, StateFile, TicketStatistics
from trinity_agents.explorer.task_source import TaskSource, task_stats
from trinity_agents.simulation import Simulation, killed
from trinity_mq.config import TasksetConfig, load_config
from trinity_mq.data import Taskset, TaskStats, open_taskset
from trinity_mq.dispatch.batch_metrics import taskset_metrics
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket, new_ticket
from trinity_mq.messages import TaskBody, TaskResult
from trinity_mq.testing.virtual_time import run_virtually

POOLS = {
    "selector_type": "difficulty_pools",
    "pools": [{"threshold": 0.0, "weight": 1.0}, {"threshold": 0.5, "weight": 4.0}],
}


def a_taskset(folder: Path) -> Taskset:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": ""}) + "\n" for i in range(20)))
    config = TasksetConfig.model_validate({"path": str(path), "data_selector": POOLS, "workflow": "none", "limit": 20})
    return open_taskset(config, repeat_times=2, seed=3)


def a_ticket(outcomes: list[tuple[str, list[float]]], **more: Any) -> Ticket:
    """Return a complete ticket whose tasks, from index 0, have these outcomes and rewards."""
    tasks = [TaskBody(repeat_times=2, index={"taskset": "ab"[n % 2], "index": n}) for n in range(len(outcomes))]
    ticket = new_ticket(1, tasks, deliver="pipeline", lane="train", time_left=60.0, **more)
    for task_slice, (outcome, rewards) in zip(ticket.slices, outcomes, strict=True):
        task_slice.result = TaskResult(
            batch=1,
            ticket=ticket.ticket,
            task_id=task_slice.task_id,
            attempt="a" * 32,
            outcome=outcome,  # type: ignore[arg-type]
            runs=list(range(len(rewards))),
            metrics=[{"reward": reward} for reward in rewards],
        )
    return ticket


def test_what_a_ticket_says_of_its_tasks() -> None:
    ticket = a_ticket(
        [
            ("finished", [1.0, 0.0]),
            ("finished", [0.25, math.nan]),  # no finite reward: the run says nothing
            ("failed", []),
            ("finished", [1.0, 1.0]),  # submitted
            ("cancelled", [1.0]),  # the rest of it was cut off
        ],
        submissions=[SubmissionRef(submission_id="s", task_id=3)],
        whole_tasks_only=True,
    )
    assert task_stats(ticket) == {"a": [TaskStats(0, 0.5, 2)], "b": [TaskStats(1, 0.25, 1)]}
    assert taskset_metrics(ticket) == {
        "rollout/taskset/a/tasks": 3.0,
        "rollout/taskset/b/tasks": 2.0,
        "rollout/taskset/a/reward": 0.5,
        "rollout/taskset/b/reward": 1.0,
    }


def test_a_ticket_observed_twice_counts_once(tmp_path: Path) -> None:
    config = load_config({"name": "told", "model": {"tiny": {}}, "buffer": {"total_steps": 4}})
    state, ticket = ExplorerState(), a_ticket([("finished", [1.0, 0.0])])
    ticket.tasks[0].index["taskset"] = "train"
    source = TaskSource(config, state, a_taskset(tmp_path))
    metrics = source.observe(ticket)
    assert metrics == source.observe(ticket)
    assert metrics["selector/train/pool/0.5"] == 1
    assert [one.stats for one in state.observations] == [{"train": [TaskStats(0, 0.5, 2)]}]
    again = TaskSource(config, loaded := state.model_copy(), a_taskset(tmp_path))
    assert again.observe(ticket) == metrics
    assert loaded.observations == []  # they are in the file
    fixed = open_taskset(TasksetConfig(path=str(tmp_path / "tasks.jsonl")))
    assert TaskSource(config, ExplorerState(), fixed).observe(ticket) == {}


def run_killed(folder: Path, *moments: float) -> tuple[Simulation, list[Taskset]]:
    """Run a simulation whose taskset has a selector that learns, and whose explorer is killed after so many seconds,
    each time anew. Return it with the taskset of each life.
    """
    folder.mkdir()
    tasksets: list[Taskset] = []
    sim = Simulation(folder, batches=8, taskset=lambda: tasksets.append(a_taskset(folder)) or tasksets[-1])

    async def explorers() -> None:
        for moment in moments:
            task = asyncio.create_task(sim.make_explorer().run())
            await asyncio.wait([task], timeout=moment)
            if not await killed(task):
                return
        await sim.make_explorer().run()

    run_virtually(sim.run(explorer=explorers), limit=1000)
    return sim, tasksets


@pytest.mark.parametrize("moments", [(), (2.0,), (3.13, 2.07), (1.5, 4.0, 3.3)])
def test_each_ticket_is_observed_once_and_a_restored_selector_knows_all_of_it(
    tmp_path: Path, moments: tuple[float, ...]
) -> None:
    sim, tasksets = run_killed(tmp_path / "run", *moments)
    told = sim.state().observations
    assert len({one.ticket for one in told}) == len(told) == 8
    results: dict[str, set[int]] = {}
    for result in sim.published(TaskResult):
        if result.outcome == "finished":
            results.setdefault(result.ticket, set()).add(result.task_id)
    for one in told:  # the fake runner's rewards are 1
        assert {stats.reward for stats in one.stats["train"]} == {1.0}
        assert len(one.stats["train"]) == len(results[one.ticket]) == 2
    again = a_taskset(sim.folder)
    for one in told:
        again.observe(one.stats)
    saved = sim.state().taskset
    assert saved is not None
    again.restore(saved)
    assert again.metrics() == tasksets[-1].metrics()
    assert again.next_batch(30) == tasksets[-1].next_batch(30)
    counts = sim.values("selector/train/observed_tasks")
    assert sorted({step for step, _ in counts}) == list(range(1, 9))
    assert 2 <= counts[-1][1] <= 16


def test_a_state_keeps_what_was_told_in_order_and_writes_each_once(tmp_path: Path) -> None:
    path = tmp_path / "explorer.db"
    file, state = StateFile(path), ExplorerState()
    told = [TicketStatistics(ticket=f"t{n}", stats={"train": [TaskStats(n, n / 7, 2)]}) for n in range(12)]

    async def save_all() -> None:
        for one in told:
            state.observations = [one]
            await file.save(state)
        state.observations = [told[3].model_copy(update={"stats": {}})]
        await file.save(state)

    asyncio.run(save_all())
    assert state.observations == []
    assert StateFile(path).load().observations == told
