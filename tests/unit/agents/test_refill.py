"""Dynamic sampling with refill: groups without variance are dropped by the operators, and later batches have further
tasks in their place. Whole runs on MemoryBus in virtual time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.explorer.test_explorer import restarted
from tests.unit.agents.watched import WatchedSimulation
from trinity_agents.simulation import NumberedTasks, Simulation, kill_and_replace_trainer, until
from trinity_agents.trainer.history import lineage
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchClosed, BatchReady, Progress, RunEnd, TaskSlice
from trinity_mq.operators import ColumnOperator
from trinity_mq.testing.virtual_time import run_virtually

BATCH = 4
HALF = f"operator.operators=[{{name: {__name__}.AllRight}}, {{name: dapo_dynamic_sampling}}]"
ALL = f"operator.operators=[{{name: {__name__}.AllRight, args: {{every: 1}}}}, {{name: reward_std_filter}}]"


class AllRight(ColumnOperator):
    """Makes all runs of every second task right (of each task for ``every=1``), so that they teach nothing."""

    def __init__(self, every: int = 2) -> None:
        self.every = every

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        tasks, rewards = batch.values("eid.task"), batch.values("reward")
        changed = [1.0 if task % self.every == 0 else reward for task, reward in zip(tasks, rewards, strict=True)]
        return batch.replace(reward=changed), {}


@dataclass
class Ledger:
    """Groups of a run that has ended, by what became of them."""

    opened: dict[int, int]
    """By batch."""
    filtered: dict[int, int]
    """By batch, as the trainer reported it."""
    debt: int

    @property
    def trained(self) -> dict[int, int]:
        return {batch: count - self.filtered[batch] for batch, count in self.opened.items()}

    @property
    def refilled(self) -> int:
        return sum(self.opened.values()) - BATCH * len(self.opened)


def ledger(sim: Simulation) -> Ledger:
    tasks: defaultdict[int, set[int]] = defaultdict(set)
    for each in sim.published(TaskSlice):
        if each.lane == "train":
            tasks[int(each.batch)].add(each.task_id)
    state = sim.state()
    assert state.refilled == {}
    return Ledger(
        {batch: len(found) for batch, found in sorted(tasks.items())},
        {int(one.batch): one.filtered_groups for one in sim.published(Progress)},
        state.refill_debt,
    )


def refilling(folder: Path, *settings: str, batches: int = 12, kind: type[Simulation] = Simulation) -> Simulation:
    size = f"buffer.batch_size={BATCH}"
    return kind(folder, (size, HALF, "explorer.refill.max=1.5", *settings), batches=batches)


def check(sim: Simulation, batches: int) -> Ledger:
    """Each dropped group was replaced once, or is still owed; the run has ended where it should."""
    found = ledger(sim)
    assert found.filtered.keys() == found.opened.keys() == set(range(1, batches + 1))
    assert sum(found.filtered.values()) == found.refilled + found.debt
    assert sum(found.trained.values()) == BATCH * batches - found.debt
    said = {int(one.batch): one.metrics["rollout/refilled_groups"] for one in sim.published(BatchClosed)}
    assert said == {batch: count - BATCH for batch, count in found.opened.items()}
    assert max(found.opened.values()) <= BATCH + sim.config.max_refill
    assert sim.trainer.loop.progress == batches
    assert {one.batches for one in sim.published(RunEnd)} == {batches}
    return found


def test_on_policy_the_next_batch_replaces_what_was_dropped(tmp_path: Path) -> None:
    sim = refilling(tmp_path, batches=8)
    run_virtually(sim.run(), limit=1000)
    found = check(sim, 8)
    assert list(found.opened.values()) == [4, 6, 7, 8, 8, 8, 8, 8]
    assert list(found.trained.values()) == [2, 3, 3, 4, 4, 4, 4, 4]
    assert sim.learners[0].steps == list(range(1, 9))
    entries = lineage(tmp_path / "history", 1, 8)
    groups = [{uid.rsplit("/", 3)[0] for uid in entry["uids"]} for entry in entries]
    assert [len(each) for each in groups] == list(found.trained.values())
    # the metrics tell it, and dropped groups still count in them
    assert dict(sim.values("rollout/filtered_groups")) == found.filtered
    assert dict(sim.values("rollout/refilled_groups")) == {n: count - BATCH for n, count in found.opened.items()}
    assert dict(sim.values("rollout/refill_debt")) == dict.fromkeys(range(1, 9), 0.0), "all of it was paid at once"
    assert dict(sim.values("rollout/finished_task_count")) == found.opened
    assert {ready.batch: ready.filtered_groups for ready in sim.published(BatchReady)} == found.filtered


def test_a_group_with_too_few_runs_is_replaced_too_and_a_task_without_a_run_is_only_given_back(tmp_path: Path) -> None:
    """What the algorithm drops counts as what operators drop; a task that is done again is not also replaced."""

    def spoil(task_slice: TaskSlice) -> str | None:
        lost = task_slice.task_id == 3 or (task_slice.task_id == 1 and task_slice.run_base == 1)
        return "failed" if lost and task_slice.batch == 2 else None

    settings = ("operator.operators=[]", "explorer.max_repeat_times_per_runner=1")
    sim = refilling(tmp_path, *settings, batches=4)
    sim.spoil = spoil
    run_virtually(sim.run(), limit=1000)
    found = ledger(sim)
    assert found.filtered == {1: 0, 2: 1, 3: 0, 4: 0}
    assert list(found.opened.values()) == [4, 4, 5, 4]
    numbers = [each.task.raw_task["n"] for each in sim.published(TaskSlice) if each.lane == "train"]
    assert [number for number in range(17) if numbers.count(number) > 2] == [7], "the other task of batch 2 comes once"


@pytest.mark.parametrize(
    "settings",
    [
        ("synchronizer.sync_interval=3", "synchronizer.sync_offset=1"),
        ("synchronizer.sync_interval=4", "trainer.batches_per_step=2"),
        ("synchronizer.sync_style=trainer_driven", "synchronizer.pipeline_depth=3"),
        ("synchronizer.sync_style=explorer_driven", "synchronizer.sync_interval=2"),
        ("synchronizer.sync_style=fully_async", "synchronizer.pipeline_depth=2"),
    ],
    ids=lambda settings: settings[0].rpartition(".")[2],
)
def test_in_every_style_as_many_groups_are_trained_on_as_without_filters(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    sim = refilling(tmp_path, *settings, batches=24)
    run_virtually(sim.run(), limit=1000)
    found = check(sim, 24)
    later = [count for batch, count in found.trained.items() if batch > 12]
    assert sum(later) / len(later) == pytest.approx(BATCH, rel=0.15)


def test_batches_that_are_opened_on_the_same_news_share_the_debt(tmp_path: Path) -> None:
    sim = refilling(tmp_path, "synchronizer.sync_interval=4", batches=18)
    run_virtually(sim.run(), limit=1000)
    sizes = list(check(sim, 18).opened.values())
    periods = [set(sizes[first : first + 4]) for first in range(0, 18, 4)]
    assert periods == [{4}, {6}, {7}, {8}, {10}], "the last two share what four would, within refill.max"


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    sim = refilling(tmp_path, "explorer.refill.max=0", batches=4)
    run_virtually(sim.run(), limit=1000)
    found = ledger(sim)
    assert set(found.opened.values()) == {BATCH}
    assert set(found.trained.values()) == {2}
    assert (found.debt, sim.values("rollout/refilled_groups")) == (0, [])
    assert Simulation(tmp_path / "default").config.max_refill == 0


def test_where_all_is_dropped_batches_and_debt_stay_within_their_bounds_and_nothing_waits(tmp_path: Path) -> None:
    settings = (ALL, "explorer.refill.max=0.5", "explorer.max_consecutive_empty=100", "synchronizer.sync_interval=2")
    sim = refilling(tmp_path, *settings, batches=12)
    run_virtually(sim.run(), limit=200)
    found = ledger(sim)
    assert list(found.opened.values()) == [4, 4, *[6] * 10]
    assert found.debt == 2 * 2
    assert sim.trainer.loop.progress == 12
    assert {one.reason for one in sim.published(Progress) if one.batch == 12} == {
        "the operators kept no experience: 6 groups dropped; look at experience_pipeline/* in metrics.jsonl"
    }


@pytest.mark.parametrize("style", ["fixed", "fully_async"])
@pytest.mark.parametrize("after", [round(0.53 * n, 2) for n in range(1, 13)])
def test_an_explorer_that_is_killed_pays_each_debt_once(tmp_path: Path, style: str, after: float) -> None:
    sim = refilling(tmp_path, f"synchronizer.sync_style={style}", batches=6)
    sim.runner_seconds = lambda task_slice: 0.7  # so that batches are open at many of these moments

    run_virtually(sim.run(explorer=restarted(sim, lambda: True, then=after)), limit=1000)
    assert len(sim.explorers) == 2, "killed too late to show anything"
    check(sim, 6)


def test_a_debt_that_was_not_saved_is_read_again(tmp_path: Path) -> None:
    sim = refilling(tmp_path, batches=4)

    def debt() -> int:
        return sum(one.exploration.state.refill_debt for one in sim.explorers[-1:] if one.exploration is not None)

    async def owes() -> None:
        await until(lambda: debt() > 0, step=0.001)
        assert sim.state().refill_debt == 0, "it is saved with the batch that pays it"

    run_virtually(sim.run(explorer=restarted(sim, owes, pause=0.0)), limit=1000)
    assert list(check(sim, 4).opened.values()) == [4, 6, 7, 8]


def test_a_trainer_that_consumes_batches_again_adds_to_no_debt(tmp_path: Path) -> None:
    for number, after in enumerate((2.5, 5.5, 8.5)):
        sim = refilling(tmp_path / str(number), "trainer.save_interval=100", "synchronizer.sync_timeout=5", batches=8)
        run_virtually(sim.run(trainer=kill_and_replace_trainer(sim, after)), limit=3000)
        reported = [one.ticket for one in sim.published(Progress)]
        assert len(set(reported)) == 8 < len(reported), "some were reported twice"
        check(sim, 8)


def test_progress_delivered_twice_counts_once(tmp_path: Path) -> None:
    sim = refilling(tmp_path, batches=6, kind=WatchedSimulation)
    sim.times_published = 2  # type: ignore[attr-defined]
    run_virtually(sim.run(), limit=1000)
    assert len(sim.published(Progress)) == 12
    check(sim, 6)


class Finite(NumberedTasks):
    """Thirty tasks an epoch."""

    def __len__(self) -> int:
        return 30

    def state(self) -> dict[str, object]:
        return {"given": self.given, "epoch": self.given // 30, "cursor": self.given % 30}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


class Epochs(Simulation):
    """A run over two epochs of a taskset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.taskset = Finite
        buffer = self.config.buffer.model_copy(update={"total_steps": None, "total_epochs": 2})
        self.config = self.config.model_copy(update={"buffer": buffer})


@pytest.mark.parametrize("style", ["fixed", "trainer_driven"])
def test_epochs_give_every_task_as_often_and_end_when_they_are_over(tmp_path: Path, style: str) -> None:
    sim = refilling(tmp_path, f"synchronizer.sync_style={style}", kind=Epochs)

    run_virtually(sim.run(explorer=restarted(sim, lambda: True, then=5.0, pause=0.0)), limit=1000)
    assert len(sim.explorers) == 2
    found = ledger(sim)
    slices = [each for each in sim.published(TaskSlice) if each.lane == "train"]
    numbers = {(each.ticket, each.task_id): each.task.raw_task["n"] for each in slices}
    assert sorted(numbers.values()) == list(range(60)), "every task once an epoch"
    assert len(found.opened) < 15, "four tasks a batch would make 15"
    assert {one.batches for one in sim.published(RunEnd)} == {len(found.opened)}
    assert sim.evaluated_steps()[-1] == len(found.opened)
    assert sim.state().finished
    middle = list(found.trained.values())[3:-1]
    assert sum(middle) / len(middle) == pytest.approx(BATCH, rel=0.15)
