"""The source of train batches, on a stream in memory and in virtual time."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_agents.trainer.sources.last_batch import LastBatch
from trinity_agents.trainer.sources.stream import REMEMBERED, StreamSource, TapRules
from trinity_agents.trainer.sources.tap import TapSource
from trinity_mq.bus import AddressError, BusUnavailable, Envelope, StreamCut, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import BatchReady, RunEnd
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.runtime.errors import FatalError
from trinity_mq.testing.virtual_time import VirtualTimeLoop
from trinity_mq.transport.ready_stream import SILENCE_SECONDS, Chunk

LOOP = VirtualTimeLoop


class Stream:
    """A ready stream and a source that reads it."""

    def __init__(self, in_batch_order: bool = True, **options: Any) -> None:
        self.topology, self.broker = Topology("src"), MemoryBroker()
        self.bus = MemoryBus(self.broker, self.topology, config=BrokerConfig())
        self.source = StreamSource(self.bus, self.topology, "trainer-0", in_batch_order=in_batch_order, **options)

    def again(self, state: dict[str, Any], in_batch_order: bool = True, **options: Any) -> Stream:
        """Return what a restarted trainer has: the same stream, and a source that goes on from a state."""
        again = Stream(in_batch_order, **options)
        again.broker, again.bus = self.broker, MemoryBus(self.broker, self.topology, config=BrokerConfig())
        again.source = StreamSource(again.bus, self.topology, "trainer-0", in_batch_order=in_batch_order, **options)
        again.source.restore(state)
        return again

    async def connect(self) -> None:
        await self.bus.connect()
        await self.bus.declare(*self.topology.durable)

    async def trained(self, count: int) -> list[tuple[int | str, str]]:
        """Take so many batches; return each with its state."""
        taken = []
        for _ in range(count):
            batch = await self.source.next()
            taken.append((batch.batch, batch.state))
            self.source.consumed()
        return taken

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


@asynccontextmanager
async def reading(stream: Stream | None = None) -> AsyncIterator[Stream]:
    """Let the source of a stream, of a new one if none is given, read."""
    stream = stream or Stream()
    await stream.connect()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stream.source.run())
        yield stream
        task.cancel()


async def test_batches_come_in_their_order_and_are_counted() -> None:
    async with reading() as stream:
        for batch in (3, 1, 2):
            await stream.whole(batch)
        assert len((await stream.source.next()).experiences) == 1
        assert [batch for batch, _ in await stream.trained(3)] == [1, 2, 3]
        assert stream.source.bytes_since_save > 150


async def test_what_cannot_be_read_fails_its_batch_alone_or_is_parked() -> None:
    async with reading() as stream:
        await stream.put("x", Envelope(body=b"TMQX", kind="experience_chunk", content_type=EXPERIENCES))
        await stream.put("x", Envelope(body=b"\xc1", kind="unknown"))
        await stream.chunk("t1", "o", 0, b"TMQX nonsense")
        await stream.ready(1, "t1", "o", 1)
        await stream.whole(2)
        await stream.ready(3, "t3", "o", 0)
        failed = await stream.source.next()
        assert len(failed.experiences) == 0
        assert "does not decode" in str(failed.reason)
        assert await stream.trained(3) == [(1, "failed"), (2, "ready"), (3, "empty")]
        assert await stream.bus.depth(stream.topology.dead.name) == 2


async def test_the_state_names_the_first_offset_that_a_restart_needs_and_leads_there() -> None:
    async with reading() as stream:
        await stream.source.changed.wait()  # our own mark, offset 0
        await stream.whole(1)  # 1, 2
        await stream.whole(3)  # 3, 4
        await stream.chunk("t2", "dead", 0)  # 5, of an operator that died
        await stream.put("end", envelope(RunEnd(batches=3)))  # 6
        await stream.trained(1)
        await stream.source.changed.until(lambda: stream.source.ended is not None)
        state = stream.source.state()
    assert state == {"consumed": {"t1": 1}, "failed": [], "batches": 1, "offset": 3, "ended": 3}
    assert stream.again(state).source.state() == state


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


@pytest.mark.parametrize("saved_at", [1, 2, 3])
async def test_a_repaired_batch_goes_along_with_the_first_one_behind_it_also_after_a_restart(saved_at: int) -> None:
    taken = [(1, "failed", []), (2, "ready", []), (3, "ready", [1]), (4, "ready", [])]
    async with reading() as stream:
        await repaired_after_two(stream)
        assert await take(stream.source, saved_at) == taken[:saved_at]
        state = stream.source.state()
        await stream.whole(4)
        assert await take(stream.source, 4) == taken[saved_at:]
        assert (stream.source.state()["failed"], "t1" in stream.source.state()["consumed"]) == ([], True)
    assert state["failed"] == (["t1"] if saved_at < 3 else [])
    async with reading(stream.again(state)) as again:
        assert await take(again.source, 4) == taken[saved_at:]


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Hide the objects of earlier tests, millions in a whole suite, from collections and from ``gc.get_objects``."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("in_batch_order", [True, False])
async def test_a_restart_holds_one_batch_ahead_and_reads_the_others_again(in_batch_order: bool) -> None:
    """All that came after the checkpoint is on the stream when a trainer starts: 38 batches were held in memory."""
    stream = Stream(in_batch_order)
    await stream.connect()
    for batch in range(1, 21):
        for n in range(2):
            await stream.chunk(f"t{batch}", "o", n)
        await stream.chunk(f"t{batch}", "of an operator that died", 0)
        await stream.ready(batch, f"t{batch}", "o", 2)
    async with reading(stream):
        await stream.source.changed.until(stream.source.available)
        assert len(stream.source.waiting) == 20, "all are known: nobody is asked to process them again"
        for number in range(1, 21):
            gc.collect()
            held = sum(type(item) is Chunk and bool(item.body) for item in gc.get_objects())
            assert held <= 4, f"{held} chunks in memory, wanted those of two batches"
            assert [one.eid.run for one in (await stream.source.next()).experiences] == [0, 1]
            assert await stream.trained(1) == [(number, "ready")]


async def test_what_retention_has_cut_is_one_clear_error() -> None:
    async with reading() as stream:
        for batch in range(1, 6):
            await stream.whole(batch)
        await stream.source.changed.until(lambda: len(stream.source.waiting) == 5)
        stream.broker.queues[stream.topology.ready.name].trim(8)  # type: ignore[attr-defined]
        await stream.trained(2)
        with pytest.raises(FatalError, match=r"retention has cut it: it begins at 8"):
            await stream.source.next()
    late = stream.again({"consumed": [], "batches": 0, "offset": 0, "ended": None})
    await late.bus.connect()
    with pytest.raises(FatalError, match=r"offset 0, but retention has cut it: it begins at 8") as caught:
        await late.source.run()
    assert isinstance(caught.value.__cause__, StreamCut)


async def test_a_stream_shorter_than_the_offset_is_an_error_after_a_while() -> None:
    stream = Stream()
    await stream.connect()
    stream.source.restore({"consumed": [], "batches": 0, "offset": 50, "ended": None})
    with pytest.raises(FatalError, match=r"offset 50[\s\S]*--fresh"):
        await stream.source.run()


async def test_an_outage_while_it_waits_for_its_mark_is_not_taken_for_a_shorter_stream() -> None:
    stream = Stream()
    stream.broker.block()  # the mark itself cannot be published for a while
    await stream.bus.connect()
    async with asyncio.TaskGroup() as group:
        stream.broker.unblock()
        await stream.bus.declare(*stream.topology.durable)
        stream.broker.block()
        task = group.create_task(stream.source.run())
        await asyncio.sleep(2 * SILENCE_SECONDS)
        stream.broker.unblock()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.broker.drop(stream.bus, delay=3 * SILENCE_SECONDS)
        await asyncio.sleep(3 * SILENCE_SECONDS + 5)
        await stream.whole(1)
        assert await stream.trained(1) == [(1, "ready")]
        task.cancel()


@pytest.mark.parametrize(("in_batch_order", "order"), [(True, [2, 5, 6]), (False, [6, 2, 5])])
async def test_in_the_streams_order_nobody_waits_for_a_batch_that_is_late_and_a_restart_knows_what_is_done(
    in_batch_order: bool, order: list[int]
) -> None:
    """The restart reads the same stream in either order; what was consumed is not waited for."""
    async with reading(Stream(in_batch_order=False)) as stream:
        await stream.source.changed.wait()  # our own mark, offset 0
        for batch in (3, 1, 4, 6):
            await stream.whole(batch)  # 1 to 8
        assert [batch for batch, _ in await stream.trained(3)] == [3, 1, 4]
        state = stream.source.state()
    consumed = {"t1": 1, "t3": 3, "t4": 4}
    assert state == {"consumed": consumed, "failed": [], "batches": 1, "offset": 7, "ended": None, "ahead": [3, 4]}
    async with reading(stream.again(state, in_batch_order)) as again:
        for batch in (2, 5):
            await again.whole(batch)
        assert [batch for batch, _ in await again.trained(3)] == order
        consumed = {f"t{n}": n for n in range(1, 7)}
        wanted = {"consumed": consumed, "failed": [], "batches": 6, "offset": 0, "ended": None}
        assert again.source.state() | {"offset": 0} == wanted


@pytest.mark.parametrize("by_release_0_1_0", [False, True])
@pytest.mark.parametrize("in_batch_order", [True, False])
async def test_a_long_run_remembers_as_much_as_a_short_one_and_takes_nothing_twice(
    in_batch_order: bool, by_release_0_1_0: bool
) -> None:
    async with reading(Stream(in_batch_order, remembered=5)) as stream:
        for batch in range(1, 41):
            await stream.whole(batch)
            assert await stream.trained(1) == [(batch, "ready")]
            assert len(stream.source.state()["consumed"]) <= 5
        await stream.whole(2)  # of an operator that was frozen all the time
        state = stream.source.state()
    assert state["consumed"] == {f"t{n}": n for n in range(36, 41)}
    assert (state["batches"], state["settled"]) == (40, 35)
    if by_release_0_1_0:
        state["consumed"] = [f"t{n}" for n in range(1, 41)]
        del state["settled"]
    async with reading(stream.again(state, in_batch_order, remembered=5)) as again:
        await again.whole(3)
        for batch in range(41, 47):
            await again.whole(batch)
            assert await again.trained(1) == [(batch, "ready")]
        assert again.source.state()["consumed"] == {f"t{n}": n for n in range(42, 47)}


async def test_a_batch_that_is_late_is_taken_however_many_overtook_it() -> None:
    async with reading(Stream(in_batch_order=False, remembered=5)) as stream:
        for batch in range(2, 40):
            await stream.whole(batch)
            await stream.trained(1)
        assert "settled" not in stream.source.state()
        await stream.whole(1)
        assert await stream.trained(1) == [(1, "ready")]
        assert stream.source.state()["consumed"] == {**{f"t{n}": n for n in range(35, 40)}, "t1": 1}
        assert stream.source.state()["settled"] == 34


# -- the stream of another run


class OtherRun(Stream):
    """A stream that another run reads: what cannot be read costs its batches only, and nothing of that run changes."""

    def __init__(
        self, came: Callable[[BatchReady, int], bool] = lambda _ready, _offset: True, remembered: int = REMEMBERED
    ) -> None:
        super().__init__()
        self.own = Topology("own")
        self.own_bus = MemoryBus(self.broker, self.own, config=BrokerConfig())
        self.cuts: list[StreamCut] = []
        tapped = TapRules(self.own_bus, self.own, came, lambda _end: None, self.cuts.append)
        self.source = StreamSource(
            self.bus, self.topology, "trainer-0", in_batch_order=False, tapped=tapped, remembered=remembered
        )

    def cut(self, messages: int) -> None:
        """Let retention cut what is first on the stream."""
        self.broker.queues[self.topology.ready.name].trim(messages)  # type: ignore[attr-defined]


async def test_what_retention_has_cut_from_another_run_is_passed_over() -> None:
    stream = OtherRun()
    await stream.connect()
    for batch in range(1, 5):
        await stream.whole(batch)
    stream.cut(3)  # the whole first batch, and the chunk of the second
    async with reading(stream):
        assert await stream.trained(2) == [(3, "ready"), (4, "ready")]
        assert [(cut.asked, cut.got) for cut in stream.cuts] == [(0, 3)]


async def test_a_released_batch_of_another_run_that_retention_has_cut_is_gone_and_the_next_ones_are_not() -> None:
    async with reading(OtherRun()) as stream:
        for batch in range(1, 6):
            await stream.whole(batch)
        await stream.source.changed.until(lambda: len(stream.source.waiting) == 5)
        stream.cut(8)
        batches, states = zip(*await stream.trained(5), strict=True)
    assert batches == (1, 2, 3, 4, 5)
    assert states[:2] == ("ready", "ready")
    assert "gone" in states[2:]


async def test_tickets_are_forgotten_where_reading_began_in_the_middle_and_where_a_batch_is_missing() -> None:
    stream = OtherRun(lambda ready, _offset: isinstance(ready.batch, int) and ready.batch >= 101, remembered=5)
    missing = 120
    wanted = [one for one in range(101, 151) if one != missing]
    taken, sizes = [], []
    async with reading(stream):
        for batch in [98, 99, 100, *wanted]:
            await stream.whole(batch)
            if batch in wanted:
                taken += await stream.trained(1)
                sizes.append(len(stream.source.state()["consumed"]))
        assert max(sizes) <= 12, "remembered ones, and as many of which it is not known what is missing before them"
        await stream.whole(missing)
        await stream.whole(151)
        taken += await stream.trained(1)
    assert taken == [(batch, "ready") for batch in (*wanted, 151)], "a batch that was given up came again"
    state = stream.source.state()
    assert (state["batches"], state["settled"], "ahead" in state) == (151, 146, False)


async def test_a_batch_that_is_here_when_it_is_given_up_is_trained_on_and_the_run_ends() -> None:
    async with reading(OtherRun(remembered=5)) as stream:
        order = (1, 3, 4, 5, 6, 7, 8, 2)
        for batch in order:
            await stream.whole(batch)
        await stream.put("end", envelope(RunEnd(batches=8)))
        await stream.source.changed.until(lambda: stream.source.ended == 8)
        assert await stream.trained(8) == [(batch, "ready") for batch in order]
        state = stream.source.state()
        assert (stream.source.waiting, state["batches"], "ahead" in state) == ([], 8, False)
        assert not stream.source.available()


async def test_dead_letters_are_those_of_the_run_that_reads() -> None:
    async with reading(OtherRun()) as stream:
        await stream.own_bus.connect()
        await stream.own_bus.declare(*stream.own.durable)
        await stream.put("1", Envelope(body=b"rubbish", kind="batch_ready"))
        await stream.whole(1)
        await stream.trained(1)
        assert [await stream.bus.depth(one.dead.name) for one in (stream.topology, stream.own)] == [0, 1]


# -- its end, wherever reading began


def after(*batches: int, ends: int | None) -> LastBatch:
    last = LastBatch()
    for number in batches:
        last.batch(number)
    if ends is not None:
        last.set_batch_count(ends)
    return last


@pytest.mark.parametrize(
    ("batches", "ends", "is_complete"),
    [
        *((order, 4, True) for order in itertools.permutations((1, 2, 3, 4))),
        ((1, 2, 3), None, False),
        ((1, 3), 3, False),
        ((), 0, True),
        ((), 2, False),
        ((7, 8, 9), 9, True),  # what lies before the beginning is not waited for
        ((8, 7, 9), 9, True),
        ((7, 9), 9, False),
    ],
)
def test_a_run_ends_with_all_batches_since_the_beginning(batches: tuple[int], ends: int, is_complete: bool) -> None:
    assert after(*batches, ends=ends).is_complete == is_complete


def test_the_end_after_a_cut_an_extension_and_a_restart() -> None:
    cut = after(1, 2, ends=None)
    cut.cut()
    cut.batch(6)
    cut.set_batch_count(6)
    assert cut.is_complete
    extended = after(1, 2, ends=2)
    extended.batch(3)
    assert not extended.is_complete
    extended.set_batch_count(3)
    assert extended.is_complete
    restored = LastBatch.restored(json.loads(json.dumps(after(1, 2, 4, ends=4).state())))
    restored.batch(2)  # read again
    assert not restored.is_complete
    restored.batch(3)
    assert restored.is_complete


# -- the run that is tapped


OTHER, OWN = Topology("first"), Topology("second")


class AnyToken:
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
        codec: Any = AnyToken()
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
async def test_a_run_that_begins_later_is_trained_on_once(tapped: Tapped, run_id: str | None) -> None:
    first, state = await tapped.life({}, [1, 2], run_id, takes=2)
    assert state["run_id"] == run_id
    second, state = await tapped.life(state, [3], run_id, takes=1)
    assert state["run_id"] == run_id
    assert first + second == [1, 2, 3]


async def test_earlier_batches_are_read_from_the_beginning_on_and_not_from_now_on(tapped: Tapped) -> None:
    await tapped.publish(1, "run-of-first")
    expected = [2] if tapped.config.source.start == "now" else [1, 2]
    assert (await tapped.life({}, [2], "run-of-first", takes=len(expected)))[0] == expected


async def test_what_comes_between_a_checkpoint_without_a_batch_and_the_next_start_is_read(tapped: Tapped) -> None:
    _, state = await tapped.life({}, [], None, takes=0)
    await tapped.publish(1, "run-of-first")
    assert (await tapped.life(state, [2], "run-of-first", takes=2))[0] == [1, 2]


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


async def test_an_address_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    def broker() -> None:
        raise AddressError("the URL begins with http")

    source = with_broker(tmp_path / "first", broker)
    (tmp_path / "first" / "broker.url").write_text("http://127.0.0.1")
    with pytest.raises(AddressError, match="begins with http"):
        await source.run()
