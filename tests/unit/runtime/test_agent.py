from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import msgpack
import pytest
from structlog.testing import capture_logs

from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.messages import (
    OWN,
    BatchClosed,
    Compatibility,
    ControlEvent,
    ExplorerStatus,
    Heartbeat,
    Role,
    RunnerStatus,
    TrainerStatus,
    decode,
    incompatibility_reason,
)
from trinity_mq.messages.codec import CATALOGUE
from trinity_mq.messages.compatibility import EXPERIENCES_VERSION, NEWEST
from trinity_mq.messages.status import AnyStatus
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import decode_or_dead_letter, envelope
from trinity_mq.runtime.errors import FatalError, RestartRequested, first_leaf
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import CHANGE_GAP, HEARTBEAT_INTERVAL, MEETING_SECONDS, REMEMBERED_LEASES, Peers
from trinity_mq.runtime.process import mark_run_over
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop
CONFIG = load_config({"name": "w", "model": {"tiny": {}}, "monitor": {"tensorboard": False}})
TOPOLOGY = Topology("w")


pytestmark = pytest.mark.usefixtures("logs")


class Idler(Agent):
    """Waits until it is drained."""

    role = "runner"

    def __init__(self, broker: MemoryBroker, name: str = "runner-0") -> None:
        bus = MemoryBus(broker, TOPOLOGY, config=CONFIG.broker)
        super().__init__(CONFIG, bus=bus, topology=TOPOLOGY, agent_id=name)
        self.heard: list[str] = []
        self.level = 0

    def detail(self) -> AnyStatus:
        return RunnerStatus(running=self.level) if self.role == "runner" else super().detail()

    async def serve(self) -> None:
        self.set_state("idle", "work")
        await self.draining.wait()

    async def on_control(self, event: ControlEvent) -> None:
        self.heard.append(event.verb)


class Outside:
    """Hears every beat."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker, TOPOLOGY, config=CONFIG.broker)
        self.beats: list[tuple[float, Heartbeat]] = []

    async def listen(self) -> None:
        await self.bus.connect()
        ears = TOPOLOGY.listener("outside", "x", "telemetry", "beat.#")
        await self.bus.declare(*TOPOLOGY.durable, ears)
        async for delivery in await self.bus.consume(ears):
            self.beats.append((asyncio.get_running_loop().time(), decode(delivery.body, Heartbeat)))
            await delivery.ack()

    async def tell(self, verb: Any, target: str, key: str | None = None) -> None:
        event = ControlEvent(verb=verb, target=target)
        key = key or f"{verb}.{target}"
        await self.bus.publish(TOPOLOGY.exchange("control"), key, envelope(event))
        await asyncio.sleep(0.2)


@asynccontextmanager
async def simulated(agents: int = 1, kind: type[Idler] = Idler) -> AsyncIterator[tuple[Any, ...]]:
    """Run agents, and drain them at the end; give who hears every beat, and the agents."""
    broker = MemoryBroker()
    outside = Outside(broker)
    idlers = [kind(broker, f"runner-{n}") for n in range(agents)]
    listening = asyncio.create_task(outside.listen())
    await asyncio.sleep(0.1)
    tasks = [asyncio.create_task(idler.run()) for idler in idlers]
    await asyncio.sleep(0.4)
    yield outside, *idlers
    for idler in idlers:
        idler.drain()
    await asyncio.sleep(1)
    listening.cancel()
    await asyncio.gather(*tasks)


async def test_it_beats_every_interval_and_on_change_with_rising_numbers_and_says_goodbye() -> None:
    async with simulated() as (outside, idler):
        await asyncio.sleep(20)
        idler.level = 7
        idler.heartbeat_now()
        await asyncio.sleep(0.1)
    beats = [beat for _, beat in outside.beats]
    assert [beat.seq for beat in beats] == list(range(1, len(beats) + 1))
    times = [time for time, _ in outside.beats]
    assert max(b - a for a, b in itertools.pairwise(times)) < HEARTBEAT_INTERVAL + 0.1
    assert 10 < len(beats) < 18
    changed = next(time for time, beat in outside.beats if beat.detail == RunnerStatus(running=7))
    assert changed < 20.6
    assert (beats[-1].state, beats[-1].waits_for) == ("gone", None)
    waiting = [beat for beat in beats if beat.waits_for == "work"]
    assert waiting[-1].waits_seconds > 19
    assert {beat.incarnation for beat in beats} == {idler.incarnation}


async def test_a_change_is_told_at_once_and_many_make_two_beats_a_second_of_which_the_last_tells_the_last() -> None:
    async with simulated() as (outside, idler):
        await asyncio.sleep(CHANGE_GAP)
        idler.set_state("working", "a change")
        await asyncio.sleep(0.01)
        assert outside.beats[-1][1].waits_for == "a change"
        await asyncio.sleep(CHANGE_GAP)
        before = len(outside.beats)
        for n in range(400):
            idler.set_state("working", str(n))
            await asyncio.sleep(0.01)
        assert 4 / CHANGE_GAP <= len(outside.beats) - before <= 4 / CHANGE_GAP + 1
        await asyncio.sleep(CHANGE_GAP)
        assert outside.beats[-1][1].waits_for == "399"
        before = len(outside.beats)
        for _ in range(100):
            idler.heartbeat_now()
            await asyncio.sleep(0.001)
        assert len(outside.beats) - before <= 4


@pytest.mark.parametrize(
    ("own", "heard"),
    [
        ("explorer", set(get_args(Role))),
        ("runner", {"explorer", "scheduler", "trainer", "engine"}),
        ("operator", {"explorer", "trainer", "engine", "operator"}),
        ("trainer", {"explorer", "trainer", "engine", "operator"}),
        ("engine", {"explorer", "trainer", "engine"}),
        ("gateway", {"explorer", "trainer", "engine"}),
    ],
)
async def test_each_role_hears_whom_it_needs(own: Any, heard: set[str]) -> None:
    """And no runner hears a runner: of N agents that all hear all, each gets N/2 heartbeats a second."""

    class OfRole(Idler):
        role = own

    async with simulated(kind=OfRole) as (outside, idler):
        for role in get_args(Role):
            beat = Heartbeat(role=role, id=f"another-{role}", seq=1, incarnation="x", lease=10.0, state="working")
            await outside.bus.publish(TOPOLOGY.exchange("telemetry"), f"beat.{role}.another-{role}", envelope(beat))
        await asyncio.sleep(1)
        assert {role for role in get_args(Role) if idler.peers.latest(f"another-{role}")} == heard


@pytest.mark.parametrize(
    ("target", "heard"), [("runner-0", [True, False]), ("runner", [True, True]), ("all", [True, True])]
)
async def test_a_command_reaches_whom_it_names(target: str, heard: list[bool]) -> None:
    async with simulated(agents=2) as (outside, *idlers):
        await outside.tell("pause", target)
        await outside.tell("pause", "trainer", key=f"pause.{target}")  # its body names another
        assert [bool(idler.heard) for idler in idlers] == heard
        assert all(idler.heard in ([], ["pause"]) for idler in idlers)


async def test_told_to_drain_it_ends_and_told_to_restart_it_ends_so_that_it_is_started_again() -> None:
    async with simulated() as (outside, idler):
        await outside.tell("drain", "runner-0")
        await asyncio.sleep(0.5)
        assert idler.state == "gone"
    with pytest.raises(ExceptionGroup) as caught:
        async with simulated() as (outside, _):
            await outside.tell("restart", "runner-0")
    assert caught.value.subgroup(RestartRequested) is not None


async def test_a_command_or_beat_that_does_not_decode_changes_nothing() -> None:
    async with simulated() as (outside, idler):
        for exchange, key in (("control", "x.all"), ("telemetry", "beat.odd.x")):
            await outside.bus.publish(TOPOLOGY.exchange(exchange), key, Envelope(body=b"\xc1", kind="odd"))
        await asyncio.sleep(0.2)
        await outside.tell("pause", "all")
        assert idler.heard == ["pause"]
        # a command is parked by its one addressee; a beat, which everybody hears, by the explorer alone
        assert await outside.bus.depth(TOPOLOGY.dead.name) == 1


async def test_leases_stand_still_in_an_outage_and_start_anew_after_it() -> None:
    async with simulated() as (outside, idler):
        beat = Heartbeat(role="engine", id="e", seq=1, incarnation="x", lease=10.0, state="working")
        await outside.bus.publish(TOPOLOGY.exchange("telemetry"), "beat.engine.e", envelope(beat))
        await asyncio.sleep(1)
        idler.bus.disconnect("connection lost")
        idler.bus.reconnect_in(60)
        await asyncio.sleep(50)
        assert [beat.id for beat in idler.peers.alive("engine")] == ["e"], "we are deaf and cannot know"
        before = len(outside.beats)
        await asyncio.sleep(10.2)
        assert [beat.id for beat in idler.peers.alive("engine")] == ["e"]
        assert len(outside.beats) > before
        async with asyncio.timeout(10.2):  # nobody else is heard, and the end of the lease is noticed
            await idler.woken.until(lambda: not idler.peers.alive("engine"))


def test_what_fails_beside_it_ends_it() -> None:
    class Failing(Idler):
        async def serve(self) -> None:
            async def fails() -> None:
                await asyncio.sleep(1)
                raise ArithmeticError("beside")

            await self.run_with_background(asyncio.Event().wait(), fails())

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(Failing(MemoryBroker()).run())
    assert caught.value.subgroup(ArithmeticError) is not None


# -- whom it hears


def beat(name: str = "runner-0", seq: int = 1, incarnation: str = "a", **fields: Any) -> Heartbeat:
    return Heartbeat(
        **{
            "role": "runner",
            "id": name,
            "seq": seq,
            "incarnation": incarnation,
            "lease": 10.0,
            "state": "idle",
            **fields,
        }
    )


def alive(peers: Peers, role: Any = "runner") -> list[str]:
    return [each.id for each in peers.alive(role)]


async def test_a_peer_lives_as_long_as_its_lease() -> None:
    peers = Peers()
    peers.receive(beat())
    peers.receive(beat("runner-1", lease=3.0))
    peers.receive(beat("engine-0", role="engine"))
    peers.receive(beat("leaves", detail={"running": 1}))
    peers.receive(beat("leaves", seq=2, state="gone", detail={"running": 0}))
    assert alive(peers) == ["runner-0", "runner-1"]
    assert peers.latest("leaves").detail == RunnerStatus(running=0)  # type: ignore[union-attr]  # remembered
    assert peers.latest("nobody") is None
    peers.receive(beat("runner-1", seq=2, lease=3.0, role="operator"))
    assert (alive(peers), alive(peers, "operator")) == (["runner-0"], ["runner-1"]), "an id lives once"
    await asyncio.sleep(9.9)
    peers.receive(beat(seq=2))
    await asyncio.sleep(5)
    peers.receive(beat(seq=2))  # an old beat does not extend a lease
    await asyncio.sleep(4.9)
    assert [each.seq for each in peers.alive("runner")] == [2]
    await asyncio.sleep(0.1)
    assert alive(peers) == []


async def test_beats_that_overtook_each_other_count_by_number_within_a_life() -> None:
    peers, woken = Peers(), []
    for seq, incarnation, kept in ((5, "a", 5), (4, "a", 5), (5, "a", 5), (6, "a", 6), (1, "b", 1)):
        waiting = asyncio.create_task(peers.changed.wait(1.0))
        await asyncio.sleep(0.1)
        peers.receive(beat(seq=seq, incarnation=incarnation))
        woken.append(await waiting)
        assert [each.seq for each in peers.alive("runner")] == [kept]
    assert woken == [True, False, False, True, True]


@pytest.mark.parametrize("looked_before", [True, False])
async def test_a_reconnect_extends_the_leases_that_ran_when_the_connection_broke_and_revives_nobody(
    looked_before: bool,
) -> None:
    peers = Peers()
    peers.receive(beat("died-an-hour-ago"))
    await asyncio.sleep(3600)
    peers.receive(beat("lives"))
    peers.receive(beat("said-goodbye", state="gone"))
    assert not looked_before or peers.alive("runner")
    peers.suspend()
    await asyncio.sleep(60)
    assert alive(peers) == ["lives"], "leases stand still while we are deaf"
    peers.refresh()
    await asyncio.sleep(9.9)
    assert alive(peers) == ["lives"]
    await asyncio.sleep(0.1)
    peers.refresh()
    assert alive(peers) == []


async def test_an_agent_that_sends_nothing_is_forgotten_after_some_leases() -> None:
    peers = Peers()
    peers.receive(beat("died"))
    peers.receive(beat("slow", lease=60.0))
    for seq in range(2, 200):
        await asyncio.sleep(1)
        peers.receive(beat(seq=seq))
        assert (peers.latest("died") is not None) == (seq - 1 < REMEMBERED_LEASES * 10)
    assert peers.latest("slow") is not None
    assert peers.latest("runner-0") is not None


def lines_run(function: Callable[[], object]) -> int:
    """Return how many lines of Python ``function`` runs: its cost, on a machine of any speed."""
    lines = 0

    def count(_frame: FrameType, event: str, _argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


async def test_fifty_thousand_that_have_gone_cost_a_look_nothing() -> None:
    """One id for each process that ever lived: a runner in a container is named after its host."""
    peers = Peers()
    for number in range(50_000):
        peers.receive(beat(f"runner-{number}", lease=1.0))
    peers.receive(beat("lives", lease=100.0))
    await asyncio.sleep(2)
    assert [each.id for each in peers.alive("runner")] == ["lives"]
    assert lines_run(lambda: peers.alive("runner")) < 50
    await asyncio.sleep(REMEMBERED_LEASES * 10)
    peers.receive(beat("lives", seq=2, lease=100.0))
    assert peers.latest("runner-7") is None


async def test_the_status_of_the_living_explorer_and_trainer_is_that_of_the_last_id() -> None:
    peers = Peers()
    assert (peers.explorer, peers.trainer) == (ExplorerStatus(), TrainerStatus())
    peers.receive(beat("explorer-1", role="explorer", detail={"wants": 2}))
    peers.receive(beat("explorer-0", role="explorer", detail={"wants": 1}))
    peers.receive(beat("trainer-0", role="trainer", detail={"committed": [1, 3]}))
    assert peers.explorer.wants == 2
    peers.receive(beat("explorer-0", seq=2, role="explorer", detail={"wants": 1, "finished": True}))
    assert peers.explorer.finished, "explorer-1 was killed a moment ago"
    peers.receive(beat("explorer-0", seq=3, role="explorer", detail={"wants": 1}))
    assert peers.trainer.committed == (1, 3)
    assert [one.wants for one in peers.statuses("explorer", ExplorerStatus, without="explorer-1")] == [1]
    await asyncio.sleep(10)
    assert (peers.explorer, peers.trainer) == (ExplorerStatus(), TrainerStatus())


@pytest.mark.parametrize(
    ("role", "at_work", "waiting"),
    [
        ("explorer", {"run_id": "ours", "open": ["t1"]}, {"run_id": "", "open": []}),
        ("trainer", {"generation": 2, "progress": 7}, {"generation": 0}),
    ],
)
async def test_a_process_that_waits_for_the_lock_does_not_replace_its_holder_of_the_same_id(
    role: Any, at_work: dict[str, Any], waiting: dict[str, Any]
) -> None:
    peers = Peers()
    peers.receive(beat("a-0", role=role, detail=at_work))
    for seq, state in ((9, "idle"), (10, "gone")):
        peers.receive(beat("a-0", role=role, incarnation="b", seq=seq, state=state, detail=waiting))
        (living,) = peers.alive(role)
        assert living.detail.as_map() == at_work
    await asyncio.sleep(10.0)
    peers.receive(beat("a-0", role=role, incarnation="b", seq=11, detail=waiting))
    assert [living.incarnation for living in peers.alive(role)] == ["b"]


# -- how it is woken


async def test_everybody_who_waits_is_woken_once_and_asks_after_each_change() -> None:
    notifier, level, asked = Notifier(), [0], []

    def is_high() -> bool:
        asked.append(level[0])
        return level[0] >= 2

    notifier.notify()
    assert await notifier.wait(1.0) is False, "a notification is not kept for later"
    waits = [asyncio.create_task(notifier.wait(100.0)) for _ in range(3)]
    waiting = asyncio.create_task(notifier.until(is_high))
    for _ in range(2):
        await asyncio.sleep(1)
        level[0] += 1
        notifier.notify()
    assert await asyncio.gather(*waits) == [True] * 3
    await waiting
    assert asked == [0, 1, 2]
    await notifier.until(is_high)  # holds already: nobody needs to notify


# -- the end of the run: who is started or connected again after it ends by itself


class Latecomer(Idler):
    """Notes whether it was let work."""

    served = False

    async def serve(self) -> None:
        self.served = True


class Follower(Idler):
    """Works until the run is over."""

    async def serve(self) -> None:
        await self.woken.until(lambda: self.peers.explorer.finished)


def test_who_comes_after_the_end_ends_too(tmp_path: Path) -> None:
    def lives(over: bool) -> Latecomer:
        latecomer = Latecomer(MemoryBroker())
        latecomer.run_folder = tmp_path
        if over:
            mark_run_over(tmp_path)
        run_virtually(latecomer.run())
        return latecomer

    before, after = lives(False), lives(True)
    assert before.served
    assert not after.served
    assert after.state == "finished"


def follow(folder: Path, scene: Callable[[Follower, asyncio.Task[None]], Awaitable[None]]) -> Follower:
    """Run a follower and ``scene`` beside it, until it has ended."""
    follower = Follower(MemoryBroker())
    follower.run_folder = folder

    async def main() -> None:
        task = asyncio.create_task(follower.run())
        await asyncio.sleep(1.0)
        await scene(follower, task)
        await task

    run_virtually(main(), limit=200)
    return follower


@pytest.mark.parametrize("seconds", [0.5, 100.0], ids=["a moment", "longer than any lease"])
def test_who_is_cut_off_at_the_end_ends_when_it_is_back(tmp_path: Path, seconds: float) -> None:
    async def cut_off(follower: Follower, task: asyncio.Task[None]) -> None:
        follower.bus.disconnect("connection lost")  # type: ignore[attr-defined]
        mark_run_over(tmp_path)
        await asyncio.sleep(seconds)
        assert not task.done()
        follower.bus.reconnect()  # type: ignore[attr-defined]

    assert follow(tmp_path, cut_off).state == "finished"


def test_an_outage_while_the_run_goes_on_ends_nobody(tmp_path: Path) -> None:
    async def outages(follower: Follower, task: asyncio.Task[None]) -> None:
        for is_last in (False, False, True):
            if is_last:
                mark_run_over(tmp_path)
            follower.bus.disconnect("connection lost")  # type: ignore[attr-defined]
            await asyncio.sleep(5.0)
            follower.bus.reconnect()  # type: ignore[attr-defined]
            await asyncio.sleep(30.0)
            assert task.done() == is_last

    follow(tmp_path, outages)


# -- agents of several releases: who fits works, who does not refuses, and nothing is acknowledged unread


FIRST = Compatibility("0.1.0", (1, 1), 1)
SECOND = Compatibility("0.2.0", (1, 2), 1)
"""Reads what the next release writes, and writes what the last one reads."""
THIRD = Compatibility("0.3.0", (1, 2), 2)
NEWER_BODY = msgpack.packb({"kind": BatchClosed.kind, "version_number": 2, "anything": 1})


class Taker(Agent):
    """Takes manifests, and notes when it begins to."""

    role = "operator"

    def __init__(self, broker: MemoryBroker, name: str, compatibility: Compatibility = OWN) -> None:
        self.compatibility = compatibility  # type: ignore[misc]  # of another release
        bus = MemoryBus(broker, TOPOLOGY, config=CONFIG.broker)
        super().__init__(CONFIG, bus=bus, topology=TOPOLOGY, agent_id=name)
        self.began: float | None = None

    async def serve(self) -> None:
        self.began = asyncio.get_running_loop().time()
        await self.run_with_background(self.draining.wait(), self._take())

    async def _take(self) -> None:
        async with await self.bus.consume(TOPOLOGY.closed, prefetch=1) as feed:
            async for delivery in feed:
                await decode_or_dead_letter(self.bus, TOPOLOGY, delivery, self.id, expect=BatchClosed)


@asynccontextmanager
async def running(agent: Taker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(agent.run())
    await asyncio.sleep(0.1)
    try:
        yield task
    finally:
        agent.drain()
        await asyncio.wait([task])


async def put(broker: MemoryBroker, body: bytes) -> MemoryBus:
    bus = MemoryBus(broker, TOPOLOGY, config=CONFIG.broker)
    await bus.connect()
    await bus.declare(*TOPOLOGY.durable)
    await bus.publish(TOPOLOGY.exchange("batches"), "closed", Envelope(body=body, kind="batch_closed"))
    return bus


@pytest.mark.parametrize(("one", "other", "fits"), [
    (FIRST, FIRST, True), (FIRST, SECOND, True), (SECOND, THIRD, True), (FIRST, THIRD, False),
    (replace(THIRD, reads=(2, 2)), SECOND, False),
])  # fmt: skip
def test_who_fits(one: Compatibility, other: Compatibility, fits: bool) -> None:
    assert one.fits(other) is other.fits(one) is fits


def test_the_schema_rises_with_each_version_of_a_message() -> None:
    """An agent of the release that raises one is known to write what earlier releases do not read."""
    from trinity_mq.experience.codec.body import VERSION

    assert EXPERIENCES_VERSION == VERSION
    assert sum(version - 1 for _, version in CATALOGUE) + VERSION == NEWEST
    assert OWN.fits(OWN)


def test_a_heartbeat_of_the_first_release_says_so() -> None:
    beat = Heartbeat(role="runner", id="r", seq=1, incarnation="i", lease=10.0, state="idle")
    assert (Compatibility.of(beat), beat.uptime) == (FIRST, None)
    assert Heartbeat.version_number == 1, "all releases must read who fits whom"


def test_the_sentence_names_both_and_whom_to_upgrade_first() -> None:
    assert incompatibility_reason(THIRD, "trainer-0", FIRST) == (
        "this agent is of release 0.3.0, which reads message schema 1 to 2 and writes 2; trainer-0 is of release "
        "0.1.0, which reads message schema 1 and writes 1. They cannot work in one run: upgrade trainer-0 first, "
        "through a release that reads both schemas if a direct upgrade is not possible (docs/upgrading.md)"
    )
    assert "upgrade this one first" in incompatibility_reason(FIRST, "trainer-0", THIRD)


@pytest.mark.parametrize("releases", [(FIRST, THIRD), (THIRD, FIRST)], ids=["newer comes", "older comes"])
async def test_who_comes_refuses_and_who_was_there_goes_on(releases: Sequence[Compatibility]) -> None:
    broker = MemoryBroker()
    here, newcomer = (Taker(broker, f"operator-{n}", one) for n, one in enumerate(releases))
    with capture_logs() as logs:
        async with running(here) as going:
            await asyncio.sleep(3 * HEARTBEAT_INTERVAL)
            async with running(newcomer) as coming:
                await asyncio.wait([coming], timeout=MEETING_SECONDS)
                error = first_leaf(coming.exception() or AssertionError("it goes on"))
                assert isinstance(error, FatalError)
                assert "operator-0 is of release" in str(error)
            assert newcomer.began is None or newcomer.compatibility.writes == 1, "it had begun to work"
            assert not going.done()
            assert here.peers.alive("operator") == [here.peers.latest("operator-0")], "it counts on the newcomer"
        going.result()
    refused = [line for line in logs if line["event"] == "agent_refused"]
    assert [(line["agent"], "operator-1" in line["reason"]) for line in refused] == [("operator-1", True)]


async def test_what_an_older_one_cannot_read_is_left_to_a_newer_one() -> None:
    """The body comes before the heartbeat that says whose it is."""
    broker = MemoryBroker()
    writer = Taker(broker, "operator-0", THIRD)
    writer.serve = writer.draining.wait  # type: ignore[assignment, method-assign]  # takes nothing itself
    async with running(writer):
        await asyncio.sleep(3 * HEARTBEAT_INTERVAL)
        bus = await put(broker, NEWER_BODY)
        older = Taker(broker, "operator-1", FIRST)
        async with running(older) as coming:
            await asyncio.wait([coming], timeout=MEETING_SECONDS)
            error = first_leaf(coming.exception() or AssertionError("it goes on"))
            assert "upgrade this one first" in str(error)
        assert older.began is not None
        assert (await bus.depth(TOPOLOGY.closed.name), await bus.depth(TOPOLOGY.dead.name)) == (1, 0)
        await bus.close()


async def test_a_body_of_no_release_is_a_dead_letter_once_everybody_was_heard() -> None:
    broker = MemoryBroker()
    agent = Taker(broker, "operator-0")
    async with running(agent):
        bus = await put(broker, NEWER_BODY)
        await asyncio.sleep(MEETING_SECONDS / 2)
        assert await bus.depth(TOPOLOGY.dead.name) == 0
        await asyncio.sleep(MEETING_SECONDS)
        assert (await bus.depth(TOPOLOGY.closed.name), await bus.depth(TOPOLOGY.dead.name)) == (0, 1)
        await bus.publish(TOPOLOGY.exchange("batches"), "closed", Envelope(body=NEWER_BODY, kind="batch_closed"))
        await asyncio.sleep(0.1)
        assert await bus.depth(TOPOLOGY.dead.name) == 2, "it waits again, though everybody was heard"
        await bus.close()


async def test_one_that_has_ended_is_no_hindrance() -> None:
    peers = Peers(THIRD)
    ended = Heartbeat(role="runner", id="r", seq=1, incarnation="i", lease=10.0, state="gone")
    peers.receive(ended)
    with pytest.raises(FatalError, match="upgrade r first"):
        peers.receive(ended.model_copy(update={"seq": 2, "state": "idle"}))
