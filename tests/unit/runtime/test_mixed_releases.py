"""Agents of several releases in one run: who fits works, who does not refuses, and nothing is acknowledged unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgpack
import pytest
from structlog.testing import capture_logs

from tests.virtual import virtually
from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.messages import OWN, BatchClosed, Compatibility, Heartbeat, incompatibility_reason
from trinity_mq.messages.codec import CATALOGUE
from trinity_mq.messages.compatibility import EXPERIENCES_VERSION, NEWEST
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import decode_or_dead_letter
from trinity_mq.runtime.errors import FatalError, first_leaf
from trinity_mq.runtime.peers import HEARTBEAT_INTERVAL, MEETING_SECONDS, Peers

CONFIG = load_config({"name": "w", "model": {"tiny": {}}, "monitor": {"tensorboard": False}})
TOPOLOGY = Topology("w")
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
@virtually
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


@virtually
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


@virtually
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


@virtually
async def test_one_that_has_ended_is_no_hindrance() -> None:
    peers = Peers(THIRD)
    ended = Heartbeat(role="runner", id="r", seq=1, incarnation="i", lease=10.0, state="gone")
    peers.receive(ended)
    with pytest.raises(FatalError, match="upgrade r first"):
        peers.receive(ended.model_copy(update={"seq": 2, "state": "idle"}))
