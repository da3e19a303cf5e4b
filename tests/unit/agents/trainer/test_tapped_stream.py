"""The stream of another run: what cannot be read costs its batches only, and nothing of that run is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.unit.agents.trainer.test_source import Stream, play
from trinity_agents.trainer.sources.stream import REMEMBERED, StreamSource, TapRules
from trinity_mq.bus import Envelope, StreamCut, Topology
from trinity_mq.bus.memory.bus import MemoryBus
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.messages import BatchReady, RunEnd
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import run_virtually


class OtherRun(Stream):
    """A stream that another run reads."""

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

    async def cut(self, messages: int) -> None:
        """Let retention cut what is first on the stream."""
        self.broker.queues[self.topology.ready.name].trim(messages)  # type: ignore[attr-defined]

    async def trained(self, count: int) -> list[tuple[int, str]]:
        found = []
        for _ in range(count):
            batch = await self.source.next()
            found.append((batch.batch, batch.state))
            self.source.consumed()
        return found


def test_what_retention_has_cut_is_passed_over_at_the_beginning() -> None:
    stream = OtherRun()

    async def main() -> list[tuple[int, str]]:
        await stream.bus.connect()
        await stream.bus.declare(*stream.topology.durable)
        for batch in range(1, 5):
            await stream.whole(batch)
        await stream.cut(3)  # the whole first batch, and the chunk of the second
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(stream.source.run())
            found = await stream.trained(2)
            reading.cancel()
        return found

    assert run_virtually(main(), limit=1000) == [(3, "ready"), (4, "ready")]
    assert [(cut.asked, cut.got) for cut in stream.cuts] == [(0, 3)]


def test_a_released_batch_that_retention_has_cut_is_gone_and_the_next_ones_are_not() -> None:
    stream = OtherRun()

    async def act(_: Stream) -> list[tuple[int, str]]:
        for batch in range(1, 6):
            await stream.whole(batch)
        await stream.source.changed.until(lambda: len(stream.source.waiting) == 5)
        await stream.cut(8)
        return await stream.trained(5)

    found = play(act, stream)
    assert [batch for batch, _ in found] == [1, 2, 3, 4, 5]
    assert [state for _, state in found[:2]] == ["ready", "ready"]
    assert "gone" in {state for _, state in found[2:]}


def test_unwanted_batches_are_not_handed_out() -> None:
    stream = OtherRun(lambda ready, _offset: isinstance(ready.batch, int) and ready.batch >= 3)

    async def act(_: Stream) -> list[tuple[int, str]]:
        for batch in range(1, 5):
            await stream.whole(batch)
        return await stream.trained(2)

    assert play(act, stream) == [(3, "ready"), (4, "ready")]


def test_tickets_are_forgotten_where_reading_began_in_the_middle_and_where_a_batch_is_missing() -> None:
    stream = OtherRun(lambda ready, _offset: isinstance(ready.batch, int) and ready.batch >= 101, remembered=5)
    missing = 120
    wanted = [one for one in range(101, 151) if one != missing]

    async def act(_: Stream) -> list[tuple[int, str]]:
        found, sizes = [], []
        for batch in [98, 99, 100, *wanted]:
            await stream.whole(batch)
            if batch in wanted:
                found += await stream.trained(1)
                sizes.append(len(stream.source.state()["consumed"]))
        assert max(sizes) <= 12, "remembered ones, and as many of which it is not known what is missing before them"
        await stream.whole(missing)
        await stream.whole(151)
        return found + await stream.trained(1)

    found = play(act, stream)
    assert found == [(batch, "ready") for batch in (*wanted, 151)], "a batch that was given up came again"
    state = stream.source.state()
    assert (state["batches"], state["settled"], "ahead" in state) == (151, 146, False)


def test_a_batch_that_is_here_when_it_is_given_up_is_trained_on_and_the_run_ends() -> None:
    stream = OtherRun(remembered=5)

    async def act(_: Stream) -> list[tuple[int, str]]:
        for batch in (1, 3, 4, 5, 6, 7, 8, 2):
            await stream.whole(batch)
        await stream.put("end", envelope(RunEnd(batches=8)))
        await stream.source.changed.until(lambda: stream.source.ended == 8)
        return await stream.trained(8)

    found = play(act, stream)
    assert found == [(batch, "ready") for batch in (1, 3, 4, 5, 6, 7, 8, 2)]
    state = stream.source.state()
    assert (stream.source.waiting, state["batches"], "ahead" in state) == ([], 8, False)
    assert not stream.source.available()


def test_dead_letters_are_those_of_the_run_that_reads() -> None:
    stream = OtherRun()

    async def act(_: Stream) -> list[int | None]:
        await stream.own_bus.connect()
        await stream.own_bus.declare(*stream.own.durable)
        await stream.put("1", Envelope(body=b"rubbish", kind="batch_ready"))
        await stream.whole(1)
        await stream.trained(1)
        return [await stream.bus.depth(one.dead.name) for one in (stream.topology, stream.own)]

    assert play(act, stream) == [0, 1]
