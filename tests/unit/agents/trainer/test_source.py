"""The source of train batches, on a stream in memory and in virtual time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.bus import Envelope, StreamCut, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import BatchReady, RunEnd
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.runtime.errors import FatalError
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.transport.ready_stream import SILENCE_SECONDS, Chunk

Act = Callable[["Stream"], Coroutine[Any, Any, Any]]


class Stream:
    """A ready stream and a source that reads it."""

    def __init__(self, in_batch_order: bool = True, **options: Any) -> None:
        self.topology, self.broker = Topology("src"), MemoryBroker()
        self.bus = MemoryBus(self.broker, self.topology, config=BrokerConfig())
        self.source = StreamSource(self.bus, self.topology, "trainer-0", in_batch_order=in_batch_order, **options)

    async def put(self, key: str, mail: Envelope) -> None:
        await self.bus.publish(self.topology.exchange("ready"), key, mail)

    async def chunk(self, ticket: str, op: str, n: int, body: bytes | None = None) -> None:
        experience = Experience(
            eid=EID(batch=1, task=0, run=n), tokens=torch.tensor([3, 4]), prompt_length=1, logprobs=torch.zeros(1)
        )
        headers: dict[str, str | int | float | bool] = {"ticket": ticket, "op": op, "n": n}
        body = Experience.serialize_many([experience]) if body is None else body
        await self.put(ticket, Envelope(body=body, kind="experience_chunk", content_type=EXPERIENCES, headers=headers))

    async def ready(self, batch: int, ticket: str, op: str, chunks: int, state: Any = "ready") -> None:
        body = BatchReady(batch=batch, ticket=ticket, op=op, chunks=chunks, state=state)
        await self.put(str(batch), envelope(body))

    async def whole(self, batch: int) -> None:
        await self.chunk(f"t{batch}", "o", 0)
        await self.ready(batch, f"t{batch}", "o", 1)


def play(act: Act, stream: Stream | None = None, limit: float = 2000) -> Any:
    async def main() -> Any:
        one = stream or Stream()
        await one.bus.connect()
        await one.bus.declare(*one.topology.durable)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(one.source.run())
            result = await act(one)
            reading.cancel()
        return result

    return run_virtually(main(), limit=limit)


def test_batches_come_in_their_order_whatever_the_streams_is() -> None:
    async def act(stream: Stream) -> list[int]:
        for batch in (3, 1, 2):
            await stream.whole(batch)
        got = []
        for _ in range(3):
            batch = await stream.source.next()
            got.append(batch.batch)
            assert len(batch.experiences) == 1
            stream.source.consumed()
        return got

    assert play(act) == [1, 2, 3]


def test_a_batch_whose_chunk_does_not_decode_fails_alone() -> None:
    async def act(stream: Stream) -> None:
        await stream.chunk("t1", "o", 0, b"TMQX nonsense")
        await stream.ready(1, "t1", "o", 1)
        await stream.whole(2)
        first = await stream.source.next()
        assert (first.state, len(first.experiences)) == ("failed", 0)
        assert "does not decode" in str(first.reason)
        stream.source.consumed()
        assert (await stream.source.next()).state == "ready"

    play(act)


def test_nothing_left_in_a_batch_makes_it_empty() -> None:
    async def act(stream: Stream) -> None:
        await stream.ready(1, "t1", "o", 0)
        assert (await stream.source.next()).state == "empty"

    play(act)


def test_a_chunk_without_its_headers_is_parked_and_counts_for_nobody() -> None:
    async def act(stream: Stream) -> None:
        await stream.put("x", Envelope(body=b"TMQX", kind="experience_chunk", content_type=EXPERIENCES))
        await stream.put("x", Envelope(body=b"\xc1", kind="unknown"))
        await stream.whole(1)
        assert (await stream.source.next()).state == "ready"
        assert await stream.bus.depth(stream.topology.dead.name) == 2

    play(act)


def test_the_state_names_the_first_offset_that_a_restart_needs_and_leads_there() -> None:
    first = Stream()

    async def act(stream: Stream) -> dict[str, Any]:
        await stream.source.changed.wait()  # our own mark, offset 0
        await stream.whole(1)  # 1, 2
        await stream.whole(3)  # 3, 4
        await stream.chunk("t2", "dead", 0)  # 5, of an operator that died
        await stream.put("end", envelope(RunEnd(batches=3)))  # 6
        await stream.source.next()
        stream.source.consumed()
        await stream.source.changed.until(lambda: stream.source.ended is not None)
        return stream.source.state()

    state = play(act, first)
    assert state == {"consumed": {"t1": 1}, "failed": [], "batches": 1, "offset": 3, "ended": 3}
    again = StreamSource(first.bus, first.topology, "trainer-0")
    again.restore(state)
    assert again.state() == state


async def repaired_after_two(stream: Stream) -> None:
    """Batch 1 failed, 2 came, 1 was repaired, 3 came."""
    await stream.source.changed.wait()  # our own mark, offset 0
    await stream.ready(1, "t1", "o", 0, state="failed")  # 1
    await stream.whole(2)  # 2, 3
    await stream.chunk("t1", "again", 0)  # 4
    await stream.ready(1, "t1", "again", 1)  # 5
    await stream.whole(3)  # 6, 7


async def take(source: StreamSource, until: int) -> list[tuple[int, str, list[int]]]:
    taken = []
    while not taken or taken[-1][0] < until:
        batch = await source.next()
        repaired = [one for one in batch.others if one.is_repaired]
        assert all(len(one.experiences) == 1 and one.state == "ready" for one in repaired)
        taken.append((batch.batch, batch.state, [one.batch for one in repaired]))
        source.consumed()
    return taken


def test_a_repaired_batch_goes_along_with_the_first_one_behind_it_on_the_stream() -> None:
    async def act(stream: Stream) -> None:
        await repaired_after_two(stream)
        await stream.whole(4)
        assert await take(stream.source, 4) == [
            (1, "failed", []),
            (2, "ready", []),
            (3, "ready", [1]),
            (4, "ready", []),
        ]
        assert stream.source.state()["failed"] == []
        assert "t1" in stream.source.state()["consumed"]

    play(act)


@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_a_restart_from_any_state_gives_a_repaired_batch_along_with_the_same_one(saved_at: int) -> None:
    first = Stream()

    async def act(stream: Stream) -> tuple[dict[str, Any], Any]:
        await repaired_after_two(stream)
        await take(stream.source, saved_at)
        return stream.source.state(), await take(stream.source, 3) if saved_at < 3 else []

    state, rest = play(act, first)
    assert state["failed"] == (["t1"] if saved_at < 3 else [])

    async def again(stream: Stream) -> None:
        stream.source = StreamSource(stream.bus, stream.topology, "trainer-0")
        stream.source.restore(state)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(stream.source.run())
            assert (await take(stream.source, 3) if saved_at < 3 else []) == rest
            await stream.whole(4)
            assert await take(stream.source, 4) == [(4, "ready", [])]
            reading.cancel()

    play(again, first)


@pytest.mark.parametrize("in_batch_order", [True, False])
def test_a_restart_holds_one_batch_ahead_and_reads_the_others_again(in_batch_order: bool) -> None:
    """All that came after the checkpoint is on the stream when a trainer starts: 38 batches were held in memory."""
    stream = Stream(in_batch_order)

    async def put() -> None:
        await stream.bus.connect()
        await stream.bus.declare(*stream.topology.durable)
        for batch in range(1, 21):
            for n in range(2):
                await stream.chunk(f"t{batch}", "o", n)
            await stream.chunk(f"t{batch}", "of an operator that died", 0)
            await stream.ready(batch, f"t{batch}", "o", 2)
        await stream.bus.close()

    run_virtually(put())
    stream.bus = MemoryBus(stream.broker, stream.topology, config=BrokerConfig())
    stream.source = StreamSource(stream.bus, stream.topology, "trainer-0", in_batch_order=in_batch_order)

    async def act(stream: Stream) -> list[int]:
        await stream.source.changed.until(stream.source.available)
        assert len(stream.source.waiting) == 20, "all are known: nobody is asked to process them again"
        trained = []
        for _ in range(20):
            gc.collect()
            held = sum(isinstance(one, Chunk) and bool(one.body) for one in gc.get_objects())
            assert held <= 4, f"{held} chunks in memory, wanted those of two batches"
            batch = await stream.source.next()
            assert batch.state == "ready"
            assert [one.eid.run for one in batch.experiences] == [0, 1]
            trained.append(batch.batch)
            stream.source.consumed()
        return trained

    assert play(act, stream) == list(range(1, 21))


def test_a_released_batch_that_retention_has_cut_is_one_clear_error() -> None:
    async def act(stream: Stream) -> None:
        for batch in range(1, 6):
            await stream.whole(batch)
        await stream.source.changed.until(lambda: len(stream.source.waiting) == 5)
        stream.broker.queues[stream.topology.ready.name].trim(8)  # type: ignore[attr-defined]
        for _ in range(2):
            await stream.source.next()
            stream.source.consumed()
        with pytest.raises(FatalError, match=r"retention has cut it: it begins at 8"):
            await stream.source.next()

    play(act)


def test_bytes_read_are_counted() -> None:
    async def act(stream: Stream) -> None:
        await stream.whole(1)
        await stream.source.next()
        assert stream.source.bytes_since_save > 50

    play(act)


def test_a_stream_shorter_than_the_offset_is_an_error_after_a_while() -> None:
    stream = Stream()
    stream.source.restore({"consumed": [], "batches": 0, "offset": 50, "ended": None})
    with pytest.raises(ExceptionGroup) as caught:
        play(lambda _: asyncio.sleep(1000), stream)
    (error,) = caught.value.exceptions
    assert isinstance(error, FatalError)
    assert "offset 50" in str(error)
    assert "--fresh" in str(error)


def test_an_outage_while_it_waits_for_its_mark_is_not_taken_for_a_shorter_stream() -> None:
    stream = Stream()

    async def act(one: Stream) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        one.broker.drop(one.bus, delay=3 * SILENCE_SECONDS)
        await asyncio.sleep(3 * SILENCE_SECONDS + 5)
        await one.whole(1)
        assert (await one.source.next()).batch == 1

    stream.broker.block()  # the mark itself cannot be published for a while

    async def later(one: Stream) -> None:
        await asyncio.sleep(2 * SILENCE_SECONDS)
        one.broker.unblock()
        await act(one)

    play(later, stream)


def test_retention_that_cut_the_offset_is_one_clear_error() -> None:
    stream = Stream()

    async def prepare() -> None:
        await stream.bus.connect()
        await stream.bus.declare(*stream.topology.durable)
        for batch in range(1, 4):
            await stream.whole(batch)
        stream.broker.queues[stream.topology.ready.name].trim(1)  # type: ignore[attr-defined]
        with pytest.raises(FatalError, match=r"offset 0, but retention has cut it: it begins at 1") as caught:
            await stream.source.run()
        assert isinstance(caught.value.__cause__, StreamCut)

    run_virtually(prepare(), limit=100)


def test_in_the_streams_order_nobody_waits_for_a_batch_that_is_late_and_a_restart_knows_what_is_done() -> None:
    first = Stream(in_batch_order=False)

    async def act(stream: Stream) -> tuple[list[int], dict[str, Any]]:
        await stream.source.changed.wait()  # our own mark, offset 0
        for batch in (3, 1, 4, 6):
            await stream.whole(batch)  # 1 to 8
        got = []
        for _ in range(3):
            got.append((await stream.source.next()).batch)
            stream.source.consumed()
        return got, stream.source.state()

    got, state = play(act, first)
    assert got == [3, 1, 4]
    assert state == {
        "consumed": {"t1": 1, "t3": 3, "t4": 4},
        "failed": [],
        "batches": 1,
        "offset": 7,
        "ended": None,
        "ahead": [3, 4],
    }

    async def rest(stream: Stream) -> list[int]:
        for batch in (2, 5):
            await stream.whole(batch)
        got = []
        for _ in range(3):
            got.append((await stream.source.next()).batch)
            stream.source.consumed()
        assert stream.source.state() | {"offset": 0} == {
            "consumed": {f"t{n}": n for n in range(1, 7)},
            "failed": [],
            "batches": 6,
            "offset": 0,
            "ended": None,
        }
        return got

    # the same stream in either order; what was consumed is not waited for
    for in_batch_order, order in ((True, [2, 5, 6]), (False, [6, 2, 5])):
        again = Stream(in_batch_order)
        again.broker, again.bus = first.broker, MemoryBus(first.broker, first.topology, config=BrokerConfig())
        again.source = StreamSource(again.bus, again.topology, "trainer-0", in_batch_order=in_batch_order)
        again.source.restore(state)
        assert play(rest, again) == order


@pytest.mark.parametrize("in_batch_order", [True, False])
def test_a_long_run_remembers_as_much_as_a_short_one_and_takes_nothing_twice(in_batch_order: bool) -> None:
    first = Stream(in_batch_order, remembered=5)

    async def act(stream: Stream) -> dict[str, Any]:
        for batch in range(1, 41):
            await stream.whole(batch)
            assert (await stream.source.next()).batch == batch
            stream.source.consumed()
            assert len(stream.source.state()["consumed"]) <= 5
        await stream.whole(2)  # of an operator that was frozen all the time
        return stream.source.state()

    state = play(act, first)
    assert state["consumed"] == {f"t{n}": n for n in range(36, 41)}
    assert (state["batches"], state["settled"]) == (40, 35)

    async def rest(stream: Stream) -> list[int]:
        await stream.whole(3)
        got = []
        for batch in range(41, 47):
            await stream.whole(batch)
            got.append((await stream.source.next()).batch)
            stream.source.consumed()
        return got

    old = {**state, "consumed": [f"t{n}" for n in range(1, 41)]}  # as release 0.1.0 wrote it
    del old["settled"]
    for known in (state, old):
        again = Stream(in_batch_order)
        again.broker, again.bus = first.broker, MemoryBus(first.broker, first.topology, config=BrokerConfig())
        again.source = StreamSource(again.bus, again.topology, "trainer-0", in_batch_order=in_batch_order, remembered=5)
        again.source.restore(known)
        assert play(rest, again) == list(range(41, 47))
        assert again.source.state()["consumed"] == {f"t{n}": n for n in range(42, 47)}


def test_a_batch_that_is_late_is_taken_however_many_overtook_it() -> None:
    stream = Stream(in_batch_order=False, remembered=5)

    async def act(stream: Stream) -> int:
        for batch in range(2, 40):
            await stream.whole(batch)
            await stream.source.next()
            stream.source.consumed()
        assert "settled" not in stream.source.state()
        await stream.whole(1)
        late = (await stream.source.next()).batch
        stream.source.consumed()
        return late

    assert play(act, stream) == 1
    assert stream.source.state()["consumed"] == {**{f"t{n}": n for n in range(35, 40)}, "t1": 1}
    assert stream.source.state()["settled"] == 34
