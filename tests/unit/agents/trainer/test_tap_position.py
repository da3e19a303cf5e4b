"""The run that is tapped: its private broker may end at any moment, and the position on its stream survives restarts,
also where it began later than the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.virtual import virtually
from trinity_agents.trainer.sources.tap import TapSource
from trinity_mq.bus import AddressError, BusUnavailable, Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import BatchReady
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope

OTHER, OWN = Topology("first"), Topology("second")


class Codec:
    """A tokenizer that knows every token."""

    size = 1 << 20

    def decode(self, rows: Sequence[Any]) -> list[str]:
        return [""] * len(rows)


class Tapped:
    """The other run, which has published nothing yet, and the lives of a trainer that taps it."""

    def __init__(self, folder: Path, start: str) -> None:
        self.broker = MemoryBroker()
        (folder / "first").mkdir()
        (folder / "first" / "config.yaml").write_text("{name: first, model: {tiny: {}}}")
        self.config = load_config(
            {
                "name": "second",
                "mode": "train",
                "model": {"tiny": {}},
                "source": {"tap": str(folder / "first"), "start": start},
                "buffer": {"total_steps": 100},
                "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
            }
        )

    async def connected(self, topology: Topology) -> MemoryBus:
        bus = MemoryBus(self.broker, topology, config=BrokerConfig())
        await bus.connect()
        await bus.declare(*topology.durable)
        return bus

    async def publish(self, batch: int, run_id: str | None) -> None:
        writer = await self.connected(OTHER)
        writer.run_id = run_id
        exchange, ticket = OTHER.exchange("ready"), f"t{batch}-of-{run_id}"
        eids = [EID(batch=batch, task=0, run=n) for n in range(2)]
        body = Experience.serialize_many(
            [Experience(eid=eid, tokens=[3, 4], prompt_length=1, logprobs=[0.0], reward=1.0) for eid in eids]
        )
        headers: dict[str, Any] = {"ticket": ticket, "op": "o", "n": 0, "batch": batch}
        chunk = Envelope(body=body, kind="experience_chunk", content_type=EXPERIENCES, headers=headers)
        await writer.publish(exchange, "x", chunk)
        ready = BatchReady(batch=batch, ticket=ticket, op="o", chunks=1, experiences=2)
        await writer.publish(exchange, "x", envelope(ready))

    async def life(
        self, state: dict[str, Any], batches: Sequence[int], run_id: str | None, *, takes: int
    ) -> tuple[list[int], dict[str, Any]]:
        """Let a trainer read on from a checkpoint while batches are published; return those that it trained on, and its
        next checkpoint.
        """
        own = await self.connected(OWN)
        await self.connected(OTHER)
        codec: Any = Codec()
        source = TapSource(
            self.config, own, OWN, "trainer-0", codec, lambda *_: MemoryBus(self.broker, OTHER, config=BrokerConfig())
        )
        if state:
            source.restore(state)
        reading = asyncio.create_task(source.run())
        await asyncio.sleep(5)
        for batch in batches:
            await self.publish(batch, run_id)
        trained = []
        for _ in range(takes):
            trained.append((await source.next()).batch)
            source.consumed()
        await asyncio.sleep(5)
        assert not source.available()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return trained, source.state()


@pytest.fixture(params=["beginning", "now"])
def tapped(request: pytest.FixtureRequest, tmp_path: Path) -> Tapped:
    return Tapped(tmp_path, request.param)


@pytest.mark.parametrize("run_id", ["run-of-first", None])
@virtually
async def test_a_run_that_begins_later_is_trained_on_once(tapped: Tapped, run_id: str | None) -> None:
    first, state = await tapped.life({}, [1, 2], run_id, takes=2)
    assert state["run_id"] == run_id
    second, state = await tapped.life(state, [3], run_id, takes=1)
    assert state["run_id"] == run_id
    assert first + second == [1, 2, 3]


@virtually
async def test_what_comes_between_a_checkpoint_without_a_batch_and_the_next_start_is_read(tapped: Tapped) -> None:
    _, state = await tapped.life({}, [], None, takes=0)
    await tapped.publish(1, "run-of-first")
    assert (await tapped.life(state, [2], "run-of-first", takes=2))[0] == [1, 2]


@virtually
async def test_the_run_that_was_met_first_is_kept_to_after_a_restart(tapped: Tapped) -> None:
    first, state = await tapped.life({}, [1], "run-of-first", takes=1)
    second, state = await tapped.life(state, [1, 2], "another run", takes=0)
    third, _ = await tapped.life(state, [2], "run-of-first", takes=1)
    assert first + second + third == [1, 2]


# -- its private broker


class Connecting:
    """A bus to a broker that does as it is told while it is connected to."""

    def __init__(self, broker: Callable[[], None]) -> None:
        self._broker = broker

    async def connect(self) -> None:
        self._broker()


def with_broker(folder: Path, broker: Callable[[], None]) -> TapSource:
    (folder / "broker").mkdir(parents=True)
    (folder / "config.yaml").write_text("{name: first, model: {tiny: {}}}")
    config = load_config({"name": "second", "model": {"tiny": {}}, "source": {"tap": str(folder)}})
    unused: Any = None
    bus: Any = Connecting(broker)
    return TapSource(config, unused, Topology("second"), "trainer-0", unused, lambda *_: bus)


@virtually
async def test_a_broker_that_ends_while_it_is_connected_to_is_waited_for(tmp_path: Path) -> None:
    url, address, tries = tmp_path / "first" / "broker.url", "amqp://a:b@127.0.0.1:1/%2F", []

    def broker() -> None:
        tries.append(url.read_text())
        if len(tries) == 1:
            url.unlink()
            raise AddressError(f"the broker's URL cannot be read from {url}")
        raise BusUnavailable("enough")

    source = with_broker(tmp_path / "first", broker)
    url.write_text(address)
    connecting = asyncio.create_task(source.run())
    await asyncio.sleep(60)
    assert not connecting.done()
    url.write_text(address)  # the run goes on
    async with asyncio.timeout(60):
        with pytest.raises(BusUnavailable, match="enough"):
            await connecting
    assert tries == [address] * 2


@virtually
async def test_an_address_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    def broker() -> None:
        raise AddressError("the URL begins with http")

    source = with_broker(tmp_path / "first", broker)
    (tmp_path / "first" / "broker.url").write_text("http://127.0.0.1")
    with pytest.raises(AddressError, match="begins with http"):
        await source.run()
