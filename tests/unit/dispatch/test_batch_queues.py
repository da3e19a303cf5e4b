"""When a batch queue is looked at, and when it is replaced: on a MemoryBus whose queues go silent, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.unit.agents.world import NotingBus, World
from trinity_mq.bus import BusRefused, BusUnavailable, Envelope, Queue
from trinity_mq.dispatch.batch_queues import NEW_PATIENCE, PATIENCE, BatchQueues
from trinity_mq.dispatch.tickets import Ticket, new_ticket
from trinity_mq.messages import BatchClosed, Mark, TaskBody, TaskResult
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import VirtualTimeLoop

LOOP = VirtualTimeLoop

SENT = "sent mark"
DELETING = 5.0
"""Seconds that RabbitMQ takes over a queue that nobody leads."""


pytestmark = pytest.mark.usefixtures("logs")


class SilentBus(NotingBus):
    """Publishes to a silent queue are not confirmed; that lasts until it is deleted, or for some tries."""

    silent: str | None = None
    missed_tries = 0
    breaks_at_declare = False

    async def publish(self, exchange: str, routing_key: str, envelope: Envelope, **how: Any) -> bool:
        if self.silent is not None and routing_key.endswith(self.silent):
            self.world.note(f"sent {envelope.kind}")
            await asyncio.sleep(how["timeout"])
            self.missed_tries -= 1
            if not self.missed_tries:
                self.silent = None
            raise BusUnavailable("not confirmed")
        return await super().publish(exchange, routing_key, envelope, **how)

    async def declare(self, *queues: Queue) -> None:
        if self.breaks_at_declare:
            self.breaks_at_declare = False
            self.broker.drop(self, delay=0.5)
        await super().declare(*queues)

    async def delete(self, name: str) -> None:
        await asyncio.sleep(DELETING)
        self.silent = None
        await super().delete(name)

    @property
    def broker(self) -> Any:
        return self.world.broker


class Scene:
    """A ticket, and the bus of its owner."""

    def __init__(self, *, published: bool = True, deliver: Any = "pipeline") -> None:
        self.world = World()
        self.bus = SilentBus(self.world)
        self.ticket: Ticket = new_ticket(1, [TaskBody(workflow="x")], deliver=deliver, lane="train", time_left=1.0)
        self.ticket.published = published
        self.queues = BatchQueues(self.bus, self.world.topology, lambda: [self.ticket])
        self.name = f"batch.{self.ticket.ticket}"

    async def begin(self) -> None:
        await self.world.ready()
        await self.bus.connect()
        if self.ticket.published:
            await self.bus.declare(self.world.topology.batch_queue(1, self.ticket.ticket))

    def fall_silent(self) -> None:
        """What was in it, such as the mark of the first look, is gone with its leader."""
        self.bus.silent = self.ticket.ticket
        if self.world.count(self.name):
            self.world.emptied(self.name)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """The first look, that of a start, is over."""
        if not self.bus.usable:
            await self.begin()
        watching = asyncio.create_task(self.queues.watch())
        await asyncio.sleep(0.1)
        self.world.wire.clear()
        try:
            yield
        finally:
            assert not watching.done()
            watching.cancel()

    @property
    def was_replaced(self) -> bool:
        assert self.world.count(self.name) is not None, "there is no queue"
        return f"deleted {self.name}" in self.world.wire

    def report(self, parts: int) -> None:
        about = {"batch": 1, "ticket": self.ticket.ticket, "task_id": 0, "run_base": 0, "repeat_times": 1}
        self.ticket.record(TaskResult(**about, attempt="a", outcome="finished", runs=[0], parts=parts))


@pytest.mark.parametrize("again", [True, False])
async def test_one_whose_making_was_cut_off_is_replaced_if_it_takes_nothing(again: bool) -> None:
    scene = Scene(published=False)
    spent: list[float] = []
    await scene.begin()
    scene.fall_silent()
    scene.bus.breaks_at_declare = not again
    started = asyncio.get_running_loop().time()
    await scene.queues.make(scene.ticket, again=again)
    spent.append(asyncio.get_running_loop().time() - started)
    assert scene.was_replaced
    assert scene.world.count(scene.name) == 1, "the mark that was taken"
    # what slices went out for is given longer
    assert spent[0] == pytest.approx(DELETING + (PATIENCE if again else NEW_PATIENCE + 0.5), abs=0.2)


async def test_after_a_break_one_that_takes_nothing_is_replaced(logs: list[Any]) -> None:
    scene = Scene()
    async with scene.watched():
        scene.fall_silent()
        await asyncio.sleep(60)
        assert not scene.world.wire, "nothing was lost, so nothing is looked at"
        scene.world.broker.drop(scene.bus, delay=100.0)
        await asyncio.sleep(100 + PATIENCE - 1)
        assert not scene.was_replaced, "while the broker is away nobody is silent"
        await asyncio.sleep(2 + DELETING)
        assert scene.was_replaced
    assert [entry["event"] for entry in logs if "queue" in entry["event"]] == ["batch_queue_replaced"]


@pytest.mark.parametrize("missed", [0, 3])
async def test_one_that_answers_stays(missed: int) -> None:
    scene = Scene()
    async with scene.watched():
        if missed:
            scene.fall_silent()
            scene.bus.missed_tries = missed
        scene.world.broker.drop(scene.bus)
        await asyncio.sleep(3 * PATIENCE)
        assert scene.world.wire == [SENT] * missed + [SENT, "confirmed mark"]
    assert not scene.was_replaced


def hold_nothing(scene: Scene) -> None:
    scene.report(parts=0)


def report_a_part(scene: Scene) -> None:
    scene.report(parts=1)


def close(scene: Scene) -> None:
    scene.ticket.manifest = BatchClosed(batch=1, ticket=scene.ticket.ticket, accepted=[])


def unopen(scene: Scene) -> None:
    scene.ticket.published = False


@pytest.mark.parametrize(
    ("deliver", "change", "sees", "replaced"),
    [
        pytest.param("pipeline", hold_nothing, ["batch_queue_replaced"], True, id="a result without parts"),
        pytest.param("pipeline", report_a_part, ["batch_queue_silent"], False, id="a reported part"),
        pytest.param("pipeline", None, ["batch_queue_silent"], False, id="a message"),
        pytest.param("pipeline", close, [], False, id="closed"),
        pytest.param("pipeline", unopen, [], False, id="not opened yet"),
        pytest.param("caller", hold_nothing, [], False, id="read by its owner"),
    ],
)
async def test_a_silent_one_is_replaced_only_if_nothing_can_be_in_it(
    logs: list[Any], deliver: str, change: Callable[[Scene], None] | None, sees: list[str], replaced: bool
) -> None:
    scene = Scene(deliver=deliver)
    async with scene.watched():
        scene.fall_silent()
        if change is None:
            await scene.world.put(scene.name, b"x")
        else:
            change(scene)
        scene.world.broker.drop(scene.bus)
        await asyncio.sleep(3 * PATIENCE)
    assert scene.was_replaced == replaced
    assert [entry["event"] for entry in logs if entry["event"].startswith("batch_queue")] == sees
    assert (SENT in scene.world.wire) == bool(sees), "who needs no look gets none"


@pytest.mark.parametrize("deliver", ["pipeline", "caller"])
@pytest.mark.parametrize("published", [True, False], ids=["published", "about to be"])
async def test_after_a_break_a_binding_that_the_broker_lost_is_made_again(deliver: str, published: bool) -> None:
    scene = Scene(published=False, deliver=deliver)
    await scene.begin()
    await scene.queues.make(scene.ticket, again=False)
    assert SENT not in scene.world.wire, "a new one is not looked at"
    scene.ticket.published = published
    async with scene.watched():
        queue = scene.world.topology.batch_queue(1, scene.ticket.ticket)
        await scene.world.outside.unbind(queue)
        part = envelope(Mark(nonce="x"))
        key = scene.world.topology.batch_routing_key(1, scene.ticket.ticket)
        assert not await scene.world.outside.publish(scene.world.topology.exchange("experiences"), key, part)
        scene.world.broker.drop(scene.bus, delay=1.0)
        await asyncio.sleep(2.0)
        assert await scene.world.outside.publish(scene.world.topology.exchange("experiences"), key, part)
    assert not scene.was_replaced


@pytest.mark.parametrize("after", [PATIENCE / 2, PATIENCE + DELETING / 2])
async def test_one_that_is_closed_meanwhile_is_not_made_again(after: float) -> None:
    scene = Scene()
    async with scene.watched():
        scene.fall_silent()
        scene.world.broker.drop(scene.bus, delay=0.0)
        await asyncio.sleep(after)
        close(scene)
        await asyncio.sleep(3 * PATIENCE)
    assert SENT in scene.world.wire
    left_alone = after < PATIENCE
    assert scene.world.count(scene.name) == (0 if left_alone else None)


# -- the queue declared ahead


async def test_the_next_ticket_takes_the_queue_that_is_declared_ahead() -> None:
    scene = Scene(published=False)
    world, queues = scene.world, scene.queues
    async with scene.watched():
        assert queues.spare is None, "nothing was opened yet"
        queues.want_spare()
        await asyncio.sleep(0.1)
        spare = queues.spare
        assert spare is not None
        assert world.count(f"batch.{spare}") == 0
        exchange, mark = world.topology.exchange("experiences"), envelope(Mark(nonce="x"))
        for batch in (0, 1):
            key = world.topology.batch_routing_key(batch, spare)
            assert not await scene.bus.publish(exchange, key, mark), "nothing is bound yet"
        assert queues.next_ticket() == spare
        assert queues.next_ticket() != spare, "each id is taken once"
        scene.ticket.ticket = spare
        await queues.make(scene.ticket, again=False)
        assert await scene.bus.publish(exchange, key, mark)
        assert world.count(f"batch.{spare}") == 1
        queues.want_spare()
        await asyncio.sleep(0.1)
        assert queues.spare not in {None, spare}


async def test_one_from_before_a_break_is_looked_at_before_it_is_used() -> None:
    scene = Scene(published=False)
    spent: list[float] = []
    async with scene.watched():
        scene.queues.want_spare()
        await asyncio.sleep(0.1)
        scene.world.broker.drop(scene.bus)
        await asyncio.sleep(1.0)
        scene.ticket.ticket = scene.queues.next_ticket()
        scene.name = f"batch.{scene.ticket.ticket}"
        scene.fall_silent()
        started = asyncio.get_running_loop().time()
        await scene.queues.make(scene.ticket, again=False)
        spent.append(asyncio.get_running_loop().time() - started)
    assert scene.was_replaced
    assert spent[0] == pytest.approx(DELETING + NEW_PATIENCE, abs=0.2)


async def test_one_that_expired_is_made_again_and_it_goes_with_its_owner() -> None:
    scene = Scene(published=False)
    await scene.begin()
    watching = asyncio.create_task(scene.queues.watch())
    scene.queues.want_spare()
    await asyncio.sleep(0.1)
    name = f"batch.{scene.queues.spare}"
    await scene.world.outside.delete(scene.world.topology.prefix + name)
    await scene.queues.keep()
    assert scene.world.count(name) == 0, "it is renewed with the others"
    scene.ticket.ticket = scene.queues.next_ticket()
    await scene.world.outside.delete(scene.world.topology.prefix + name)
    await scene.queues.make(scene.ticket, again=False)
    assert scene.world.count(name) == 0, "it is made again when it is used"
    scene.queues.want_spare()
    await asyncio.sleep(0.1)
    name = f"batch.{scene.queues.spare}"
    watching.cancel()
    await asyncio.wait([watching])
    assert scene.world.count(name) is None
    assert scene.queues.spare is None


async def test_a_broker_that_refuses_it_does_no_harm(logs: list[Any]) -> None:
    scene = Scene(published=False)
    declare = scene.bus.declare

    async def refuses(*queues: Queue) -> None:
        if not queues[0].bindings:
            raise BusRefused("so many queues are not allowed")
        await declare(*queues)

    async with scene.watched():
        scene.bus.declare = refuses  # type: ignore[method-assign]
        scene.queues.want_spare()
        await asyncio.sleep(0.1)
        assert scene.queues.spare is None
        await scene.queues.make(scene.ticket, again=False)
        assert scene.world.count(scene.name) == 0
    (told,) = (entry for entry in logs if entry["event"] == "no_spare_queue")
    assert "not allowed" in told["reason"]
