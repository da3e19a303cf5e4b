"""The trainer's promises (docs/protocol.md, docs/learning.md) on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.unit.agents.watched import WatchedSimulation
from tests.unit.agents.world import Over, failure, leaf
from tests.virtual import virtually
from trinity_agents.simulation import Simulation, killed, until
from trinity_agents.trainer.history import lineage
from trinity_mq.bus.memory.bus import MemoryBus
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.messages import BatchReady, ControlEvent, Progress, RunEnd, SyncEvent
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.testing.fakes import FakeEngine, FakeLearner, FakeRunner
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError, StepAttempts


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
        third = asyncio.get_running_loop().create_task(sim.make_trainer(learner=Deadly(set(), tried)).run())
        await until(lambda: sim.trainer.loop.progress == 3)
        await killed(third)
        await sim.make_trainer(learner=Deadly(set(), tried)).run()

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


def test_batches_from_too_old_weights_are_dropped_whole_and_are_progress(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("explorer.max_consecutive_empty=100",), batches=5)

    async def runner(bus: Any, topology: Any) -> None:
        def version() -> tuple[int, int] | None:
            now = sim.engine.snapshot.version
            return (1, 0) if now == (1, 2) else now

        await FakeRunner(bus, topology, version, sim.runner_seconds, sim.spoil).run()

    sim.runner = runner  # type: ignore[method-assign]
    run_virtually(sim.run(), limit=1000)
    told = sim.published(Progress)
    assert [one.outcome for one in told] == ["trained", "trained", "dropped", "dropped", "dropped"]
    assert [one.dropped for one in told] == [0, 0, 4, 4, 4]
    assert sim.trainer.loop.step == 2
    assert dict(sim.values("sample/dropped_stale_groups"))[3] == 2.0
    assert dict(sim.values("sample/skipped_step"))[3] == 1.0


def test_what_does_not_decode_fails_its_batch_only_or_is_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(tmp_path, batches=3)
    publish = MemoryBus.publish

    async def spoils(self: MemoryBus, exchange: str, key: str, mail: Any, **how: Any) -> bool:
        if exchange.endswith("ready") and key == "2" and "op" in mail.headers and "n" in mail.headers:
            mail = replace(mail, body=mail.body[:-1])
        return await publish(self, exchange, key, mail, **how)

    async def intruder() -> None:
        bus = await sim.client()
        await asyncio.sleep(2.0)
        for name in ("ready", "results"):
            mail = replace(envelope(RunEnd(batches=3)), body=b"\xc1", kind="unknown")
            await bus.publish(sim.topology.exchange(name), "x", mail)

    monkeypatch.setattr(MemoryBus, "publish", spoils)
    run_virtually(sim.run(beside=intruder), limit=1000)
    assert outcomes(sim) == {1: "trained", 2: "failed", 3: "trained"}
    (failed,) = (one for one in sim.published(Progress) if one.outcome == "failed")
    assert "does not decode" in str(failed.reason)
    assert {letter["dead-queue"] for letter in sim.dead_letters()} == {"tmq.sim.ready", "tmq.sim.results"}


def test_a_stream_cut_behind_the_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=1", "synchronizer.sync_offset=3"), batches=4)

    async def trainer() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer().run())
        await until(lambda: checkpoints(tmp_path) == [1])
        await killed(first)
        await asyncio.sleep(5.0)
        sim.stream().trim(sim.stream().depth - 1)
        await sim.make_trainer().run()

    text = str(failure(sim.run(trainer=trainer), FatalError, limit=1000))
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


async def killed_at(
    sim: Simulation, progress: int, between: Callable[[], None], learner: FakeLearner | None = None
) -> None:
    """A trainer that is killed, and started again after ``between()``."""
    first = asyncio.get_running_loop().create_task(sim.make_trainer().run())
    await until(lambda: sim.trainer.loop.progress == progress)
    await killed(first)
    between()
    await sim.make_trainer(learner=learner or FakeLearner(0.1)).run()


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
        run_virtually(sim.run(trainer=lambda: killed_at(sim, 5, harm, FailsToLoad(0.1))), limit=1000)
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

    run = sim.run(trainer=lambda: killed_at(sim, 5, lose))
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


@virtually
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


@virtually
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


@virtually
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


def test_a_restarted_trainer_and_a_member_of_its_predecessors_try_understand_each_other(tmp_path: Path) -> None:
    """Both lives count epochs and attempts from one under one name; the version tells them apart."""
    engine = FakeEngine(receive_seconds=4.0)
    sim = Simulation(tmp_path, ("synchronizer.sync_timeout=30",), batches=2, engine=engine)

    async def killed_in_its_first_try() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer().run())
        await until(lambda: sim.trainer.loop.gate.phase == "entering")
        await asyncio.sleep(2.0)
        sim.broker.drop(sim.trainer.bus, delay=None)  # type: ignore[arg-type]  # no last words
        await killed(first)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=killed_in_its_first_try), limit=1000)
    assert sim.trainer.loop.gate.aborts == 0
    assert engine.served == [(2, 0), (2, 1), (2, 2)]


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


@pytest.mark.parametrize("after", [0.0, 0.15, 0.3, 1.2, 1.4, 2.0, 3.0])
def test_killed_during_its_end(tmp_path: Path, after: float) -> None:
    sim = Simulation(tmp_path, batches=2, runner_seconds=lambda each: 4.0 if each.batch == "2/held" else 0.1)

    async def killed_at_the_end() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer().run())
        await until(lambda: bool(sim.published(RunEnd)))
        await asyncio.sleep(after)
        if await killed(first):
            await asyncio.sleep(2.0)
            await sim.make_trainer().run()

    run_virtually(sim.run(trainer=killed_at_the_end), limit=1000)
    assert sim.trainer.loop.progress == 2
    assert sim.evaluated_steps() == [0, 2]
    assert checkpoints(tmp_path)[-1] == 2
    assert len(lineage(tmp_path / "history", sim.trainer.loop.generation, 2)) == 2


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

    async def killed_while_they_are_under_way() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer().run())
        await until(lambda: sim.trainer.loop.progress == 5)
        await asyncio.sleep(1.0)
        assert await killed(first)
        await asyncio.sleep(1.0)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=killed_while_they_are_under_way), limit=1000)
    assert list(outcomes(sim).values()) == ["trained"] * 8
    assert [value for _, value in sim.values("sample/dropped_stale_groups") if value] == []
    assert [version for version in sim.engine.served if version[0] == 2] == [(2, 5), (2, 6), (2, 7), (2, 8)]
