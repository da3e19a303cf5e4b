from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from structlog.testing import capture_logs

from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.messages import ControlEvent, Heartbeat, Role, RunnerStatus, decode
from trinity_mq.messages.status import AnyStatus
from trinity_mq.runtime.agent import HEARTBEAT_INTERVAL, Agent
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.runtime.peers import CHANGE_GAP
from trinity_mq.testing.virtual_time import run_virtually

CONFIG = load_config({"name": "w", "model": {"tiny": {}}, "monitor": {"tensorboard": False}})
TOPOLOGY = Topology("w")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with capture_logs():
        yield


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


def simulate(script: Any, agents: int = 1, kind: type[Idler] = Idler) -> tuple[Outside, list[Idler]]:
    broker = MemoryBroker()
    outside = Outside(broker)
    idlers = [kind(broker, f"runner-{n}") for n in range(agents)]

    async def main() -> None:
        listening = asyncio.create_task(outside.listen())
        await asyncio.sleep(0.1)
        tasks = [asyncio.create_task(idler.run()) for idler in idlers]
        await asyncio.sleep(0.4)
        await script(outside, *idlers)
        for idler in idlers:
            idler.drain()
        await asyncio.sleep(1)
        listening.cancel()
        await asyncio.gather(*tasks)

    run_virtually(main())
    return outside, idlers


def test_it_beats_every_interval_and_on_change_with_rising_numbers_and_says_goodbye() -> None:
    async def script(outside: Outside, idler: Idler) -> None:
        await asyncio.sleep(20)
        idler.level = 7
        idler.heartbeat_now()
        await asyncio.sleep(0.1)

    outside, (idler,) = simulate(script)
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


def test_a_change_is_told_at_once_and_many_make_two_beats_a_second_of_which_the_last_tells_the_last() -> None:
    async def script(outside: Outside, idler: Idler) -> None:
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

    simulate(script)


def test_agents_hear_of_each_other_from_the_first_beat_on() -> None:
    class Operating(Idler):
        role = "operator"

    async def script(outside: Outside, *idlers: Idler) -> None:
        for idler in idlers:
            assert [beat.id for beat in idler.peers.alive("operator")] == ["runner-0", "runner-1"]

    simulate(script, agents=2, kind=Operating)


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
def test_each_role_hears_whom_it_needs(own: Any, heard: set[str]) -> None:
    """And no runner hears a runner: of N agents that all hear all, each gets N/2 heartbeats a second."""

    class OfRole(Idler):
        role = own

    async def script(outside: Outside, idler: Idler) -> None:
        for role in get_args(Role):
            beat = Heartbeat(role=role, id=f"another-{role}", seq=1, incarnation="x", lease=10.0, state="working")
            await outside.bus.publish(TOPOLOGY.exchange("telemetry"), f"beat.{role}.another-{role}", envelope(beat))
        await asyncio.sleep(1)
        assert {role for role in get_args(Role) if idler.peers.latest(f"another-{role}")} == heard

    simulate(script, kind=OfRole)


@pytest.mark.parametrize(
    ("target", "heard"), [("runner-0", [True, False]), ("runner", [True, True]), ("all", [True, True])]
)
def test_a_command_reaches_whom_it_names(target: str, heard: list[bool]) -> None:
    async def script(outside: Outside, *idlers: Idler) -> None:
        await outside.tell("pause", target)
        await outside.tell("pause", "trainer", key=f"pause.{target}")  # its body names another
        assert [bool(idler.heard) for idler in idlers] == heard
        assert all(idler.heard in ([], ["pause"]) for idler in idlers)

    simulate(script, agents=2)


def test_told_to_drain_it_ends_and_told_to_restart_it_ends_so_that_it_is_started_again() -> None:
    async def drain(outside: Outside, idler: Idler) -> None:
        await outside.tell("drain", "runner-0")
        await asyncio.sleep(0.5)
        assert idler.state == "gone"

    simulate(drain)
    with pytest.raises(ExceptionGroup) as caught:
        simulate(lambda outside, _idler: outside.tell("restart", "runner-0"))
    assert caught.value.subgroup(RestartRequested) is not None


def test_a_command_or_beat_that_does_not_decode_changes_nothing() -> None:
    async def script(outside: Outside, idler: Idler) -> None:
        for exchange, key in (("control", "x.all"), ("telemetry", "beat.odd.x")):
            await outside.bus.publish(TOPOLOGY.exchange(exchange), key, Envelope(body=b"\xc1", kind="odd"))
        await asyncio.sleep(0.2)
        await outside.tell("pause", "all")
        assert idler.heard == ["pause"]
        # a command is parked by its one addressee; a beat, which everybody hears, by the explorer alone
        assert await outside.bus.depth(TOPOLOGY.dead.name) == 1

    simulate(script)


def test_leases_stand_still_in_an_outage_and_start_anew_after_it() -> None:
    async def script(outside: Outside, idler: Idler) -> None:
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

    simulate(script)


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
