"""The trainer's promises (docs/protocol.md, docs/learning.md) on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.unit.agents.explorer.test_explorer import check_history
from tests.unit.agents.watched import WatchedSimulation, late_operators
from tests.unit.agents.world import Over, RunOn, failure, killed_when, leaf
from trinity_agents.simulation import Simulation, kill_and_replace_trainer, killed, until
from trinity_agents.trainer.agent import Trainer
from trinity_agents.trainer.history import lineage
from trinity_agents.trainer.modes import RecordingLearner
from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.bus.memory.bus import MemoryBus
from trinity_mq.cli.main import main
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.launch.earlier_start import rewind_to_checkpoint
from trinity_mq.messages import BatchReady, ControlEvent, Heartbeat, Progress, RunEnd, SyncEvent, TrainerStatus
from trinity_mq.models import ensure_model_folder
from trinity_mq.operators import ExperienceOperatorV1
from trinity_mq.operators.base import Processed
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.testing.fakes import FakeEngine, FakeLearner
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually
from trinity_mq.training.checkpoints.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    StepAttempts,
    Writer,
    choose,
    find_by_name,
    find_checkpoints,
)
from trinity_mq.training.guard import TrainingStopped
from trinity_mq.training.learner import TorchLearner

LOOP = VirtualTimeLoop


def outcomes(sim: Simulation) -> dict[Any, str]:
    return {one.batch: one.outcome for one in sim.published(Progress)}


class Deadly(FakeLearner):
    """Does not survive the steps whose number is listed."""

    def __init__(self, numbers: set[int], tried: list[int]) -> None:
        super().__init__(0.1)
        self.numbers, self.tried = numbers, tried

    async def step(self, experiences: Any, step_number: int) -> dict[str, float]:
        self.tried.append(step_number)
        if step_number in self.numbers:
            raise RuntimeError("killed by this batch")
        return await super().step(experiences, step_number)


@pytest.mark.parametrize("save_interval", [1, 50])
def test_the_third_start_on_a_batch_skips_it_and_parks_a_letter(tmp_path: Path, save_interval: int) -> None:
    """Where the checkpoint lies before the batch that kills, trying it again would cost two more lives each time."""
    sim = Simulation(tmp_path, (f"trainer.save_interval={save_interval}",), batches=4)
    tried: list[int] = []

    async def trainer() -> None:
        for _ in range(2):
            with pytest.raises(ExceptionGroup):
                await sim.make_trainer(learner=Deadly({2}, tried)).run()
        await killed_when(
            lambda: sim.trainer.loop.progress == 3, lambda: sim.make_trainer(learner=Deadly(set(), tried))
        )

    run_virtually(sim.run(trainer=trainer), limit=1000)
    entries = lineage(tmp_path / "history", 4, 4)
    assert [entry["outcome"] for entry in entries] == ["trained", "skipped", "trained", "trained"]
    assert {letter["ticket"] for letter in sim.dead_letters()} == {entries[1]["ticket"]}
    assert all("did not survive 2 starts" in str(letter["dead-reason"]) for letter in sim.dead_letters())
    assert outcomes(sim) == {1: "trained", 2: "skipped", 3: "trained", 4: "trained"}
    if save_interval == 1:
        assert tried[:4] == [1, 2, 2, 2], "batch 2 killed two lives; what is step 2 in the third is batch 3"


def begun(folder: Path) -> list[str]:
    """The tickets of which a start counts, were the trainer to die now."""
    return StepAttempts(folder / "checkpoints").known


@pytest.mark.parametrize("cut_off_by", ["lost lock", "restart asked for"])
def test_a_step_that_is_called_off_does_not_count_against_its_batch(tmp_path: Path, cut_off_by: str) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=1",), batches=3, step_seconds=20.0)

    async def trainers() -> None:
        for life in range(1, 4):
            trainer = sim.make_trainer()
            task = asyncio.get_running_loop().create_task(trainer.run())
            await until(lambda: begun(tmp_path) != [])
            if cut_off_by == "lost lock":
                sim.broker.drop(trainer.bus, delay=5.0)  # type: ignore[arg-type]
                other = await sim.client()
                lock = await other.lock(sim.topology.lock("trainer"))
                with pytest.raises(ExceptionGroup) as caught:
                    await task
                await lock.release()
            else:
                bus = await sim.client()
                event = ControlEvent(verb="restart", target="trainer-0", reason=f"life {life}")
                await bus.publish(sim.topology.exchange("control"), "restart.trainer-0", envelope(event))
                with pytest.raises(ExceptionGroup) as caught:
                    await task
            leaf(caught.value, RestartRequested)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainers), limit=1000)
    assert outcomes(sim) == dict.fromkeys((1, 2, 3), "trained")
    assert sim.dead_letters() == []


def test_a_step_that_is_cut_off_after_a_drain_was_asked_for_does_not_count(tmp_path: Path) -> None:
    """A supervisor sends SIGKILL once its grace is over: what is on disk then is what the next trainer reads."""
    sim = Simulation(tmp_path, batches=3, step_seconds=100.0)

    async def trainer() -> None:
        task = asyncio.get_running_loop().create_task(sim.make_trainer().run())
        await until(lambda: begun(tmp_path) != [])  # a crash in the step would count
        sim.trainer.drain()
        await asyncio.sleep(1.0)
        assert not task.done(), "the step goes on"
        assert begun(tmp_path) == sim.learners[0].steps == []
        await killed(task)
        raise Over

    failure(sim.run(trainer=trainer), Over, limit=1000)


class Spoiling(MemoryBus):
    """Cuts the chunks of batch 2 short."""

    async def publish(self, exchange: str, key: str, mail: Any, **how: Any) -> bool:
        if exchange.endswith("ready") and key == "2" and "op" in mail.headers and "n" in mail.headers:
            mail = replace(mail, body=mail.body[:-1])
        return await super().publish(exchange, key, mail, **how)


def test_what_does_not_decode_fails_its_batch_only_or_is_parked(tmp_path: Path) -> None:
    sim = RunOn(tmp_path, batches=3, connection=Spoiling)

    async def intruder() -> None:
        bus = await sim.client()
        await asyncio.sleep(2.0)
        for name in ("ready", "results"):
            mail = replace(envelope(RunEnd(batches=3)), body=b"\xc1", kind="unknown")
            await bus.publish(sim.topology.exchange(name), "x", mail)

    run_virtually(sim.run(beside=intruder), limit=1000)
    assert outcomes(sim) == {1: "trained", 2: "failed", 3: "trained"}
    (failed,) = (one for one in sim.published(Progress) if one.outcome == "failed")
    assert "does not decode" in str(failed.reason)
    assert {letter["dead-queue"] for letter in sim.dead_letters()} == {"tmq.sim.ready", "tmq.sim.results"}


def test_a_stream_cut_behind_the_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=1", "synchronizer.sync_offset=3"), batches=4)

    def cut() -> None:
        sim.stream().trim(sim.stream().depth - 1)

    def trainers() -> Coroutine[Any, Any, None]:
        return killed_when(lambda: checkpoints(tmp_path) == [1], sim.make_trainer, between=cut, pause=5.0)

    text = str(failure(sim.run(trainer=trainers), FatalError, limit=1000))
    assert "retention has cut" in text
    assert "broker.ready_max_bytes" in text


def test_a_stream_shorter_than_the_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=2)
    run_virtually(sim.run(), limit=1000)
    other = Simulation(tmp_path, batches=2)
    assert "shorter than the checkpoint says" in str(failure(other.make_trainer().run(), FatalError, limit=1000))


@pytest.mark.parametrize(
    ("limits", "saved"),
    [
        pytest.param({}, [3, 4], id="every save_interval and at the end"),
        pytest.param({"ready_max_bytes": 4}, [1, 2, 3, 4], id="so that a restart needs no more than retention keeps"),
    ],
)
def test_checkpoints_come_every_save_interval_and_by_what_was_read(
    tmp_path: Path, limits: dict[str, int], saved: list[int]
) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=3", "trainer.max_checkpoints_to_keep=9"), batches=4)
    sim.config = sim.config.model_copy(update={"broker": sim.config.broker.model_copy(update=limits)})
    run_virtually(sim.run(), limit=1000)
    assert checkpoints(tmp_path) == saved


class SlowToSave(FakeLearner):
    """Writes in two halves."""

    async def save(self, folder: Path) -> None:
        await super().save(folder)
        await asyncio.sleep(20.0)
        (folder / "more").write_text("the rest")


def test_a_trainer_that_waits_touches_nothing_of_the_other_and_takes_over(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=1",), batches=3)

    async def trainers() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_task(sim.make_trainer("trainer-0", learner=SlowToSave(0.1)).run())
        await until(lambda: any((tmp_path / "checkpoints").glob(".partial-*/weights")))
        second = loop.create_task(sim.make_trainer("trainer-1").run())
        await until(lambda: checkpoints(tmp_path) == [1])
        assert sim.trainer.loop.generation == 0
        assert sim.trainer.state == "idle"
        await asyncio.sleep(3.0)
        await killed(first)
        await second

    run_virtually(sim.run(trainer=trainers), limit=1000)
    assert sim.trainer.loop.progress == 3
    assert sim.trainer.loop.generation == 2


def test_a_trainer_whose_lock_was_taken_stops_acting_and_saves_nothing(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, ("trainer.save_interval=200",), batches=500, step_seconds=0.5)

    async def trainers() -> None:
        loop = asyncio.get_running_loop()
        first = sim.make_trainer("trainer-0")
        task = loop.create_task(first.run())
        await until(lambda: first.loop.progress == 2)
        sim.broker.drop(first.bus, delay=30.0)  # type: ignore[arg-type]
        other = loop.create_task(sim.make_trainer("trainer-1").run())
        dropped = loop.time()
        await asyncio.wait([task])
        assert loop.time() - dropped == pytest.approx(30.0, abs=0.1), "at once, not at its next save"
        back = len(sim.acts)
        leaf(task.exception(), RestartRequested)  # type: ignore[arg-type]
        await asyncio.sleep(30.0)
        assert [act for act in sim.acts[back:] if act.who == "trainer-0"] == []
        assert sim.where("publish", "progress", who="trainer-1")
        assert checkpoints(tmp_path) == []
        await killed(other)
        raise Over

    failure(sim.run(trainer=trainers), Over, limit=500)


def test_a_trainer_that_gets_its_lock_back_after_another_had_it_saves_nothing(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=200",), batches=500)

    async def trainers() -> None:
        loop = asyncio.get_running_loop()
        first = sim.make_trainer("trainer-0")
        task = loop.create_task(first.run())
        await until(lambda: first.loop.progress == 2)
        sim.broker.drop(first.bus, delay=10.0)  # type: ignore[arg-type]
        other = loop.create_task(sim.make_trainer("trainer-1").run())
        await until(lambda: sim.trainer.loop.progress == 3)
        await killed(other)
        await until(lambda: first.bus.usable)
        first.drain()
        with pytest.raises(ExceptionGroup) as caught:
            await task
        assert "another trainer has resumed" in str(leaf(caught.value, RestartRequested))
        raise Over

    failure(sim.run(trainer=trainers), Over, limit=300)


# -- which checkpoint it goes on from


def damage(folder: Path, *progress: int) -> None:
    for one in progress:
        (folder / "checkpoints" / f"progress-{one:06d}" / "weights").write_text("no")


def killed_at(sim: Simulation, progress: int, *lives: Callable[[], Trainer], **how: Any) -> Coroutine[Any, Any, None]:
    return killed_when(lambda: sim.trainer.loop.progress == progress, sim.make_trainer, *lives, **how)


@pytest.mark.parametrize("does_not_load", [False, True], ids=["has another size", "does not load"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, does_not_load: bool) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=2",), batches=6)

    class FailsToLoad(FakeLearner):
        async def open(self, checkpoint: Path | None) -> None:
            if does_not_load and checkpoint is not None and checkpoint.name == "progress-000004":
                raise DamagedCheckpointError("optimizer.pt is damaged")

    def harm() -> None:
        if not does_not_load:
            damage(tmp_path, 4)

    with capture_logs() as logs:
        second = functools.partial(sim.make_trainer, learner=FailsToLoad(0.1))
        run_virtually(sim.run(trainer=lambda: killed_at(sim, 5, second, between=harm)), limit=1000)
    (said,) = (entry for entry in logs if entry["event"] == "damaged_checkpoint_skipped")
    assert said["path"].endswith("checkpoints/progress-000004")
    assert said["reason"] == ("optimizer.pt is damaged" if does_not_load else "weights has 2 bytes, wanted 4")
    (resumed,) = (entry for entry in logs if entry["event"] == "resumed")
    assert resumed["checkpoint"] == "progress-000002"
    assert sim.learners[1].steps[0] == 3
    assert sim.values("trainer/damaged_checkpoints") == [(2, 1.0)], "the report counts it"
    assert len(lineage(tmp_path / "history", 2, 6)) == 6


@pytest.mark.parametrize("gone", ["damaged", "removed", "folder removed", "none was saved"])
def test_without_a_usable_checkpoint_it_does_not_train_from_the_first_step_again(tmp_path: Path, gone: str) -> None:
    sim = Simulation(tmp_path, (f"trainer.save_interval={50 if gone == 'none was saved' else 2}",), batches=6)

    def lose() -> None:
        folder = tmp_path / "checkpoints"
        if gone == "damaged":
            damage(tmp_path, 2, 4)
        for path in folder.glob("progress-*") if gone == "removed" else ():
            shutil.rmtree(path)
        if gone == "folder removed":
            shutil.rmtree(folder)

    run = sim.run(trainer=lambda: killed_at(sim, 5, between=lose))
    if gone == "none was saved":
        run_virtually(run, limit=1000)
        assert sim.learners[1].steps == list(range(1, 7))
        return
    text = str(failure(run, FatalError, limit=1000))
    assert "no usable checkpoint in" in text
    assert ("progress-000004: weights has 2 bytes, wanted 4" if gone == "damaged" else "progress 4 was saved") in text
    assert "--fresh" in text
    assert sim.learners[1].steps == []


# -- the gate


async def test_a_sync_without_members_waits_and_drains(tmp_path: Path) -> None:
    sim = Simulation(tmp_path)
    await sim.record_messages()
    trainer, bus = sim.make_trainer(), await sim.client()
    task = asyncio.get_running_loop().create_task(trainer.run())
    ready = BatchReady(batch=1, ticket="t1", op="o", state="empty")
    await bus.publish(sim.topology.exchange("ready"), "1", envelope(ready))
    await asyncio.sleep(500.0)
    assert trainer.state == "holding"
    started = asyncio.get_running_loop().time()
    trainer.drain()
    await task
    assert asyncio.get_running_loop().time() - started < 1.0
    assert checkpoints(tmp_path) == [1]


class SlowEngine(FakeEngine):
    """Takes time to pause and to receive, and notes when it resumed."""

    resumed: float | None = None

    async def pause(self, timeout: float) -> None:
        await asyncio.sleep(5.0)
        await super().pause(timeout)

    async def resume(self) -> None:
        self.resumed = asyncio.get_running_loop().time()


async def test_a_drained_trainer_calls_its_try_off(tmp_path: Path) -> None:
    """Else the engine stands still until the lease of the try ends, twice the deadline."""
    engine = SlowEngine(receive_seconds=30.0)
    sim = Simulation(tmp_path, engine=engine)
    await sim.record_messages()
    loop = asyncio.get_running_loop()
    explorer = loop.create_task(sim.make_explorer().run())
    trainer = loop.create_task(sim.make_trainer().run())
    await until(lambda: sim.trainer.loop.gate.phase == "preparing")
    await asyncio.sleep(1.0)
    drained = loop.time()
    sim.trainer.drain()
    await trainer
    await until(lambda: engine.resumed is not None)
    await killed(explorer)
    assert engine.resumed is not None
    assert engine.resumed - drained < 1.0


class TroubledEngine(FakeEngine):
    """Fails one receive, or all where it is at 0."""

    def __init__(self, at: int, kind: str) -> None:
        super().__init__()
        self.at, self.kind, self.seen = at, kind, 0

    async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.seen += 1
        if self.at not in {0, self.seen}:
            return await super().receive(spec, timeout)
        if self.kind == "hangs":
            await asyncio.Event().wait()
        if self.kind == "canary":
            return {"logprobs": [-9.0] * (len(spec["canary"]["tokens"]) - 1)}
        raise ReceiveFailed("no weights came", 500, "receive", touched=self.kind == "touched")


async def test_an_engine_that_always_fails_the_canary_makes_no_busy_loop(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, engine=TroubledEngine(0, "canary"))
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(agent.run()) for agent in (sim.make_explorer(), sim.make_trainer())]
    await asyncio.sleep(100.0)
    assert sim.explorer.state == "holding"
    for task in tasks:
        await killed(task)
    assert 5 <= sim.trainer.loop.gate.aborts <= 20
    assert sim.engine.served == []


@pytest.mark.parametrize("kind", ["hangs", "touched", "untouched", "canary"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_member_that_fails_costs_its_try_only(tmp_path: Path, kind: str, at: int) -> None:
    engine = TroubledEngine(at, kind)
    sim = Simulation(tmp_path, ("synchronizer.sync_timeout=5",), batches=4, engine=engine)
    run_virtually(sim.run(), limit=200)
    assert sim.trainer.loop.gate.aborts == 1
    assert engine.served == [(1, step) for step in range(5)]
    aborts = [event.reason for event in sim.published(SyncEvent) if event.verb == "abort"]
    assert len(aborts) == 1
    if kind == "canary":
        assert "canary" in str(aborts[0])


def test_a_finished_trainer_stays_and_serves_an_engine_that_comes_back_empty(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=2, runner_seconds=lambda each: 10.0 if each.batch == "2/held" else 0.1)
    sim.spoil = lambda task_slice: "failed" if task_slice.pinned not in {None, sim.engine.snapshot.version} else None

    async def scene() -> None:
        await until(lambda: any(label == 2 for label in sim.explorer.exploration.state.due) if _up(sim) else False)
        await asyncio.sleep(1.0)
        assert sim.trainer.loop.finished
        sim.engine.snapshot = replace(sim.engine.snapshot, alive=False, version=None)
        sim.engine.on_change()
        await asyncio.sleep(3.0)
        sim.engine.snapshot = replace(sim.engine.snapshot, alive=True, state="empty")
        sim.engine.on_change()

    run_virtually(sim.run(beside=scene), limit=1000)
    assert sim.engine.served == [(1, 0), (1, 1), (1, 2), (1, 2)]
    assert sim.evaluated_steps() == [0, 2]


def _up(sim: Simulation) -> bool:
    return bool(sim.explorers) and sim.explorer.exploration is not None


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("progress-")) for path in (folder / "checkpoints").glob("progress-*"))


@pytest.mark.parametrize("seconds", [7.0, 8.0, 9.0])
@pytest.mark.parametrize("saved", [2, 100])
def test_a_restarted_trainer_takes_what_it_has_trained_on_before_engines_get_its_weights(
    tmp_path: Path, saved: int, seconds: float
) -> None:
    """Rollouts under way would else be of weights as old as the checkpoint, and their groups be dropped."""
    overrides = ("synchronizer.sync_offset=1", f"trainer.save_interval={saved}", "explorer.eval_interval=100")
    late = {6, 7}
    sim = Simulation(tmp_path, overrides, batches=8, runner_seconds=lambda each: seconds if each.batch in late else 0.1)

    run_virtually(sim.run(trainer=lambda: killed_at(sim, 5, then=1.0, pause=1.0)), limit=1000)
    assert list(outcomes(sim).values()) == ["trained"] * 8
    assert [value for _, value in sim.values("sample/dropped_stale_groups") if value] == []
    assert [version for version in sim.engine.served if version[0] == 2] == [(2, 5), (2, 6), (2, 7), (2, 8)]


# -- what the trainer and the operator say and acknowledge


async def test_whatever_became_of_a_batch_it_is_one_unit_of_progress_and_recorded(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, ("synchronizer.sync_interval=50",))
    await sim.record_messages()
    trainer, client = sim.make_trainer(), await sim.client()
    task = asyncio.get_running_loop().create_task(trainer.run())
    sets: list[tuple[int, Any]] = [(1, "failed"), (2, "gone"), (2, "empty"), (3, "empty")]
    for op, (batch, state) in enumerate(sets):
        ready = BatchReady(batch=batch, ticket=f"t{batch}", op=str(op), state=state, reason=f"why {batch}")
        await client.publish(sim.topology.exchange("ready"), str(batch), envelope(ready))
    await until(lambda: trainer.loop.progress == 3)
    await asyncio.sleep(5.0)
    trainer.drain()
    await task
    outcomes = [("t1", "failed"), ("t2", "gone"), ("t3", "empty")]
    assert (sim.trainer.loop.progress, sim.trainer.loop.step, sim.learners[0].steps) == (3, 0, [])
    told = sim.published(Progress)
    assert [one.progress for one in told] == [1, 2, 3], "a second set of a ticket is no further batch"
    assert [(one.ticket, one.outcome) for one in told] == outcomes
    assert told[0].reason == "why 1"
    history = lineage(tmp_path / "history", 1, 3)
    assert [(entry["ticket"], entry["outcome"]) for entry in history] == outcomes
    assert [entry["uids"] for entry in history] == [[]] * 3


def test_resumed_it_gives_the_checkpoints_weights_out_before_it_reads_on(tmp_path: Path) -> None:
    """New generation, sync, then the stream: what is sampled meanwhile is of weights that somebody holds."""
    sim = WatchedSimulation(tmp_path, ("trainer.save_interval=1", "synchronizer.sync_interval=3"), batches=6)

    run_virtually(sim.run(trainer=lambda: killed_at(sim, 3)), limit=1000)
    check_history(sim, 6)
    events = [one for one in _in_order(sim) if getattr(one, "generation", 2) == 2]
    commits = [n for n, one in enumerate(events) if isinstance(one, SyncEvent) and one.version and one.version[0] == 2]
    steps = [n for n, one in enumerate(events) if isinstance(one, Progress)]
    assert commits[0] < steps[0]
    first = events[commits[0]]
    assert isinstance(first, SyncEvent)
    assert first.version is not None
    assert first.version[1] >= 2, "the weights of the checkpoint, not those of the beginning"


def _in_order(sim: WatchedSimulation) -> list[Progress | SyncEvent]:
    """What was published of both kinds, as it came."""
    found = [one for one in sim.messages() if isinstance(one, Progress | SyncEvent)]
    return [one for one in found if isinstance(one, Progress) or one.verb == "commit"]


def test_a_trainer_without_the_lock_reads_and_says_nothing(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=3)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sim.make_trainer("trainer-0").run())
            await asyncio.sleep(0.5)
            group.create_task(sim.make_trainer("trainer-1").run())

    run_virtually(sim.run(trainer=both), limit=300)
    assert [trainer.loop.progress for trainer in sim.trainers] == [3, 0]
    assert [act for act in sim.acts if act.who == "trainer-1" and act.what == "publish"] == []
    assert sim.learners[1].steps == []


def test_an_operator_acknowledges_no_part(tmp_path: Path) -> None:
    """What it holds comes back if it dies; the parts go with their queue."""
    sim = WatchedSimulation(tmp_path, batches=3)
    run_virtually(sim.run(), limit=300)
    check_history(sim, 3)
    acked = [act.subject for act in sim.acts if act.what == "acked" and act.who.startswith("operator")]
    assert acked == ["closed"] * 3


def test_an_operator_takes_one_manifest_at_a_time(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, ("synchronizer.sync_interval=4",), batches=4)
    sim.holds = late_operators(lambda batch: 20.0)

    async def look() -> None:
        await until(lambda: len(sim.tickets("batch_closed")) == 4)
        await asyncio.sleep(1.0)
        assert len(sim.waiting_in("closed")) == 3, "the others wait where another operator can have them"

    run_virtually(sim.run(beside=look), limit=1000)


async def test_a_trainer_decides_nothing_before_it_has_read_its_mark(tmp_path: Path) -> None:
    """Whether a stream is the one that the checkpoint knows is certain only then."""
    sim = WatchedSimulation(tmp_path)
    bus, client = sim.bus(), await sim.client()
    await bus.connect()
    await bus.declare(*sim.topology.durable)
    ready = envelope(BatchReady(batch=1, ticket="a", op="o", state="empty"))
    await client.publish(sim.topology.exchange("ready"), "1", ready)
    reads_mark, consume, read = asyncio.Event(), bus.consume, []

    async def holds_back(queue: Any, **how: Any) -> Any:
        feed = await consume(queue, **how)
        following = feed.__anext__

        class Held:
            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *what: Any) -> None:
                await feed.close()

            async def __anext__(self) -> Any:
                if len(read) == 1:  # the mark is next
                    await reads_mark.wait()
                delivery = await following()
                read.append(delivery)
                return delivery

        return Held()

    bus.consume = holds_back  # type: ignore[method-assign]
    source = StreamSource(bus, sim.topology, "trainer-0")
    reading = asyncio.create_task(source.run())
    await asyncio.sleep(5.0)
    assert not source.available()
    reads_mark.set()
    await asyncio.sleep(1.0)
    assert source.available()
    await killed(reading)


def test_a_trainers_beat_carries_generation_committed_version_epoch_and_phase(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=2)
    told: list[TrainerStatus] = []

    async def scene() -> None:
        await until(lambda: sim.explorer.peers.trainer.committed == (1, 1))
        told.append(sim.explorer.peers.trainer)

    run_virtually(sim.run(beside=scene), limit=300)
    (level,) = told
    assert (level.generation, level.committed, level.epoch) == (1, (1, 1), sim.trainer.loop.gate.machine.epoch)
    assert level.phase in {"idle", "applying"}


# -- how long the trainer waits for data


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


# -- no sync begins while the explorer evaluates the present version under style fixed


LEASE, EVAL_TIMEOUT = 15.0, 90.0


@dataclass
class Held:
    """An evaluation of which a trainer heard one heartbeat."""

    style: str = "fixed"
    evaluating: int | None = 3
    served: bool = True
    lease: float = LEASE


@pytest.mark.parametrize(
    ("held", "seconds"),
    [
        pytest.param(Held(), pytest.approx(LEASE, abs=2.1), id="until the lease of an explorer that died ends"),
        pytest.param(Held(lease=1e6), pytest.approx(EVAL_TIMEOUT), id="no longer than the evaluation may take"),
        pytest.param(Held(evaluating=None), 0.0, id="not after the evaluation"),
        pytest.param(Held(served=False), 0.0, id="not without an engine that serves a version"),
        pytest.param(Held(style="fully_async"), 0.0, id="not in other styles"),
    ],
)
async def test_a_sync_is_held_back_for_an_evaluation(tmp_path: Path, held: Held, seconds: float) -> None:
    sim = Simulation(tmp_path, (f"synchronizer.sync_style={held.style}", f"explorer.eval_timeout={EVAL_TIMEOUT}"))
    trainer, now = sim.make_trainer(), asyncio.get_running_loop().time
    beat = {"role": "explorer", "id": "e", "seq": 1, "incarnation": "i", "lease": held.lease, "state": "working"}
    trainer.peers.receive(Heartbeat(**beat, detail={"evaluating": held.evaluating}))
    trainer.loop.gate.machine.join("engine", (1, 0) if held.served else None, now())
    began = now()
    await trainer.loop.evaluation_ended()
    assert now() - began == seconds


# -- several batches to a train step


TWO = "trainer.batches_per_step=2"
WORLDS = [
    ("synchronizer.sync_interval=2", "synchronizer.sync_offset=0"),
    ("synchronizer.sync_interval=2", "synchronizer.sync_offset=1"),
    ("synchronizer.sync_interval=4", "synchronizer.sync_offset=0"),
    ("synchronizer.sync_style=trainer_driven", "synchronizer.pipeline_depth=1"),
    ("synchronizer.sync_style=explorer_driven", "synchronizer.pipeline_depth=1", "synchronizer.sync_interval=1"),
    ("synchronizer.sync_style=fully_async", "synchronizer.pipeline_depth=3", "synchronizer.sync_interval=2"),
]


@pytest.mark.parametrize("settings", WORLDS, ids=str)
@pytest.mark.parametrize("batches", [1, 6, 7])
def test_two_batches_make_a_step_and_the_last_takes_what_is_left(
    tmp_path: Path, settings: tuple[str, ...], batches: int
) -> None:
    sim = Simulation(tmp_path, (TWO, *settings), batches=batches)
    run_virtually(sim.run(), limit=1000)
    steps = -(-batches // 2)
    assert (sim.trainer.loop.progress, sim.config.train_steps) == (batches, steps)
    assert sim.learners[-1].steps == list(range(1, steps + 1))
    assert sim.engine.served[-1] == (1, steps), "the final weights are served"
    assert [(one.progress, one.step) for one in sim.published(Progress)] == [
        (number, (number + 1) // 2) for number in range(1, batches + 1)
    ], "each batch is progress, of the step that it was part of"
    history = lineage(tmp_path / "history", 1, batches)
    assert {entry["batch"] for entry in history} == set(range(1, batches + 1))
    assert [entry["step"] for entry in history] == [(number + 1) // 2 for number in range(1, batches + 1)]
    assert len({uid for entry in history for uid in entry["uids"]}) == 4 * batches


@pytest.mark.parametrize("after", [round(0.4 * n, 2) for n in range(1, 10)])
@pytest.mark.parametrize("settings", [WORLDS[0], WORLDS[3]], ids=str)
def test_a_trainer_killed_in_between_takes_the_same_batches_together_again(
    tmp_path: Path, settings: tuple[str, ...], after: float
) -> None:
    overrides = (TWO, "trainer.save_interval=2", "synchronizer.sync_timeout=5", *settings)
    sim = Simulation(tmp_path, overrides, batches=5, step_seconds=0.3)

    run_virtually(sim.run(trainer=kill_and_replace_trainer(sim, after)), limit=3000)
    history = lineage(tmp_path / "history", sim.trainer.loop.generation, 5)
    assert [entry["progress"] for entry in history] == [1, 2, 3, 4, 5]
    assert [entry["step"] for entry in history] == [1, 1, 2, 2, 3]
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len(set(uids)) == len(uids) == 20


class Failing(ExperienceOperatorV1):
    async def process(self, exps: list[Experience]) -> Processed:
        if exps[0].eid.batch in {2, 5, 6}:
            raise ValueError("not this one")
        return exps, {}


def test_a_failed_batch_is_progress_and_its_neighbour_is_a_step_alone(tmp_path: Path) -> None:
    chain = f'operator.operators=[{{"name": "{__name__}.Failing"}}]'
    sim = Simulation(tmp_path, (TWO, chain, *WORLDS[0]), batches=6)
    run_virtually(sim.run(), limit=3000)
    found = [(one.batch, one.outcome, one.step) for one in sim.published(Progress)]
    assert found == [
        (1, "trained", 1),
        (2, "failed", 1),
        (3, "trained", 2),
        (4, "trained", 2),
        (5, "failed", 2),
        (6, "failed", 2),
    ]
    assert sim.learners[-1].steps == [1, 2]


# -- mode explore: what is rolled out is written once; weights stay


EXPLORE = ("mode=explore", "trainer.save_interval=3")


class MemorySink:
    """Keeps what was written, as files do."""

    def __init__(self) -> None:
        self.title = "memory"
        self.batches: dict[int, list[str]] = {}
        self.writes = 0

    def write(self, batch: int, experiences: Sequence[Experience]) -> None:
        found = [one.eid.rid for one in experiences]
        assert self.batches.get(batch, found) == found, "written again it is the same"
        self.batches[batch] = found
        self.writes += 1

    def close(self) -> None:
        """Nothing to close."""


class SlowRecorder(RecordingLearner):
    """Takes a second to write a batch, in which it may be killed."""

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        await asyncio.sleep(0.5)
        metrics = await super().step(experiences, step_number)
        await asyncio.sleep(0.5)
        return metrics


def explored(folder: Path, lives: Sequence[float]) -> tuple[Simulation, MemorySink]:
    sim, sink = Simulation(folder, EXPLORE, batches=9), MemorySink()

    async def trainer() -> None:
        for seconds in lives:
            life = asyncio.create_task(sim.make_trainer(learner=SlowRecorder(FakeLearner(), sink)).run())  # type: ignore[arg-type]
            await asyncio.sleep(seconds)
            await killed(life)
        await sim.make_trainer(learner=SlowRecorder(FakeLearner(), sink)).run()  # type: ignore[arg-type]

    run_virtually(sim.run(trainer=trainer), limit=5000)
    return sim, sink


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_wherever_it_is_killed_every_batch_is_written_once_and_the_engines_keep_their_weights(
    tmp_path: Path, seed: int | None
) -> None:
    dice = random.Random(seed)
    sim, sink = explored(tmp_path, [] if seed is None else [dice.uniform(0.2, 2.5) for _ in range(3)])
    assert sorted(sink.batches) == list(range(1, 10))
    assert all(len(set(runs)) == len(runs) == 4 for runs in sink.batches.values())
    assert {version[1] for version in sim.engine.served} == {0}, "one version, that of the model it began with"
    assert not (tmp_path / "final").exists()
    assert max(value for _, value in sim.values("sample/staleness/max")) == 0
    if seed is None:
        assert sink.writes == 9
        assert dict(sim.values("output/experiences")) == dict.fromkeys(range(1, 10), 4.0)


# -- a guard that stops the training: the batch is kept, for a look and for the next start


class Faulty(TorchLearner):
    """Finds advantages that are no numbers in the batches named, as a broken estimator would leave them."""

    faulty: Sequence[int] = ()

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        given = list(experiences)
        for one in given:
            if one.eid.batch in self.faulty:
                one.advantages = torch.full((one.response_length,), math.nan)
        return await super().step(given, step_number)

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [0.0] * (len(tokens) - 1)  # what the fake engine answers


FOUND_FAULTY = (3, 4, 5, 6, 7, 8)
"""Batches with the fault: the training stops at the seventh, the fifth of them."""


@pytest.mark.parametrize("save_interval", [1, 2, 50])
def test_the_batch_at_which_the_training_stops_is_trained_after_a_restart_and_once(
    tmp_path: Path, save_interval: int, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (f"trainer.save_interval={save_interval}", "synchronizer.max_staleness=9")
    sim = Simulation(tmp_path, overrides, batches=10)
    model = ensure_model_folder(sim.config.model, tmp_path / "model", 0)
    errors: list[str] = []

    def learner(faulty: Sequence[int]) -> Any:
        made = Faulty(sim.config, model, 10)
        made.faulty = faulty
        return made

    async def trainers() -> None:
        for _ in range(4):  # more than the starts after which a batch that kills trainers is skipped
            with pytest.raises(ExceptionGroup) as caught:
                await sim.make_trainer(learner=learner(FOUND_FAULTY)).run()
            errors.append(str(leaf(caught.value, TrainingStopped)))
            assert sim.trainer.loop.progress == 6
            await asyncio.sleep(1)
        await sim.make_trainer(learner=learner(FOUND_FAULTY[:4])).run()

    run_virtually(sim.run(trainer=trainers), limit=10_000)
    assert outcomes(sim) == {n: "skipped" if n in FOUND_FAULTY[:4] else "trained" for n in range(1, 11)}
    assert sim.dead_letters() == []

    history = lineage(tmp_path / "history", sim.trainer.loop.generation, 10)
    assert [entry["progress"] for entry in history] == list(range(1, 11))
    assert [entry["outcome"] for entry in history] == [outcomes(sim)[n] for n in range(1, 11)]
    assert [entry["step"] for entry in history] == [1, 2, 2, 2, 2, 2, 3, 4, 5, 6]
    uids = Counter(uid for entry in history for uid in entry["uids"])
    assert set(uids.values()) == {1}
    assert len(uids) == 6 * 4
    told = Counter((one.generation, one.batch) for one in sim.published(Progress))
    assert all(count == 1 for count in told.values())
    assert {batch for generation, batch in told if generation <= 4} <= set(range(1, 7))
    (ticket,) = (entry["ticket"] for entry in history if entry["batch"] == 7)
    assert StepAttempts(tmp_path / "checkpoints").starts(ticket) == 0

    assert len(errors) == 4
    file = tmp_path / "stopped" / "batch-7.tmqx"
    assert "5 optimizer steps in a row were skipped (nonfinite_loss 5)" in errors[0]
    assert "Batch 7 is not counted: the next start of the trainer reads it again" in errors[0]
    command = f"trinity-mq inspect {file} --tokenizer {model}"
    assert f"`{command}`" in errors[0]
    kept = ExperienceBatch.decode(file.read_bytes())
    assert sorted(kept.ids("uid")) == sorted(uid for entry in history for uid in entry["uids"] if entry["batch"] == 7)
    assert list(file.parent.iterdir()) == [file]
    capsys.readouterr()
    assert main([*command.split()[1:], "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["uid"] for one in shown] == kept.ids("uid")


def test_a_disk_without_room_does_not_hide_why_the_training_stopped(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.guard.max_consecutive_skips=1",), batches=2)
    model = ensure_model_folder(sim.config.model, tmp_path / "model", 0)
    (tmp_path / "stopped").write_text("no folder")

    async def trainer() -> None:
        learner: Any = Faulty(sim.config, model, 2)
        learner.faulty = (1,)
        await sim.make_trainer(learner=learner).run()

    text = str(failure(sim.run(trainer=trainer), TrainingStopped, limit=1000))
    assert "1 optimizer steps in a row were skipped" in text
    assert "could not be written" in text


# -- checkpoints that are written while training goes on


WRITE_SECONDS = 20.0
KEPT = ("trainer.save_interval=2", "trainer.max_checkpoints_to_keep=9")


class SlowWriter(FakeLearner):
    """Copies in no time, and writes for long. Notes when it does what."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(0.1)
        self.done: list[str] = []
        self.writing = 0
        self._fails_at = fails_at

    async def step(self, experiences: Any, step_number: int) -> dict[str, float]:
        self.done.append(f"step {step_number}")
        return await super().step(experiences, step_number)

    async def stage(self) -> Writer:
        self.done.append("copied")
        return self.save

    async def save(self, folder: Path) -> None:
        assert not self.writing, "two checkpoints were being written"
        self.writing += 1
        (folder / "weights").write_text("half")
        await asyncio.sleep(WRITE_SECONDS)
        if self._fails_at is not None and len(self.steps) >= self._fails_at:
            raise OSError(28, "No space left on device")
        (folder / "weights").write_text("whole")
        self.writing -= 1
        self.done.append("written")


def saved_lines(folder: Path, generation: int = 1) -> list[int]:
    lines = (folder / "history" / f"{generation}.jsonl").read_text().splitlines()
    return [json.loads(line)["saved"] for line in lines if '"saved"' in line]


async def with_trainer(sim: Simulation, learner: FakeLearner) -> None:
    await sim.make_trainer(learner=learner).run()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=4", "trainer.max_checkpoints_to_keep=9"), batches=6)
    learner = SlowWriter()
    seen: list[tuple[list[int], list[int]]] = []

    async def look() -> None:
        await until(lambda: learner.writing == 1)
        assert "step 5" not in learner.done
        await until(lambda: "step 6" in learner.done)
        seen.append((checkpoints(tmp_path), saved_lines(tmp_path)))

    run_virtually(sim.run(trainer=lambda: with_trainer(sim, learner), beside=look), limit=1000)
    assert seen == [([], [])], "nothing that depends on a checkpoint was done before it was committed"
    assert checkpoints(tmp_path) == saved_lines(tmp_path) == [4, 6]
    assert [one for one in learner.done if not one.startswith("step")] == ["copied", "written"] * 2
    assert learner.done.index("step 6") < learner.done.index("written")
    blocked, written = (dict(sim.values(f"time/{name}")) for name in ("save", "write_checkpoint"))
    assert max(blocked.values()) < 1.0
    assert written == {4: pytest.approx(WRITE_SECONDS, abs=1.0), 6: pytest.approx(WRITE_SECONDS, abs=1.0)}


WAITS = ["step 1", "copied", "step 2", "written", "copied", "step 3", "written", "copied", "step 4"]


@pytest.mark.parametrize(
    ("settings", "saved", "done"),
    [
        ((), [1, 2, 3, 4], WAITS),
        (("trainer.async_save=false",), [1, 2, 3, 4], ["step 1", "written", "step 2", "written", "step 3", "written"]),
        (
            ("trainer.save_interval=2", "trainer.keep_every=3", "trainer.max_checkpoints_to_keep=1"),
            [3, 4],
            ["step 1", "step 2", "copied", "step 3", "written", "copied", "step 4"],
        ),
    ],
    ids=["in the background", "training waits", "at each multiple that stays"],
)
def test_the_next_checkpoint_waits_for_the_one_before(
    tmp_path: Path, settings: tuple[str, ...], saved: list[int], done: list[str]
) -> None:
    settings = ("trainer.save_interval=1", "trainer.max_checkpoints_to_keep=9", *settings)
    sim, learner = Simulation(tmp_path, settings, batches=4), SlowWriter()
    run_virtually(sim.run(trainer=lambda: with_trainer(sim, learner)), limit=1000)
    assert checkpoints(tmp_path) == saved
    assert set(saved) <= set(saved_lines(tmp_path))
    assert learner.done[: len(done)] == done
    if "trainer.async_save=false" in settings:
        assert dict(sim.values("time/save"))[2] == pytest.approx(WRITE_SECONDS, abs=1.0)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_checkpoint_that_cannot_be_written_ends_the_trainer_with_the_same_error(
    tmp_path: Path, in_background: bool
) -> None:
    settings = ("trainer.save_interval=2", f"trainer.async_save={in_background}")
    sim = Simulation(tmp_path, settings, batches=6)
    learner = SlowWriter(fails_at=4)
    text = str(failure(sim.run(trainer=lambda: with_trainer(sim, learner)), CheckpointError, limit=1000))
    assert "cannot save progress-00000" in text
    assert "No space left on device" in text
    assert checkpoints(tmp_path) == saved_lines(tmp_path), "what was committed before is whole"
    assert not list((tmp_path / "checkpoints").glob(".partial-*"))


@pytest.mark.parametrize("after", [0.0, 5.0, 19.9])
def test_killed_while_a_checkpoint_is_written_it_goes_on_from_the_one_before(tmp_path: Path, after: float) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=2", "synchronizer.sync_offset=4"), batches=8)
    learner = SlowWriter()

    async def trainer() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer(learner=learner).run())
        await until(lambda: checkpoints(tmp_path) == [2] and learner.writing == 1)
        await asyncio.sleep(after)
        sim.broker.drop(sim.trainer.bus, delay=None)  # type: ignore[arg-type]  # no last words
        assert await killed(first)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    assert sim.learners[1].steps[0] == 3
    entries = lineage(tmp_path / "history", 2, 8)
    uids = [uid for entry in entries for uid in entry["uids"]]
    assert [entry["batch"] for entry in entries] == list(range(1, 9))
    assert len(uids) == len(set(uids)) == 8 * 4
    assert len(sim.published(Progress)) >= 8


def test_one_that_is_asked_to_end_writes_what_it_has(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=3", "synchronizer.sync_offset=9"), batches=9)
    learner = SlowWriter()

    async def trainer() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer(learner=learner).run())
        await until(lambda: learner.writing == 1 and "step 4" in learner.done)
        sim.trainer.drain()
        await first
        assert checkpoints(tmp_path) == saved_lines(tmp_path) == [3, sim.trainer.loop.progress]
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    assert sim.learners[1].steps[0] == learner.steps[-1] + 1


# -- going back to a named one


@pytest.mark.parametrize("died", [False, True], ids=["", "killed before its first checkpoint"])
def test_a_trainer_goes_on_from_the_checkpoint_that_was_chosen(tmp_path: Path, died: bool) -> None:
    sim = Simulation(tmp_path, (*KEPT, "synchronizer.sync_offset=4"), batches=8)

    async def trainer() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_task(sim.make_trainer().run())
        await until(lambda: checkpoints(tmp_path) == [2, 4, 6])
        await killed(first)
        choose(tmp_path / "checkpoints", find_by_name(tmp_path / "checkpoints", "step-2"))
        if died:
            again = loop.create_task(sim.make_trainer().run())
            await until(lambda: bool(sim.trainer.loop.source.available()))
            await killed(again)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    assert sim.learners[-1].steps == [3, 4, 5, 6, 7, 8]
    newest = find_checkpoints(tmp_path / "checkpoints")[0][0]
    assert (newest.state.generation, newest.state.progress) == (3 if died else 2, 8)
    entries = lineage(tmp_path / "history", newest.state.generation, 8)
    assert [entry["batch"] for entry in entries] == list(range(1, 9))
    assert len({uid for entry in entries for uid in entry["uids"]}) == 8 * 4


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_finished_run_goes_back_and_finishes_again(tmp_path: Path, is_damaged: bool) -> None:
    sim = Simulation(tmp_path, (*KEPT, f"run_dir={tmp_path}"), batches=8)
    run_virtually(sim.run(), limit=1000)
    assert sim.evaluated_steps() == [0, 2, 4, 6, 8]
    assert rewind_to_checkpoint(sim.config, "progress-4") == [
        "resumes from progress-000004; up to 4 later batches are trained on again"
    ]
    (tmp_path / "finished").unlink()
    again = Simulation(tmp_path, (*KEPT, f"run_dir={tmp_path}"), batches=8, broker=sim.broker)
    if is_damaged:
        (tmp_path / "checkpoints" / "progress-000004" / "weights").write_text("nine")
        text = str(failure(again.run(), CheckpointError, limit=1000))
        assert "progress-000004: weights has the checksum" in text, "nothing takes the place of a chosen checkpoint"
        assert "choose another checkpoint than progress-000004 with `trinity-mq run --from`" in text
        assert again.learners[-1].steps == []
        return
    run_virtually(again.run(), limit=1000)
    assert again.learners[-1].steps == [5, 6, 7, 8]
    assert again.evaluated_steps() == [8], "the weights at the end may be others"
    assert again.explorer.exploration.state.opened == 8, "no further batch was made"  # type: ignore[union-attr]
    assert len(lineage(tmp_path / "history", 2, 8)) == 8
