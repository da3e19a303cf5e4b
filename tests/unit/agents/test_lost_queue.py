"""A work queue is deleted or purged in the middle of a run: what was in it is sent again within tens of seconds."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.world import World, killed_when
from trinity_agents.explorer.state import MANIFEST_LOST_AFTER
from trinity_agents.simulation import Simulation, until
from trinity_mq.dispatch.loss_repair import (
    LONGEST_PATIENCE,
    LOOK_SECONDS,
    LOST_AFTER,
    LossRepair,
    LostSlices,
    SliceName,
)
from trinity_mq.dispatch.tickets import SliceState, Ticket, new_ticket
from trinity_mq.messages import BatchClosed, ExplorerStatus, Heartbeat, RunnerStatus, TaskBody, TaskSlice
from trinity_mq.runtime.deliveries import acknowledge
from trinity_mq.testing.fakes import FakeRunnerAgent
from trinity_mq.testing.virtual_time import run_virtually

BATCHES = 4
SETTINGS = ("synchronizer.sync_interval=2", "synchronizer.sync_offset=2")
TENS_OF_SECONDS = 40.0
LONG = 500.0
"""Seconds, of which a test waits far less."""


class SayingRunner(FakeRunnerAgent):
    """A runner that says which slices it has."""

    holds: dict[str, list[tuple[int, int]]] | None = {}  # noqa: RUF012

    def detail(self) -> RunnerStatus:
        return RunnerStatus(holds=self.holds)


def make_runner(sim: Simulation) -> SayingRunner:
    return SayingRunner(sim.config, bus=sim.bus(), topology=sim.topology, agent_id="runner-0", work=sim.runner)


async def empty(sim: Simulation, name: str, how: str) -> int:
    """Delete or purge a queue; return how many messages were lost with it."""
    full = sim.topology.prefix + name
    lost = len(sim.waiting_in(name))
    client = await sim.client()
    if how == "deleted":
        await client.delete(full)
    else:
        queue = next(queue for queue in sim.topology.durable if queue.name == full)
        async with await client.consume(queue) as consumer:
            while (delivery := consumer.get_nowait()) is not None:
                await acknowledge(delivery)
    await client.close()
    return lost


def losses(sim: Simulation) -> LossRepair:
    assert sim.explorer.exploration is not None
    return sim.explorer.exploration.dispatcher.losses


def sent(sim: Simulation) -> Counter[str]:
    """How often each slice was published, by message id."""
    return Counter(one.message_id for one in sim.published(TaskSlice))


@pytest.mark.parametrize("how", ["deleted", "purged"])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("name", "lane"), [("tasks.train", "train"), ("tasks.eval", "eval")])
def test_lost_slices_are_sent_again(tmp_path: Path, how: str, restarted: bool, name: str, lane: str) -> None:
    startup = f"explorer.eval_on_startup={str(lane == 'eval').lower()}"
    sim = Simulation(tmp_path, (*SETTINGS, startup), batches=BATCHES)
    took: list[float] = []
    statuses: list[ExplorerStatus] = []

    def waits() -> bool:
        return bool(sim.waiting_in(name)) and all(ticket.published for ticket in sim.state().tickets.values())

    async def runners() -> None:
        await until(waits)
        assert await empty(sim, name, how) > 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        runner = loop.create_task(make_runner(sim).run())
        await until(lambda: sim.explorer.detail().resent > 0)
        took.append(loop.time() - began)
        statuses.append(sim.explorer.detail())
        await runner

    explorer = (lambda: killed_when(waits, sim.make_explorer)) if restarted else None
    run_virtually(sim.run(explorer=explorer, runners=runners), limit=5000)
    assert sim.state().finished
    assert sim.state().closed == BATCHES
    assert LOST_AFTER <= took[0] <= TENS_OF_SECONDS
    assert f"neither in the queue {sim.topology.prefix}{name} nor at a runner" in statuses[0].lost
    assert losses(sim).last == ""
    assert max(sent(sim).values()) == 2
    assert sum(value for _, value in sim.values("rollout/resent_slices")) == (
        0 if lane == "eval" else statuses[0].resent
    )


def test_slices_that_wait_for_a_runner_are_sent_once(tmp_path: Path) -> None:
    """All of them are in the queue, for longer than any patience; another slot is taken by a slow one meanwhile."""
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)

    class Slow(SayingRunner):
        """It takes nothing for long."""

    async def idle(bus: object, topology: object) -> None:
        await asyncio.sleep(LONG)
        await sim.runner(bus, topology)  # type: ignore[arg-type]

    async def runners() -> None:
        await Slow(sim.config, bus=sim.bus(), topology=sim.topology, agent_id="runner-0", work=idle).run()

    run_virtually(sim.run(runners=runners), limit=5000)
    assert sim.state().finished
    assert set(sent(sim).values()) == {1}
    assert losses(sim).resent == 0


@pytest.mark.parametrize("holds", [None, "all"], ids=["an old release", "it has them"])
def test_slices_that_a_runner_has_or_may_have_are_not_sent_again(tmp_path: Path, holds: str | None) -> None:
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)
    sim.runner_seconds = lambda task_slice: LONG if task_slice.batch == 1 else 0.1

    class Busy(SayingRunner):
        def detail(self) -> RunnerStatus:
            slices = [(one.task_id, one.run_base) for one in sim.published(TaskSlice) if one.batch == 1]
            tickets = {one.ticket for one in sim.published(TaskSlice) if one.batch == 1}
            return RunnerStatus(running=len(slices), holds=None if holds is None else dict.fromkeys(tickets, slices))

    async def runners() -> None:
        await Busy(sim.config, bus=sim.bus(), topology=sim.topology, agent_id="runner-0", work=sim.runner).run()

    run_virtually(sim.run(runners=runners), limit=5000)
    assert sim.state().finished
    assert set(sent(sim).values()) == {1}


@pytest.mark.parametrize("how", ["deleted", "purged"])
def test_a_lost_manifest_is_published_again(tmp_path: Path, how: str) -> None:
    sim = Simulation(tmp_path, (*SETTINGS, "explorer.operator_deadline=300"), batches=BATCHES)
    sim.operators = 0
    took: list[float] = []

    async def operators() -> None:
        await until(lambda: bool(sim.waiting_in("closed")))
        assert await empty(sim, "closed", how) > 0
        loop = asyncio.get_running_loop()
        began, before = loop.time(), len(sim.published(BatchClosed))
        operator = loop.create_task(sim.make_operator().run())
        await until(lambda: len(sim.published(BatchClosed)) > before)
        took.append(loop.time() - began)
        await operator

    run_virtually(sim.run(beside=operators), limit=5000)
    assert sim.state().finished
    assert took[0] <= MANIFEST_LOST_AFTER + 10.0
    assert max(Counter(one.ticket for one in sim.published(BatchClosed)).values()) == 2


def test_slices_published_to_a_queue_that_is_gone_are_not_lost(tmp_path: Path) -> None:
    """The queue is deleted while nothing is in it, and nobody has made it again when the next batch is opened."""
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)

    async def explorer() -> None:
        client = await sim.client()
        await client.delete(sim.topology.tasks_train.name)
        await client.close()
        await sim.make_explorer().run()

    run_virtually(sim.run(explorer=explorer), limit=3000)
    assert set(sent(sim).values()) == {1}


# -- slices count as lost only where no queue can hold them and no runner has them (dispatch/loss_repair.py)


def names(count: int, ticket: str = "t") -> list[SliceName]:
    return [(ticket, task, 0) for task in range(count)]


def first_loss(
    looks: LostSlices, waiting: list[SliceName], capacity: int, *, begin: float = 0.0, seconds: float = 300.0
) -> tuple[float, list[SliceName]]:
    """Look while nothing changes; return when slices were found to be lost, and which; infinity: none were."""
    now = begin
    while now <= begin + seconds:
        if lost := looks.look(now, waiting, capacity):
            return now - begin, lost
        now += LOOK_SECONDS
    return float("inf"), []


def test_of_a_queue_that_holds_some_the_oldest_are_lost() -> None:
    looks = LostSlices()
    looks.look(0.0, names(4, "old"), 4)
    _, lost = first_loss(looks, [*names(6, "new"), *names(4, "old")], 6, begin=LOOK_SECONDS)
    assert lost == names(4, "old")


def test_one_look_at_which_a_queue_seems_empty_is_no_evidence() -> None:
    looks, now = LostSlices(), 0.0
    for number in range(200):
        assert looks.look(now, names(5), 0 if number % 5 == 0 else 5) == []
        now += LOOK_SECONDS


def test_nothing_is_lost_in_the_first_seconds_after_an_outage() -> None:
    looks = LostSlices()
    for number in range(5):
        looks.look(number * LOOK_SECONDS, names(5), 0)
    looks.reset()
    seconds, _ = first_loss(looks, names(5), 0, begin=20.0)
    assert seconds >= LOST_AFTER


def test_the_patience_doubles_with_each_time_and_is_bounded() -> None:
    looks, waits, now = LostSlices(), list[float](), 0.0
    for _ in range(7):
        seconds, lost = first_loss(looks, names(2), 0, begin=now)
        waits.append(seconds)
        looks.sent_again(lost)
        now += seconds + LOOK_SECONDS
    assert waits == [15.0, 30.0, 60.0, 120.0, 240.0, 240.0, 240.0]
    assert waits[-1] == LONGEST_PATIENCE
    looks.keep(())
    assert first_loss(looks, names(2), 0, begin=now + 1000)[0] == LOST_AFTER


@pytest.mark.parametrize("seed", range(40))
def test_a_busy_queue_loses_nothing_whatever_the_looks_miss(seed: int) -> None:
    """Slices stream through a queue; looks see heartbeats, results and the queue at moments of their own."""
    draw = random.Random(seed)
    looks, queue, done = LostSlices(), list[SliceName](), set[SliceName]()
    taken: dict[SliceName, float] = {}
    published = list[SliceName]()
    slots, duration = draw.choice([1, 8, 64]), draw.choice([0.1, 1.0, 5.0, 30.0])
    heard: list[tuple[float, set[SliceName]]] = [(0.0, set())]
    for tick in range(3000):
        now = tick * 0.1
        if len(queue) < 200 and draw.random() < 0.1:
            fresh = [("t", len(published) + n, 0) for n in range(draw.randint(1, 60))]
            published += fresh
            queue += fresh
        for name, since in list(taken.items()):
            if now - since >= duration:
                done.add(name)
                del taken[name]
        while queue and len(taken) < slots:
            taken[queue.pop(0)] = now
        if tick % 20 == 0:
            heard.append((now, set(taken)))
        if tick % 25 == 0:
            depth = len(queue)
            held = next(slices for at, slices in reversed(heard) if at <= now - draw.uniform(0.0, 0.2) or at == 0.0)
            waiting = [name for name in published if name not in done and name not in held]
            assert looks.look(now, waiting, depth) == []
    assert len(done) > 5


# -- what a check sends again (dispatch/loss_repair.py)


class Checks:
    """Checks of an empty queue. Its tickets are open, and a runner says that it has none of their slices."""

    def __init__(self, *tickets: str) -> None:
        self.tickets: dict[str, Ticket] = {}
        for name in tickets:
            how: dict[str, Any] = {"deliver": "none", "lane": "train", "time_left": 9.0, "published": True}
            self.tickets[name] = new_ticket(1, [TaskBody(workflow="x")], ticket=name, **how)
        detail = {"holds": {}}
        self.runners = [Heartbeat(role="runner", id="r", seq=1, incarnation="x", lease=10, state="idle", detail=detail)]
        self.sent: list[tuple[float, str]] = []

    async def publish_again(self, ticket: Ticket, slices: Sequence[SliceState]) -> None:
        self.sent.append((asyncio.get_running_loop().time(), ticket.ticket))

    async def read_to_end(self) -> None:
        pass

    def run(self, seconds: float) -> list[tuple[float, str]]:
        async def main() -> None:
            world = World()
            await world.ready()
            losses = LossRepair(
                world.outside,
                world.topology,
                self.tickets,
                runners=lambda: self.runners,
                holders=lambda: self.runners,
                read_to_end=self.read_to_end,
                publish_again=self.publish_again,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(losses.run(), seconds)

        run_virtually(main(), limit=1000)
        return self.sent


def test_a_ticket_that_closes_while_another_ones_slices_are_sent_gets_none() -> None:
    class SecondCloses(Checks):
        async def publish_again(self, ticket: Ticket, slices: Sequence[SliceState]) -> None:
            await super().publish_again(ticket, slices)
            if closed := self.tickets.pop("second", None):
                closed.cancel_rest("it closes")

    assert [ticket for _, ticket in SecondCloses("first", "second").run(LOST_AFTER + 5)] == ["first"]


def test_a_check_that_sends_nothing_again_does_not_double_the_patience() -> None:
    class FallsSilent(Checks):
        fell = False

        async def read_to_end(self) -> None:
            if not self.fell:
                beats, self.runners, self.fell = self.runners, [], True
                asyncio.get_running_loop().call_later(0.1, self.runners.extend, beats)

    assert [at for at, _ in FallsSilent("first").run(2 * LOST_AFTER + 10)] == [
        pytest.approx(2 * (LOOK_SECONDS + LOST_AFTER), abs=0.1)
    ]
