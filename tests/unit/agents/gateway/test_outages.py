"""Sessions over outages: gateways that were away or frozen, queues that are full or purged, time that nobody had."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.agents.gateway.world import (
    HOUR,
    RUN,
    SMALL,
    World,
    config,
    end,
    live_on,
    reaches,
    session_of,
    state,
    until,
)
from trinity_agents.gateway.agent import Gateway
from trinity_agents.gateway.session_stream import SessionStream
from trinity_agents.gateway.submissions import RESUBMIT_SECONDS
from trinity_mq.bus import BusUnavailable, Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.topology import BY_GATEWAY
from trinity_mq.gateway.agenda import _task
from trinity_mq.gateway.session import Session
from trinity_mq.gateway.session_store import SessionsUnavailable
from trinity_mq.messages import SessionEnd, SessionReward, SubmissionOutcome
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import VirtualTimeLoop

LOOP = VirtualTimeLoop

GROUP: dict[str, Any] = {"group": "g", "group_size": 2}


def queued(world: World) -> list[str]:
    messages = world.broker.queues[world.topology.submitted.name].messages  # type: ignore[attr-defined]
    return [str(message.message_id) for message in messages]


# -- gateways that were away


async def test_a_gateway_that_is_back_after_retention_builds_its_sessions_anew() -> None:
    world, second_bus = World(sessions_max_bytes=SMALL), None
    async with world.running():
        second_bus = world.bus()
        async with world.gateway(acts=False, bus=second_bus) as second:
            async with world.gateway() as first:
                await world.session(first, "s1", **GROUP)
                await end(first, "s1")
                await world.session(first, "stays", idle_ttl=9 * HOUR)
                await until(second, lambda: second.ledger.get("stays") is not None)
                world.broker.drop(second_bus, delay=None)
                await world.session(first, "s2", **GROUP)
                await end(first, "s2")
                await reaches(first, "s2", "trained")
                await live_on(world, first)
                world.broker.restore(second_bus)
                await until(second, lambda: not second.is_ready())
                await until(second, second.is_ready)
                assert set(second.ledger.live) == {"stays"}
                lost = session_of(second, "s1")
                assert "retention" in lost.why
                assert (await second.report(SessionReward(session="s1", reward=9.0), "late")).taken == "refused"
            task = asyncio.create_task(world.acting(second_bus, second, agent_id="gateway-1").run())
            await world.session(second, "s3", **GROUP)
            await end(second, "s3", 0.5)
            await asyncio.sleep(60)
            task.cancel()
            assert state(second, "s3") == "parked"
    records = [message.task.raw_task["sessions"] for message in world.accepted.values()]
    assert [[session["id"] for session in record] for record in records] == [["s1", "s2"]]


async def test_a_gateway_decides_nothing_while_it_builds_its_sessions_anew() -> None:
    world, reads = World(), [False]

    class Reading(SessionStream):
        def is_ready(self) -> bool:
            return not reads[0] and super().is_ready()

    bus = world.bus()
    async with world.running(), world.gateway(acts=False, bus=bus, kind=Reading) as store:
        await world.session(store, "a")
        await end(store, "a")
        acting = world.acting(bus, store)
        reads[0] = True
        await acting.once()
        assert state(store, "a") == "parked"
        reads[0] = False
        await acting.once()
        assert state(store, "a") == "queued"


async def test_a_frozen_gateway_does_not_bring_back_what_was_settled_meanwhile() -> None:
    world = World(sessions_max_bytes=SMALL)
    bus = world.bus()

    def events() -> list[Any]:
        return list(world.broker.queues[world.topology.sessions.name].messages)  # type: ignore[attr-defined]

    async with world.running(), world.gateway() as first, world.gateway(acts=False, bus=bus) as frozen:
        await world.session(first, "a")
        await until(frozen, lambda: frozen.ledger.get("a") is not None)
        holds = [False]  # its connection is lost: it learns so when it publishes its mark
        acting = world.acting(bus, frozen, agent_id="frozen", may_act=lambda: holds[0])
        frozen.position += SMALL
        published = len(events())
        await acting.once()
        assert {message.headers["kind"] for message in events()[published:]} == {"mark"}
        holds[0] = True
        await acting.once()
        repeated = [message.message_id for message in events()[published:] if message.headers["kind"] != "mark"]
        assert repeated == ["opened-a", "call-a-call-0"]


# -- submissions


async def test_a_task_waits_in_the_queue_once_however_long_training_is_behind() -> None:
    world = World()
    bus = world.bus()
    await bus.connect()
    await bus.declare(*world.topology.durable, world.topology.sessions)
    async with world.gateway() as store:
        for number in range(20):
            await world.session(store, f"s{number}")
            await end(store, f"s{number}")
        await asyncio.sleep(12 * HOUR)
        assert len(queued(world)) == len(set(queued(world))) == 20
    for _ in range(5):  # gateways come and go meanwhile
        async with world.gateway():
            await asyncio.sleep(2 * RESUBMIT_SECONDS)
    assert len(queued(world)) == len(set(queued(world))) == 20
    await bus.close()


@pytest.mark.parametrize("deleted", [False, True])
async def test_tasks_whose_queue_was_emptied_are_submitted_again(deleted: bool) -> None:
    world = World()
    bus = world.bus()
    await bus.connect()
    await bus.declare(*world.topology.durable, world.topology.sessions)
    async with world.gateway() as store:
        for number in range(5):
            await world.session(store, f"s{number}")
            await end(store, f"s{number}")
        await until(store, lambda: store.ledger.waiting == 5)
        await asyncio.sleep(10)
        before = queued(world)
        if deleted:
            world.broker.delete(world.topology.submitted.name)
        else:
            world.broker.queues[world.topology.submitted.name].purge()  # type: ignore[attr-defined]
        await asyncio.sleep(2 * RESUBMIT_SECONDS)
        assert sorted(queued(world)) == sorted(before)
    await bus.close()


class FullBus(MemoryBus):
    """A bus whose broker takes no submissions."""

    is_full = True
    refused = 0

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        if routing_key == BY_GATEWAY and self.is_full:
            self.refused += 1
            await asyncio.sleep(timeout or 300.0)
            raise BusUnavailable("not confirmed in time: the queue is full")
        return await super().publish(exchange, routing_key, envelope, timeout=timeout)


async def test_a_full_queue_holds_nothing_else_up() -> None:
    world = World()
    bus: FullBus = world.bus(FullBus)
    async with world.running(), world.gateway(bus=bus) as store:
        await world.session(store, "a")
        await end(store, "a")
        await until(store, lambda: bus.refused == 1)
        await world.session(store, "b", record="eval")
        await end(store, "b")
        await reaches(store, "b", "evaluated", 30)
        await asyncio.sleep(300)
        assert 5 < bus.refused < 20
        bus.is_full = False
        await reaches(store, "a", "trained")


# -- retention


async def test_the_outcome_of_a_batch_outlives_the_retention_of_the_stream() -> None:
    world = World(sessions_max_bytes=SMALL)
    world.answers = False
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a")
        await end(store, "a")
        await until(store, lambda: len(world.accepted) == 1)
        (message,) = world.accepted.values()
        outcome = SubmissionOutcome(
            submission_id=message.submission_id or "", batch=1, ticket="t", outcome="finished", completed_runs=1
        )
        await bus.publish(world.topology.exchange("sessions"), "outcome", envelope(outcome, message_id="o"))
        await reaches(store, "a", "batched")
        await live_on(world, store)
        async with world.gateway(acts=False) as fresh:
            assert state(fresh, "a") == "batched"
            assert session_of(fresh, "a").batch == outcome


# -- time


async def test_limits_of_time_stand_still_while_the_broker_is_away() -> None:
    world = World()
    bus = world.bus()
    async with world.running(), world.gateway(bus=bus) as store:
        await world.session(store, "asks")
        await world.session(store, "waits", reward_ttl=HOUR)
        await end(store, "waits", None)
        world.broker.drop(bus, delay=None)
        for _ in range(65):
            await asyncio.sleep(60)
            await store.record(world.call("asks", 2))
        with pytest.raises(SessionsUnavailable):
            await store.report(SessionReward(session="waits", reward=1.0), "r")
        world.broker.restore(bus)
        await asyncio.sleep(60)
        assert (state(store, "asks"), state(store, "waits")) == ("open", "parked")
        await reaches(store, "waits", "dropped", HOUR)


async def test_limits_of_time_stand_still_while_no_gateway_runs() -> None:
    world = World()
    async with world.running():
        async with world.gateway() as store:
            await world.session(store, "a", reward_ttl=10 * HOUR)
            await end(store, "a", None)
            await asyncio.sleep(4 * HOUR)
        await asyncio.sleep(60 * HOUR)
        async with world.gateway() as store:
            await asyncio.sleep(5 * HOUR)
            assert state(store, "a") == "parked"
        await asyncio.sleep(60 * HOUR)
        async with world.gateway() as store:
            await asyncio.sleep(0.5 * HOUR)
            assert state(store, "a") == "parked"
            await reaches(store, "a", "dropped", HOUR)


async def test_limits_of_time_stand_still_while_the_acting_gateway_is_frozen() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        world.ahead = 2 * HOUR
        await asyncio.sleep(10)
        assert state(store, "a") == "open"


async def test_what_is_carried_is_as_old_as_it_was() -> None:
    world = World(sessions_max_bytes=SMALL)
    async with world.running():
        async with world.gateway() as store:
            await world.session(store, "a", reward_ttl=5 * HOUR)
            await end(store, "a", None)
            await asyncio.sleep(2 * HOUR)
        await asyncio.sleep(60 * HOUR)
        async with world.gateway() as store:
            await live_on(world, store)
        async with world.gateway() as store:
            await asyncio.sleep(2.5 * HOUR)
            assert state(store, "a") == "parked"
            await reaches(store, "a", "dropped", HOUR)


async def test_times_are_whole_seconds_for_release_0_1_0_and_exact_for_us() -> None:
    world = World()
    async with world.running() as bus, world.gateway(acts=False) as store:
        await asyncio.sleep(0.75)
        await world.session(store, "a", calls=0)
        stream = world.broker.queues[world.topology.sessions.name].messages  # type: ignore[attr-defined]
        headers = stream[-1].headers
        exact = headers["at-ms"]
        assert isinstance(exact, int)
        assert exact / 1000 == pytest.approx(world.clock(), abs=0.5)
        assert headers["at"] == round(exact / 1000)
        assert type(headers["at"]) is int
        session = session_of(store, "a")
        assert session.last_at == exact / 1000
        old = envelope(SessionEnd(session="a"), message_id="end-a", headers={"at": 1e9 + 7.5})
        await bus.publish(world.topology.exchange("sessions"), "event", old)
        await until(store, lambda: session.end is not None)
        assert session.ended_at == 1e9 + 7.5


# -- what others send


async def reward(bus: Any, world: World, message_id: str = "", **body: Any) -> None:
    raw = json.dumps(body).encode()
    given: dict[str, Any] = {"message_id": message_id} if message_id else {}
    message = Envelope(body=raw, kind="session_reward", content_type="application/json", **given)
    await bus.publish(world.topology.exchange("sessions"), "session", message)


async def test_refused_rewards_become_dead_letters_once() -> None:
    world = World()
    async with world.running() as bus:
        async with world.gateway() as store:
            await world.session(store, "s1")
            await world.session(store, "s2")
            await reward(bus, world, "first", session="s1", reward=1.0, final=True)
            await reaches(store, "s1", "trained")
            await reward(bus, world, "late", session="s1", reward=-1.0)
            await reward(bus, world, "first", session="s1", reward=1.0)  # its confirm was lost
            await reward(bus, world, "typo", session="s2", reward=1.0, call="chatcmpl-typo")
            await reward(bus, world, "nobody", session="s3", reward=1.0)
            await asyncio.sleep(30)
        async with world.gateway() as store:
            await asyncio.sleep(30)
        assert sorted(reason[:23] for reason in world.dead) == [
            "no session 's3' is know",
            "session s1 is trained i",
            "session s2 has no call ",
        ]


@pytest.mark.parametrize("taken", ["decided", "end-a-idle", "opened-b", "call", "end-a"])
async def test_the_id_of_an_outsiders_message_blocks_nothing_of_ours(taken: str) -> None:
    world = World()
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a", idle_ttl=60.0)
        call = world.call("a", 2)
        ids = {"decided": f"decided-{_task([Session('a')]).submission}", "call": call.message_id}
        await reward(bus, world, ids.get(taken, taken), session="a", reward=0.5)
        await until(store, lambda: store.ledger.live["a"].has_reward)
        assert await store.record(call)
        await until(store, lambda: len(store.ledger.live["a"].calls) == 2)
        await world.session(store, "b")
        if taken == "end-a":
            await end(store, "a", None)
        await reaches(store, "a", "trained", 120)
        assert state(store, "b") == "open"


async def test_an_outsiders_reward_that_was_carried_counts_once() -> None:
    world = World(sessions_max_bytes=SMALL)
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a")
        await reward(bus, world, "r", session="a", reward=1.0, how="add")
        await reward(bus, world, session="a", reward=1.0, how="add")
        await live_on(world, store)
        async with world.gateway(acts=False) as fresh:
            await reward(bus, world, "r", session="a", reward=1.0, how="add")
            await end(store, "a", None)
            for one in (store, fresh):
                await reaches(one, "a", "trained")
                assert session_of(one, "a").reward == 2.0


# -- memory


async def test_answers_that_wait_for_the_broker_are_bounded() -> None:
    world = World(config())
    own = world.bus()
    async with world.running() as bus, world.gateway(acts=False, bus=own) as first:
        await world.session(first, "a")
        async with asyncio.TaskGroup() as group:
            store = world.stream(own, group, most_unconfirmed=100_000)
            world.broker.block()
            for _ in range(200):
                assert not await store.record(world.call("a", 100))
            await asyncio.sleep(0)
            waiting = sum(task.get_name() == "record call" for task in asyncio.all_tasks())
            assert 10 < waiting < 25
            world.broker.unblock()
            await until(first, lambda: len(first.ledger.live["a"].calls) == 1 + waiting)
            assert await store.record(world.call("a", 100))
        assert bus.usable


async def test_a_gateway_that_is_ending_says_of_an_answer_that_it_is_not_recorded() -> None:
    world = World(config())
    bus = world.bus()
    async with world.running(), world.gateway(acts=False, bus=bus) as first:
        await world.session(first, "a")
        async with asyncio.TaskGroup() as group:
            store = world.stream(bus, group, most_unconfirmed=1000)
        for _ in range(20):
            assert not await store.record(world.call("a", 2))
        assert len(first.ledger.live["a"].calls) == 1


# -- one gateway acts


async def holds(agent: Gateway, acts: bool) -> None:
    async with asyncio.timeout(30):
        while not (agent.detail().url and agent.detail().acting == acts):  # noqa: ASYNC110  # as heartbeats do
            await asyncio.sleep(0.01)


def test_a_gateway_acts_only_while_no_other_one_holds_the_lock() -> None:
    async def main() -> None:
        broker, topology, settings = MemoryBroker(), Topology(RUN), config(port=0)
        other, bus = (MemoryBus(broker, topology, config=settings.broker) for _ in range(2))
        await other.connect()
        await other.declare(*topology.durable, topology.sessions)
        lock = await other.lock(topology.lock("gateway"))
        bus.run_id = "run-of-the-world"
        agent = Gateway(settings, bus=bus, topology=topology)
        running = asyncio.create_task(agent.run())
        try:
            await holds(agent, acts=False)
            for _ in range(100):  # nobody says when it does not act
                await asyncio.sleep(0)
            assert not agent.detail().acting
            await lock.release()
            await holds(agent, acts=True)
            agent.drain()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await other.close()

    asyncio.run(main())


async def test_sessions_that_wait_outlive_the_retention_of_the_stream() -> None:
    """What is carried over it says where its first copy was. Readers order events by it: of two rewards the later one
    counts, whichever was carried.
    """
    first: dict[str, int] = {}
    copies: list[tuple[str, object]] = []

    async def read(world: World) -> None:
        bus = world.bus()
        await bus.connect()
        async with await bus.consume(world.topology.sessions, offset=0) as feed:
            async for delivery in feed:
                name = str(delivery.message_id)
                if first.setdefault(name, delivery.offset or 0) != delivery.offset:
                    copies.append((name, delivery.headers.get("origin")))

    world = World(sessions_max_bytes=SMALL)
    async with world.running(), world.gateway() as store:
        reading = asyncio.create_task(read(world))
        await world.session(store, "old", calls=3)
        await store.report(SessionReward(session="old", reward=0.5), "r-old")
        await store.report(SessionReward(session="old", reward=0.25, how="add"), "r2-old")
        await live_on(world, store)
        reading.cancel()
        assert store.position > 2 * SMALL
        async with world.gateway(acts=False) as fresh:
            session, before = session_of(fresh, "old"), session_of(store, "old")
            assert (session.state, session.reward, list(session.calls)) == ("open", 0.75, list(before.calls))
            await end(store, "old", None)
            await reaches(fresh, "old", "trained")
    carried = [(name, origin) for name, origin in copies if "old" in name or name.startswith("call-")]
    assert {"r-old", "r2-old"} <= {name for name, _ in carried}
    assert all(origin == first[name] for name, origin in carried), carried
