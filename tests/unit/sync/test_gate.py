"""The drivers of coordinator and members, together on a bus in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from trinity_mq.config import SyncConfig
from trinity_mq.messages import SyncEvent, Version
from trinity_mq.sync.gate.coordinator import (
    AbandonCollective,
    Committed,
    Coordinator,
    Failed,
    StartCollective,
)
from trinity_mq.sync.gate.coordinator_driver import CoordinatorDriver
from trinity_mq.sync.gate.member import Member, MemberStage, Rejoin, Resume
from trinity_mq.sync.gate.member_driver import MemberDriver
from trinity_mq.testing.fakes import FakeChannel, FakeEngine, FakeLearner
from trinity_mq.testing.virtual_time import run_virtually


class Wire:
    """Carries every event to the other side; ``lose`` says which do not arrive."""

    def __init__(self) -> None:
        self.to_members: list[asyncio.Queue[SyncEvent]] = []
        self.to_trainer: asyncio.Queue[SyncEvent] = asyncio.Queue()
        self.said: list[SyncEvent] = []
        self.lose: Callable[[SyncEvent], bool] = lambda event: False

    async def from_trainer(self, event: SyncEvent) -> None:
        self.said.append(event)
        if not self.lose(event):
            for queue in self.to_members:
                queue.put_nowait(event)

    async def from_member(self, event: SyncEvent) -> None:
        self.said.append(event)
        if not self.lose(event):
            self.to_trainer.put_nowait(event)

    def verbs(self, *wanted: str) -> list[str]:
        return [event.verb for event in self.said if event.verb in wanted]


async def each(feed: asyncio.Queue[SyncEvent], handle: Callable[[Any, Any], Awaitable[None]]) -> None:
    while True:
        await handle(await feed.get(), None)


class Gate:
    """One trainer, and one engine or these engines."""

    def __init__(
        self,
        *engines: FakeEngine,
        timeout: float = 5.0,
        ranks: tuple[int, ...] = (),
        learner: FakeLearner | None = None,
        channel: FakeChannel | None = None,
    ) -> None:
        self.wire, self.engines = Wire(), engines or (FakeEngine("e0"),)
        self.channel = channel or FakeChannel()
        self.no_evaluation = asyncio.Event()
        self.no_evaluation.set()
        self.keeper = CoordinatorDriver(
            name="trainer-0",
            config=SyncConfig(sync_timeout=timeout),
            dtype="float32",
            weights=learner or FakeLearner(),
            channel=self.channel,
            canary=(2, 3, 4),
            publish=self.wire.from_trainer,
            may_begin=self._evaluation_ended,
        )
        self.committed: Version | None = None
        self.commits: list[tuple[Version | None, int]] = []
        self.members = [
            self._member(n, engine, count)
            for n, (engine, count) in enumerate(zip(self.engines, ranks or [1] * len(self.engines), strict=True))
        ]

    def _member(self, n: int, engine: FakeEngine, ranks: int) -> MemberDriver:
        member = MemberDriver(
            name=f"m{n}",
            lease=15.0,
            engine=engine,
            publish=self.wire.from_member,
            last_commit=lambda: self._given(f"m{n}"),
            ranks=ranks,
        )
        member.on_commit = lambda version, progress: self.commits.append((version, progress))
        member.engine_up(None, None)
        return member

    def _given(self, member: str) -> Any:
        """As the trainer's beat tells it."""
        known = self.keeper.report().members.get(member)
        return (known.version, *known.given) if known and known.given else None

    async def _evaluation_ended(self) -> None:
        await self.no_evaluation.wait()

    def play(self, act: Callable[[], Awaitable[Any]], limit: float = 500) -> Any:
        async def main() -> Any:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.keeper.run(self.wire.to_trainer, each))]  # type: ignore[arg-type]
                for member in self.members:
                    feed: asyncio.Queue[SyncEvent] = asyncio.Queue()
                    self.wire.to_members.append(feed)
                    tasks.append(group.create_task(each(feed, member.receive_event)))
                    tasks.append(group.create_task(member.run()))
                result = await act()
                for task in tasks:
                    task.cancel()
            return result

        return run_virtually(main(), limit=limit)


def fakes(count: int) -> list[FakeEngine]:
    return [FakeEngine(f"e{n}") for n in range(count)]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_version_is_committed_at_every_member_and_unchanged_weights_cost_no_transfer() -> None:
    gate = Gate(*fakes(2))

    async def act() -> None:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 2)
        await gate.keeper.sync((1, 0), 0)
        await gate.keeper.confirm_unchanged(4)
        await asyncio.sleep(1.0)

    gate.play(act)
    assert [engine.served for engine in gate.engines] == [[(1, 0)], [(1, 0)]]
    assert gate.commits.count((None, 4)) == 2
    assert gate.wire.verbs("prepare", "commit") == ["prepare", "commit", "commit"]


@pytest.mark.parametrize("verb", ["prepare", "ready", "go", "applied", "commit", "join"])
def test_one_lost_event_of_any_kind_costs_at_most_a_try(verb: str) -> None:
    gate, lost = Gate(), []

    def lose(event: SyncEvent) -> bool:
        if event.verb == verb and not lost:
            lost.append(event)
            return True
        return False

    gate.wire.lose = lose

    async def act() -> None:
        await gate.keeper.sync((1, 0), 0)
        await gate.members[0].changed.until(lambda: gate.members[0].version == (1, 0) and gate.members[0].idle)

    gate.play(act, limit=60)
    assert lost
    assert gate.engines[0].served == [(1, 0)]


def test_a_try_given_up_lets_the_members_go_at_once() -> None:
    gate = Gate(timeout=60.0)
    gate.engines[0].receive_seconds = 40.0

    async def act() -> float:
        syncing = asyncio.ensure_future(gate.keeper.sync((1, 0), 0))
        await gate.keeper.changed.until(lambda: gate.keeper.phase == "entering")
        await asyncio.sleep(1.0)
        syncing.cancel()
        await asyncio.wait([syncing])
        await gate.keeper.settled()
        started = now()
        await gate.members[0].changed.until(lambda: gate.members[0].idle)
        return now() - started

    assert gate.play(act) < 0.5
    assert gate.keeper.phase == "idle"


def test_a_member_is_idle_only_when_its_engine_has_heard_of_the_end() -> None:
    """Else a look at the engine in between finds weights of no version and asks for them again."""
    gate = Gate()
    commit = gate.engines[0].commit
    seen: list[bool] = []

    async def slow(version: Version, progress: int) -> None:
        await asyncio.sleep(2.0)
        seen.append(gate.members[0].idle)
        await commit(version, progress)

    gate.engines[0].commit = slow  # type: ignore[method-assign]

    async def act() -> None:
        await gate.keeper.sync((1, 0), 0)
        await gate.members[0].changed.until(lambda: gate.members[0].idle)
        assert gate.engines[0].served == [(1, 0)]

    gate.play(act)
    assert seen == [False]


@pytest.mark.parametrize("can_pull", [True, False])
def test_an_engine_that_refuses_to_commit_is_given_the_weights_again(can_pull: bool) -> None:
    gate = Gate()
    gate.channel.can_pull = can_pull
    commit, refused = gate.engines[0].commit, []

    async def refuses_once(version: Version, progress: int) -> None:
        if not refused:
            refused.append(version)
            raise RuntimeError("nothing was received")
        await commit(version, progress)

    gate.engines[0].commit = refuses_once  # type: ignore[method-assign]

    async def act() -> None:
        await gate.keeper.sync((1, 0), 0)
        await asyncio.sleep(10.0)
        assert gate.keeper.needs_full_sync is not can_pull
        if not can_pull:
            await gate.keeper.sync((1, 0), 0)
        await gate.members[0].changed.until(lambda: gate.members[0].idle)

    gate.play(act)
    assert gate.engines[0].served == [(1, 0)]


def test_answers_to_another_life_of_the_trainer_do_not_count() -> None:
    gate = Gate()

    async def act() -> None:
        await gate.keeper.changed.until(lambda: gate.keeper.has_members)
        gate.engines[0].receive_seconds = 3.0
        syncing = asyncio.ensure_future(gate.keeper.sync((2, 5), 5))
        await gate.keeper.changed.until(lambda: gate.keeper.phase == "entering")
        for verb in ("ready", "applied", "failed"):
            old = SyncEvent.model_validate(
                {"verb": verb, "sender": "m0", "version": (1, 5), "epoch": 1, "attempt": 1, "reason": "old"}
            )
            gate.wire.to_trainer.put_nowait(old)
        await syncing

    gate.play(act)
    assert gate.keeper.aborts == 0


def test_nothing_is_begun_of_a_try_that_is_over_when_its_turn_comes() -> None:
    received: list[Any] = []

    class Noting(FakeEngine):
        async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
            received.append(spec["attempt"])
            return await super().receive(spec, timeout)

    said: list[SyncEvent] = []

    async def publish(event: SyncEvent) -> None:
        said.append(event)

    def event(verb: str) -> SyncEvent:
        fields = {"sender": "trainer-0", "version": (1, 0), "epoch": 1, "attempt": 1, "seconds": 5.0, "members": ["m0"]}
        return SyncEvent.model_validate({"verb": verb, **fields})

    async def main() -> None:
        member = MemberDriver(name="m0", lease=15.0, engine=Noting("e0"), publish=publish, last_commit=lambda: None)
        member.engine_up(None, None)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(member.run())
            await member.receive_event(event("prepare"), None)  # type: ignore[arg-type]
            await member.changed.until(lambda: any(one.verb == "ready" for one in said))
            for verb in ("go", "abort"):  # they come late, together
                await member.receive_event(event(verb), None)  # type: ignore[arg-type]
            await asyncio.sleep(1.0)
            assert member.idle
            running.cancel()

    run_virtually(main(), limit=60)
    assert received == []


class NotingEngine(FakeEngine):
    """Notes the place in the broadcast that it is told."""

    place = (0, 0)

    async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.place = spec["rank"], spec["world"]
        return await super().receive(spec, timeout)


def test_an_engine_has_as_many_ranks_as_it_joined_with() -> None:
    engines, worlds = [NotingEngine(f"e{n}") for n in range(3)], list[int]()

    class NotingChannel(FakeChannel):
        async def broadcast(self, tensors: Any, manifest: Any, epoch: int, attempt: int, world: int) -> None:
            worlds.append(world)

    gate = Gate(*engines, ranks=(1, 2, 1), channel=NotingChannel())

    async def act() -> None:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 3)
        await gate.keeper.sync((1, 0), 0)

    gate.play(act)
    assert [engine.place for engine in engines] == [(1, 5), (2, 5), (4, 5)]
    assert worlds == [5]
    [prepare] = [event for event in gate.wire.said if event.verb == "prepare"]
    assert prepare.ranks == {"m1": 2}, "a release without ranks reads the others as before"


class StaleEngine(FakeEngine):
    """Says that it has taken the weights in, and answers with those it had; from its second transfer on, ``lies``
    times.
    """

    def __init__(self, engine_id: str, lies: int) -> None:
        super().__init__(engine_id)
        self.received, self.lies = 0, lies

    async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        answer = await super().receive(spec, timeout)
        self.received += 1
        if 1 < self.received <= 1 + self.lies:
            answer["logprobs"] = [-1.0] * len(answer["logprobs"])
        return answer


@pytest.mark.parametrize("lies", [1, 3])
def test_an_engine_that_keeps_its_old_weights_is_left_out_in_that_round_and_freed_once_it_has_them(lies: int) -> None:
    gate = Gate(FakeEngine("e0"), StaleEngine("e1", lies), FakeEngine("e2"))
    keeper = gate.keeper

    async def act() -> None:
        await keeper.changed.until(lambda: len(keeper.machine.members) == 3)
        await keeper.sync((1, 0), 0)
        began = now()
        await keeper.sync((1, 1), 1)
        assert now() - began < 2.0
        assert keeper.aborts == 1
        assert (1, 1) not in gate.engines[1].served
        assert keeper.report().members["m1"].state == "quarantined"
        assert keeper.metrics()["sync/quarantined"] == 1.0
        while keeper.machine.stale_members():
            assert keeper.report().members["m1"].state == "quarantined", "also after a fetch that failed"
            await asyncio.sleep(0.1)
        assert keeper.metrics()["sync/canary_failures"] == lies
        assert keeper.report().members["m1"].state == "current"
        await keeper.sync((1, 2), 2)

    gate.play(act, limit=100)
    assert [engine.served for engine in gate.engines] == [[(1, 0), (1, 1), (1, 2)]] * 3
    assert keeper.aborts == 1, "whoever is in quarantine costs the others nothing"


def test_a_try_goes_on_while_another_fetches_alone() -> None:
    gate = Gate(*fakes(2))
    gate.members[1].engine_ready = False

    async def act() -> None:
        await gate.keeper.changed.until(lambda: gate.keeper.has_members)
        await gate.keeper.sync((1, 0), 0)
        gate.engines[0].receive_seconds = 3.0
        syncing = asyncio.ensure_future(gate.keeper.sync((1, 1), 1))
        await gate.keeper.changed.until(lambda: gate.keeper.phase == "applying")
        gate.members[1].engine_up(None, None)
        await gate.members[1].changed.until(lambda: gate.members[1].version == (1, 0))
        assert not syncing.done()
        await syncing
        await gate.members[1].changed.until(lambda: gate.members[1].version == (1, 1))

    gate.play(act, limit=60)
    assert gate.engines[1].served == [(1, 0), (1, 1)]
    assert gate.keeper.aborts == 0


def test_the_phases_of_the_last_committed_sync_say_where_its_time_went() -> None:
    gate = Gate(*fakes(2))
    pause, commit = gate.engines[0].pause, gate.engines[1].commit
    gate.engines[1].receive_seconds, gate.channel.seconds = 2.0, 1.5

    async def slow_pause(timeout: float) -> None:
        await asyncio.sleep(0.25)
        await pause(timeout)

    async def slow_commit(version: Any, progress: int) -> None:
        await asyncio.sleep(0.125)
        await commit(version, progress)

    gate.engines[0].pause, gate.engines[1].commit = slow_pause, slow_commit  # type: ignore[method-assign]

    async def act() -> dict[str, float]:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 2)
        await gate.keeper.sync((1, 0), 0)
        gate.no_evaluation.clear()
        syncing = asyncio.ensure_future(gate.keeper.sync((1, 1), 1))
        await asyncio.sleep(4.0)
        gate.no_evaluation.set()
        await syncing
        slower = gate.keeper.changed.until(lambda: gate.keeper.phases.get("resume", 0.0) > 100.0)
        await slower  # the other engine said at once that it serves
        next_try = asyncio.ensure_future(gate.keeper.sync((1, 2), 2))
        await gate.keeper.changed.until(lambda: gate.keeper.phase != "idle")
        found = gate.keeper.phases
        await next_try
        return found

    wanted = {"wait": 4000.0, "pause": 250.0, "transfer": 1500.0, "apply": 500.0, "resume": 125.0}
    assert gate.play(act) == pytest.approx(wanted, abs=20.0)
    assert gate.keeper.metrics()["sync/transfer_ms"] == pytest.approx(1500.0, abs=20.0)


class LargeModel(FakeLearner):
    """Names 10 GB of weights, and has none."""

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        return [("embed", "bfloat16", [50_000, 50_000]), ("head", "float32", [1_250_000_000])]


@pytest.mark.parametrize("by", ["broadcast", "fetch"])
def test_a_large_model_has_the_time_that_its_bytes_need(by: str) -> None:
    gate = Gate(*fakes(2), learner=LargeModel())
    slow = 180.0  # 10 GB at 56 MB/s
    gate.channel.seconds, gate.engines[1].receive_seconds = (slow, slow) if by == "broadcast" else (0.01, slow)

    async def act() -> float:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 2)
        await gate.keeper.sync((1, 0), 0)
        return now()

    assert gate.play(act) == pytest.approx(slow, abs=5.0)
    assert gate.keeper.aborts == 0
    report = gate.keeper.report()
    assert (report.num_bytes, report.deadline) == (10_000_000_000, 5.0 + 10_000 / 50 * 2)


def test_a_frozen_engine_costs_one_deadline_of_a_large_model_and_a_phase_without_bytes_stays_short() -> None:
    gate = Gate(*fakes(2), learner=LargeModel())
    gate.engines[1].receive_seconds = 1e6

    async def act() -> tuple[float, str]:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 2)
        syncing = asyncio.ensure_future(gate.keeper.sync((1, 0), 0))
        await gate.keeper.changed.until(lambda: gate.keeper.aborts == 1)
        seconds, trouble = now(), gate.keeper.trouble
        gate.engines[1].receive_seconds = 1.0
        await syncing
        return seconds, trouble

    seconds, trouble = gate.play(act, limit=2000)
    assert seconds == pytest.approx(405.0, abs=10.0)
    assert trouble == "applying: no answer from m1 in 405 s, the limit for 10,000 MB by fake"
    assert gate.engines[0].served[0] == (1, 0)
    machine = coordinator("a", timeout=10.0)
    machine.start((1, 1), 1, LARGE, 1.0)
    assert machine.next_deadline(1.0) <= 11.0
    [_, failed] = machine.tick(11.0)
    assert failed.reason == "preparing: no answer from a in 10 s"
    machine.join("a", None, 12.0)
    machine.start((1, 1), 1, LARGE, 12.0)
    [go, _] = machine.ready(from_member("ready", machine, "a"), 13.0)
    assert go.seconds == 50.0
    machine.collective_done(machine.epoch, machine.attempt, 14.0)
    assert not [command for command in machine.tick(15.0) if isinstance(command, Failed)]
    machine.join("a", None, 55.0)
    [_, _, failed] = machine.tick(64.0)
    assert failed.reason == "applying: no answer from a in 50 s, the limit for 2,000 MB by memory"


KEY = ((1, 1), 1, 1)
LARGE = SyncEvent(verb="prepare", sender="t", manifest=[("w", "bfloat16", [10**9])], rendezvous={"method": "memory"})
PREPARE = SyncEvent(verb="prepare", sender="t", manifest=[("w", "float32", [2])], canary={"tokens": [2, 3]})


def coordinator(*members: str, timeout: float = 10.0) -> Coordinator:
    machine = Coordinator(name="t", timeout=timeout, lease=15.0)
    for name in members:
        machine.join(name, None, 0.0)
    return machine


def from_member(verb: str, machine: Coordinator, sender: str, **more: Any) -> SyncEvent:
    return SyncEvent.model_validate(
        {
            "verb": verb,
            "sender": sender,
            "version": (1, 1),
            "epoch": machine.epoch,
            "attempt": machine.attempt,
            **more,
        }
    )


def sent(commands: list[Any]) -> list[str]:
    return [command.verb for command in commands if isinstance(command, SyncEvent)]


def taking_part(commands: list[Any]) -> list[str]:
    """Return the members that a start asks to take part."""
    (prepare_event,) = commands
    return list(prepare_event.members)


def through_go(machine: Coordinator, version: tuple[int, int] = (1, 1)) -> None:
    for name in taking_part(machine.start(version, version[1], PREPARE, 1.0)):
        machine.ready(from_member("ready", machine, name, version=version), 2.0)


def test_commit_needs_everybody_and_our_own_side() -> None:
    machine = coordinator("a", "b")
    assert sent(machine.start((1, 1), 1, PREPARE, 1.0)) == ["prepare"]
    assert machine.ready(from_member("ready", machine, "a"), 1.5) == []
    commands = machine.ready(from_member("ready", machine, "b"), 2.0)
    assert sent(commands) == ["go"]
    assert isinstance(commands[1], StartCollective)
    assert machine.applied(from_member("applied", machine, "a"), None, 2.5) == []
    assert machine.applied(from_member("applied", machine, "b"), None, 2.5) == []
    commands = machine.collective_done(machine.epoch, machine.attempt, 3.0)
    assert sent(commands) == ["commit"]
    assert commands[1] == Committed((1, 1), 1, ("a", "b"))
    assert machine.committed == (1, 1)
    assert machine.stale_members() == ()
    through_go(machine, (1, 2))
    assert machine.epoch == 1, "the group is kept"
    assert machine.collective_done(machine.epoch, machine.attempt, 4.0) == []
    assert machine.applied(from_member("applied", machine, "a", version=(1, 2)), None, 4.0) == []
    assert machine.committed == (1, 1)
    assert sent(machine.applied(from_member("applied", machine, "b", version=(1, 2)), None, 4.5)) == ["commit"]


def test_a_member_that_does_not_answer_costs_the_version_and_is_left_out() -> None:
    machine = coordinator("a", "b")
    machine.start((1, 1), 1, PREPARE, 1.0)
    machine.ready(from_member("ready", machine, "a"), 1.5)
    commands = machine.tick(11.0)
    assert sent(commands) == ["abort"]
    assert isinstance(commands[-1], Failed)
    assert commands[-1].lost == ("b",)
    assert set(machine.members) == {"a"}
    epoch = machine.epoch
    machine.start((1, 1), 1, PREPARE, 12.0)
    assert machine.epoch == epoch + 1, "what failed is never used again"


def test_a_failed_collective_is_abandoned_and_nobody_is_blamed() -> None:
    machine = coordinator("a", "b")
    through_go(machine)
    commands = machine.collective_failed(machine.epoch, machine.attempt, "a peer is gone")
    assert sent(commands) == ["abort"]
    assert any(isinstance(command, AbandonCollective) for command in commands)
    assert set(machine.members) == {"a", "b"}


def test_a_quarantined_member_takes_part_where_nobody_else_is() -> None:
    machine = coordinator("a")
    through_go(machine)
    machine.applied(from_member("applied", machine, "a"), "logprobs differ by 3.0", 3.0)
    through_go(machine)
    machine.collective_done(machine.epoch, machine.attempt, 3.0)
    machine.applied(from_member("applied", machine, "a"), None, 3.0)
    assert machine.committed == (1, 1)
    assert machine.quarantined() == ()


def test_an_ended_lease_is_a_leave() -> None:
    machine = coordinator("a", timeout=100.0)
    machine.start((1, 1), 1, PREPARE, 1.0)
    assert isinstance(machine.tick(15.0)[-1], Failed)


# -- the member


def prepare_event(attempt: int = 1, epoch: int = 1) -> SyncEvent:
    return PREPARE.model_copy(
        update={
            "version": (1, attempt),
            "epoch": epoch,
            "attempt": attempt,
            "members": ["m"],
            "seconds": 10.0,
            "progress": attempt,
        }
    )


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [
        (MemberStage.READY, [Resume()]),
        (MemberStage.RECEIVING, [Resume(), Rejoin()]),
        (MemberStage.APPLIED, [Rejoin()]),
    ],
)
def test_member_that_was_touched_when_a_try_is_aborted_asks_again(stage: MemberStage, wanted: list[Any]) -> None:
    member = Member("m", version=(1, 0))
    member.prepare(prepare_event(), 0.0)
    member.paused(KEY)
    if stage is not MemberStage.READY:
        member.go(prepare_event(), 0.0)
    if stage is MemberStage.APPLIED:
        member.received(KEY, {})
    assert member.stage is stage
    assert member.abort(prepare_event().model_copy(update={"verb": "abort"})) == wanted
    assert member.version == ((1, 0) if stage is MemberStage.READY else None)
