"""The position on the stream of a tapped run survives restarts, also where that run began later than the reader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_agents.trainer.sources.tap import TapSource
from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import BatchReady
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.testing.virtual_time import run_virtually

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

    async def publish(self, batch: int, run_id: str | None) -> None:
        writer = MemoryBus(self.broker, OTHER, config=BrokerConfig())
        await writer.connect()
        await writer.declare(*OTHER.durable)
        writer.run_id = run_id
        exchange, ticket = OTHER.exchange("ready"), f"t{batch}-of-{run_id}"
        body = Experience.serialize_many(
            [
                Experience(
                    eid=EID(batch=batch, task=0, run=n),
                    tokens=torch.tensor([3, 4]),
                    prompt_length=1,
                    logprobs=torch.zeros(1),
                    reward=float(n),
                )
                for n in range(2)
            ]
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
        own = MemoryBus(self.broker, OWN, config=BrokerConfig())
        await own.connect()
        await own.declare(*OWN.durable)
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


def play(story: Any) -> Any:
    return run_virtually(story, limit=3600)


async def declared(tapped: Tapped) -> None:
    writer = MemoryBus(tapped.broker, OTHER, config=BrokerConfig())
    await writer.connect()
    await writer.declare(*OTHER.durable)


@pytest.mark.parametrize("run_id", ["run-of-first", None])
def test_a_run_that_begins_later_is_trained_on_once(tapped: Tapped, run_id: str | None) -> None:
    async def story() -> list[int]:
        await declared(tapped)
        first, state = await tapped.life({}, [1, 2], run_id, takes=2)
        assert state["run_id"] == run_id
        second, state = await tapped.life(state, [3], run_id, takes=1)
        assert state["run_id"] == run_id
        return first + second

    assert play(story()) == [1, 2, 3]


def test_what_comes_between_a_checkpoint_without_a_batch_and_the_next_start_is_read(tapped: Tapped) -> None:
    async def story() -> list[int]:
        await declared(tapped)
        _, state = await tapped.life({}, [], None, takes=0)
        await tapped.publish(1, "run-of-first")
        trained, _ = await tapped.life(state, [2], "run-of-first", takes=2)
        return trained

    assert play(story()) == [1, 2]


def test_the_run_that_was_met_first_is_kept_to_after_a_restart(tapped: Tapped) -> None:
    async def story() -> list[int]:
        await declared(tapped)
        first, state = await tapped.life({}, [1], "run-of-first", takes=1)
        second, state = await tapped.life(state, [1, 2], "another run", takes=0)
        third, _ = await tapped.life(state, [2], "run-of-first", takes=1)
        return first + second + third

    assert play(story()) == [1, 2]
