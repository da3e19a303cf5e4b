"""Evaluations: each label done once, on one version, over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity_agents.explorer.evaluation import MAX_TRIES, Evaluations
from trinity_agents.explorer.state import ExplorerState
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import TaskBody, TaskSlice, Version
from trinity_mq.runtime.notify import Notifier
from trinity_mq.telemetry.evaluations.log import EvaluationLog, read_evaluations
from trinity_mq.testing.fakes import FakeRunner
from trinity_mq.testing.virtual_time import run_virtually


class Gate:
    """What evaluations see of the gate."""

    def __init__(self) -> None:
        self.version: Version | None = (1, 3)
        self.idle = True


class Bench:
    """Two sets, a dispatcher and a runner."""

    def __init__(
        self,
        state: ExplorerState | None = None,
        spoil: Callable[[TaskSlice], str | None] | None = None,
        detailed: bool = False,
        style: str = "fixed",
        folder: Path | None = None,
    ) -> None:
        self.state = state or ExplorerState()
        config = load_config(
            {
                "name": "ev",
                "model": {"tiny": {}},
                "explorer": {"eval_timeout": 99},
                "monitor": {"detailed_stats": detailed},
                "synchronizer": {"sync_style": style},
            }
        )
        topology, broker = Topology("ev"), MemoryBroker()
        self.bus, other = (MemoryBus(broker, topology, config=config.broker) for _ in range(2))
        self.gate, self.woken, self.saves = Gate(), Notifier(), 0
        self.announced: int | None = None
        self.runner = FakeRunner(other, topology, lambda: self.gate.version, spoil=spoil or (lambda task_slice: None))
        self.dispatcher = Dispatcher(
            config,
            bus=self.bus,
            topology=topology,
            owner="explorer-0",
            tickets=self.state.tickets,
            results_offset=0,
            changed=self.woken,
        )
        self.reports: list[tuple[int, dict[str, float]]] = []
        records = [{"question": "3+4=", "answer": 7}, {"question": "1+1="}]
        bodies = [TaskBody(workflow="none", is_eval=True, raw_task=record) for record in records]
        sets = dict.fromkeys(("a", "b"), bodies)
        self.evaluations = Evaluations(
            config,
            self.state,
            self.dispatcher,
            self.gate,  # type: ignore[arg-type]
            sets,
            save=self.save,
            report=lambda label, metrics: self.reports.append((label, metrics)),
            woken=self.woken,
            answers=None if folder is None else EvaluationLog(folder, 2**20),
        )

    async def save(self) -> None:
        self.saves += 1

    def play(self, label: int) -> None:
        async def main() -> None:
            for bus in (self.bus, self.runner.bus):
                await bus.connect()
            await self.bus.declare(*self.dispatcher.topology.durable)
            async with asyncio.TaskGroup() as group:
                background: list[Any] = [self.runner.run(), self.dispatcher.follow(), self.evaluations.run()]
                tasks = [group.create_task(one) for one in background]
                await self.dispatcher.caught_up()
                await self.dispatcher.resume()
                self.evaluations.request(label)
                self.evaluations.request(label)
                self.announced = self.evaluations.running
                await self.woken.until(lambda: self.evaluations.is_done(label) and not self.state.due)
                for task in tasks:
                    task.cancel()

        run_virtually(main(), limit=500)


def test_a_label_asked_for_twice_is_done_once_and_announced_meanwhile() -> None:
    bench = Bench()
    bench.play(4)
    ((label, metrics),) = bench.reports
    assert label == 4
    assert (metrics["eval/a/version/min"], metrics["eval/b/version/max"]) == (3.0, 3.0)
    assert len(bench.runner.done) == 4
    assert all(task_slice.pinned == (1, 3) and task_slice.deliver == "none" for task_slice in bench.runner.done)
    assert (bench.announced, bench.evaluations.running) == (4, None)
    assert bench.state.tickets == {}
    bench.evaluations.request(4)
    assert bench.state.due == []


def test_in_other_styles_engines_go_on_taking_weights_and_the_metrics_tell_which_versions_served() -> None:
    bench = Bench(ExplorerState(due=[2]), style="fully_async")
    versions = iter([(1, 3), (1, 4), (1, 4), (1, 6)] * 2)
    bench.runner.version = lambda: next(versions)
    bench.play(4)
    assert [label for label, _ in bench.reports] == [2, 4]
    assert all(task_slice.pinned is None for task_slice in bench.runner.done)
    for _, metrics in bench.reports:
        lows, highs = ([metrics[f"eval/{name}/version/{end}"] for name in ("a", "b")] for end in ("min", "max"))
        assert (min(lows), max(highs)) == (3.0, 6.0)
        assert metrics["time/eval"] > 0


def test_the_spread_over_tasks_is_told_where_it_is_asked_for() -> None:
    names = []
    for detailed in (False, True):
        bench = Bench(detailed=detailed)
        bench.play(4)
        names.append(sorted(name for name in bench.reports[0][1] if name.startswith("eval/a/accuracy/mean@1")))
    assert names == [
        ["eval/a/accuracy/mean@1"],
        [f"eval/a/accuracy/mean@1/{each}" for each in ("max", "mean", "min", "std")],
    ]


def test_the_answers_to_each_question_are_kept(tmp_path: Path) -> None:
    bench = Bench(ExplorerState(due=[2]), folder=tmp_path)
    bench.runner.answer = lambda task_slice: f"to {task_slice.task_id}"
    bench.play(4)
    found = read_evaluations(tmp_path)
    assert [(one.set, one.label, len(one.questions)) for one in found] == [
        (name, label, 2) for name in ("a", "b") for label in (2, 4)
    ]
    first, second = found[0].questions
    assert (first.question, first.expected, second.expected) == ("3+4=", "7", None)
    assert [(one.run, one.answer, one.reward, one.accuracy) for one in first.answers] == [(0, "to 0", 1.0, 1.0)]
    assert found[0].time > 0


def test_a_question_whose_runs_failed_says_why_and_a_full_disk_ends_no_evaluation(tmp_path: Path) -> None:
    bench = Bench(spoil=lambda task_slice: "failed", folder=tmp_path, style="trainer_driven")
    bench.play(2)
    assert len(bench.runner.done) == 4, "an evaluation that is of no version is not done again"
    assert bench.reports[0][1]["eval/a/failed_runs"] == 2.0
    [question, _] = read_evaluations(tmp_path)[0].questions
    assert (question.answers, question.failure) == ([], "spoilt")
    (tmp_path / "b").write_text("a file in place of the folder")
    bench = Bench(folder=tmp_path / "b")
    bench.play(4)
    assert [label for label, _ in bench.reports] == [4]


def test_what_was_evaluated_is_remembered_of_the_latest_label_only() -> None:
    bench = Bench(ExplorerState(due=[2, 4], evaluated=["1/a", "1/b"]))
    assert bench.evaluations.running == 2, "announced before anything has run"
    bench.play(6)
    assert [label for label, _ in bench.reports] == [2, 4, 6]
    assert bench.state.evaluated == ["6/a", "6/b"]
    assert bench.evaluations.is_done(6)


def test_a_life_that_saved_one_of_two_tickets_leaves_no_orphan() -> None:
    bench = Bench(ExplorerState(due=[4]))
    orphan = bench.dispatcher.make_ticket(
        [TaskBody(workflow="none")], "4/a", deliver="none", lane="eval", pinned=(1, 1)
    )
    bench.state.tickets[orphan.ticket] = orphan
    bench.play(4)
    assert [label for label, _ in bench.reports] == [4]
    assert bench.state.tickets == {}
    assert bench.state.evaluated == ["4/a", "4/b"]


def losing(bench: Bench, lost: Callable[[Version], Version]) -> list[Version]:
    """Have the version of each evaluation that is opened replaced at once; return those versions."""
    pinned: list[Version] = []
    open_ticket = bench.dispatcher.open

    async def opens(ticket: Ticket) -> None:
        version = ticket.pinned or (1, 0)
        pinned.append(version)
        await open_ticket(ticket)
        bench.gate.version = lost(version)

    bench.dispatcher.open = opens  # type: ignore[method-assign]
    return pinned


def test_a_version_that_is_lost_is_replaced_but_not_for_ever() -> None:
    bench = Bench(spoil=lambda task_slice: "failed")
    pinned = losing(bench, lambda version: (1, version[1] + 1))
    bench.play(4)
    assert len(pinned) == 2 * MAX_TRIES
    assert bench.reports[0][1]["eval/a/failed_runs"] == 2.0
    assert bench.state.tickets == {}
    assert [kind.count for kind in bench.dispatcher.failures.listed()] == [4]  # those of the last try


def test_slices_that_lost_their_version_are_no_failures_once_they_are_done_again() -> None:
    bench = Bench(spoil=lambda task_slice: "failed" if task_slice.pinned == (1, 3) else None)
    losing(bench, lambda version: (1, 4))
    bench.play(4)
    assert bench.reports[0][1].get("eval/a/failed_runs", 0.0) == 0.0
    assert bench.dispatcher.failures.listed() == []
