"""A trainer's source that reads the stream of another run, on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.unit.agents.world import experience
from trinity_agents.trainer.sources.tap import TapSource
from trinity_mq.bus import Bus, Envelope, Topology, create_bus
from trinity_mq.config import Config, load_config
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import BatchClosed, BatchReady, RunEnd
from trinity_mq.messages.base import Message
from trinity_mq.models import ensure_model_folder
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError
from trinity_mq.transport.experience_parts import chunk_message

pytestmark = pytest.mark.broker
RUNS = 4
"""Experiences of a batch, one group."""


@pytest.fixture
def config(broker_url: str, topology: Topology, tmp_path: Path) -> Config:
    """The run that learns."""
    return load_config(
        {"name": f"{topology.run}-b", "model": {"tiny": {}}, "run_dir": str(tmp_path)},
        [f"broker.url={broker_url}", f"source.tap={topology.run}"],
    )


@pytest.fixture
def codec(config: Config) -> TextCodec:
    return TextCodec.load(ensure_model_folder(config.model, config.path / "model", config.seed))


@pytest.fixture
async def other(config: Config, topology: Topology) -> AsyncIterator[Bus]:
    """The run that is tapped."""
    bus = create_bus(config.broker, topology, "other")
    await bus.connect()
    await bus.declare(*topology.durable)
    bus.run_id = "a" * 32
    yield bus
    await bus.close()


async def send(bus: Bus, topology: Topology, key: str, message: Envelope | Message) -> None:
    mail = message if isinstance(message, Envelope) else envelope(message)
    assert await bus.publish(topology.exchange("ready"), key, mail)


async def publish(bus: Bus, topology: Topology, batch: int, *, token: int = 3, text: str | None = None) -> None:
    closed = BatchClosed(batch=batch, ticket=f"t{batch}")
    made = [
        experience(
            eid=EID(batch=batch, task=0, run=run),
            reward=float(run % 2),
            versions=[(0, 7, 40)],
            advantages=[9.0, 9.0],
            response_text=text,
        )
        for run in range(RUNS)
    ]
    made[0].tokens[-1] = token
    await send(bus, topology, str(batch), chunk_message(closed, "o", 0, Experience.serialize_many(made)))
    await send(
        bus, topology, str(batch), BatchReady(batch=batch, ticket=closed.ticket, op="o", chunks=1, experiences=RUNS)
    )


@asynccontextmanager
async def reading(config: Config, codec: TextCodec, state: dict[str, object] | None = None) -> AsyncIterator[TapSource]:
    own = Topology.of(config)
    bus = create_bus(config.broker, own, "trainer-0")
    await bus.connect()
    await bus.declare(*own.durable)
    bus.run_id = "b" * 32
    source = TapSource(config, bus, own, "trainer-0", codec)
    if state is not None:
        source.restore(state)
    try:
        async with asyncio.timeout(40), asyncio.TaskGroup() as group:
            running = group.create_task(source.run())
            yield source
            running.cancel()
    finally:
        await bus.close()


async def test_each_batch_comes_once_with_advantages_and_versions_of_the_run_that_learns(
    config: Config, codec: TextCodec, other: Bus, topology: Topology
) -> None:
    await publish(other, topology, 1)
    await send(other, topology, "2", Envelope(body=b"rubbish", kind="batch_ready"))
    await publish(other, topology, 2)
    async with reading(config, codec) as source:
        first = await source.next()
        assert (first.batch, len(first.experiences)) == (1, RUNS)
        assert [one.advantages.tolist() for one in first.experiences if one.advantages is not None] != [[9.0, 9.0]] * 4
        assert sorted(one.advantages[0].item() > 0 for one in first.experiences if one.advantages is not None) == [
            *[False] * 2,
            *[True] * 2,
        ]
        assert {one.versions[0] for one in first.experiences if one.versions} == {(0, 0, 0)}
        assert all(one.logprobs is not None for one in first.experiences), "of the engine that sampled"
        assert await source.next() is first, "the same until it is consumed"
        source.consumed()
        state = source.state()
        second = await source.next()
        assert second.batch == 2
        assert source.ended is None
        bus = create_bus(config.broker, Topology.of(config), "test")
        await bus.connect()
        assert await bus.depth(Topology.of(config).dead.name) == 1, "what does not decode is for us to look at"
        await bus.close()
    assert await other.depth(topology.dead.name) == 0
    await publish(other, topology, 3)
    await send(other, topology, "end", envelope(RunEnd(batches=3), message_id="run-end"))
    async with reading(config, codec, state) as source:  # killed before the second was consumed
        for wanted in (2, 3):
            assert (await source.next()).batch == wanted
            source.consumed()
        assert source.ended == 3
        assert not source.available()


async def test_from_a_batch_on(config: Config, codec: TextCodec, other: Bus, topology: Topology) -> None:
    for batch in (1, 2, 3):
        await publish(other, topology, batch)
    since = config.model_copy(update={"source": config.source.model_copy(update={"start": 3})})
    async with reading(since, codec) as source:
        assert (await source.next()).batch == 3
        source.consumed()
        await send(other, topology, "end", envelope(RunEnd(batches=3), message_id="run-end"))
        await source.changed.until(lambda: source.ended is not None)
        assert source.ended == 1


async def test_another_run_of_that_name_and_another_tokenizer_are_told(
    config: Config, codec: TextCodec, other: Bus, topology: Topology
) -> None:
    await publish(other, topology, 1)
    other.run_id = "c" * 32
    await publish(other, topology, 5, token=10_000)
    async with reading(config, codec) as source:
        with pytest.raises(FatalError, match="has a token 10000, and this run's model knows"):
            await source.next()
    await publish(other, topology, 6, text="nothing that these tokens say")
    other_texts = config.model_copy(update={"source": config.source.model_copy(update={"start": 6})})
    async with reading(other_texts, codec) as source:
        with pytest.raises(FatalError, match="answered 'nothing that these tokens say', and this run's tokenizer"):
            await source.next()
    with pytest.raises(FatalError, match="the checkpoint's position is in run 'elsewhere'"):
        source.restore({"tap": "elsewhere"})
