"""Users with exactly the permissions that are documented: what they can do, and that it ends at their own run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import aiormq
import pytest

from tests.broker_fixtures import Users, connected, delete_run, note
from tests.security_tables import rows
from trinity_mq.bus.base import Bus, BusRefused
from trinity_mq.bus.permissions import ROLES, Role, permissions
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import BY_GATEWAY, SUBMIT, Queue, Topology
from trinity_mq.messages import BatchReady, encode

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
async def others(bus: RabbitBus, topology: Topology) -> AsyncIterator[Bus]:
    """Another run, as its own agents made it."""
    batch_queue = topology.batch_queue(1, "t" * 32)
    await bus.declare(*topology.durable, batch_queue)
    yield bus
    await bus.delete(batch_queue.name)


OPERATIONS: dict[str, Callable[[Bus, Topology], Awaitable[object]]] = {
    "consume": lambda bus, run: bus.consume(run.tasks_train),
    "read a stream": lambda bus, run: bus.consume(run.ready, offset=0),
    "publish a slice": lambda bus, run: bus.publish(run.exchange("tasks"), "train.1", note("x")),
    "publish into a queue": lambda bus, run: bus.publish("", run.closed.name, note("x")),
    "delete": lambda bus, run: bus.delete(run.dead.name),
    "declare": lambda bus, run: bus.declare(run.batch_queue(2, "n" * 32)),
    "listen": lambda bus, run: bus.declare(run.listener("spy", "1", "telemetry", "#")),
    "unbind": lambda bus, run: bus.unbind(run.batch_queue(1, "t" * 32)),
    "lock": lambda bus, run: bus.lock("trainer"),
}


async def test_an_agent_of_another_run_is_refused(users: Users, others: Bus, topology: Topology) -> None:
    """At once, in one line, and neither the run that was tried nor the agent's own work suffers."""
    mine = Topology(f"{topology.run}-x")  # begins with the other run's name
    url = await users.make(mine.run, permissions(mine.run, "agent"))
    for what, operation in OPERATIONS.items():
        # its exchanges are looked for: that needs no permission
        async with connected(url, topology) as intruder, asyncio.timeout(8):
            reason = await refused(operation(intruder, topology))
        assert "\n" not in reason, what
        assert f"refused for user '{mine.run}'" in reason, what
        assert "trinity-mq broker permissions" in reason, what
    for queue in topology.durable:
        assert await others.depth(queue.name) == 0
    async with connected(url, mine) as own:
        await own.declare(*mine.durable)
        assert await own.publish(mine.exchange("dead"), "k", note("mine"))
    await delete_run(users.url, mine)


async def test_a_refused_publish_takes_no_other_along(users: Users, topology: Topology) -> None:
    """The broker closes the channel for one; what else is under way on it is repeated and confirmed."""
    url = await users.make(topology.run, permissions(topology.run, "agent"))
    async with connected(url, topology) as bus, asyncio.timeout(30):
        await bus.declare(topology.dead)
        async with asyncio.TaskGroup() as group:
            good = [group.create_task(bus.publish(topology.exchange("dead"), "k", note(n))) for n in range(200)]
            bad = group.create_task(refused(bus.publish("", topology.dead.name, note("reply"))))
            good += [group.create_task(bus.publish(topology.exchange("dead"), "k", note(n))) for n in range(200)]
    assert all(task.result() for task in good)
    assert "amq.default" in bad.result()


async def refused(work: Awaitable[object]) -> str:
    with pytest.raises(BusRefused) as found:
        await work
    return str(found.value)


async def test_a_run_that_is_not_there_is_said_to_be_so(users: Users, topology: Topology) -> None:
    url = await users.make(topology.run, permissions(topology.run, "reader"))
    with pytest.raises(BusRefused, match=f"run '{topology.run}' is not on the broker .start the agents that make it"):
        async with connected(url, topology):
            pass


async def test_a_run_that_taps_another_reads_its_stream_and_nothing_else(
    users: Users, others: Bus, topology: Topology
) -> None:
    mine = Topology(f"{topology.run}-y")
    url = await users.make(mine.run, permissions(mine.run, "agent", taps=topology.run))
    ready, stream = topology.exchange("ready"), replace(topology.ready, redeclare=False)
    assert await others.publish(ready, "1", note("a batch"))
    async with connected(url, topology) as bus, connected(url, mine) as own:
        await own.declare(*mine.durable)
        assert await own.publish(mine.exchange("ready"), "1", note("a batch of mine"))
        assert await bus.publish(ready, "mark", note("mark"))
        async with asyncio.timeout(10), await bus.consume(stream, offset=0) as feed:
            assert [(await anext(feed)).body for _ in range(2)] == [b"a batch", b"mark"]
        await refused(bus.publish(ready, "17", note("a batch")))
        await refused(bus.publish(topology.exchange("dead"), "k", note("x")))
        await refused(bus.consume(topology.closed))
        await refused(bus.delete(topology.ready.name))
    await delete_run(users.url, mine)


async def test_runners_take_nothing_that_a_submitter_has_the_broker_route_to_them(
    users: Users, others: Bus, topology: Topology
) -> None:
    """RabbitMQ routes by these headers too. Release 4 checks the permission for them, and release 3 does not."""
    url = await users.make(topology.run, permissions(topology.run, "submitter"))
    routed = 0
    async with aiormq.connect(url) as connection:
        for header in ("CC", "BCC"):
            channel = await connection.channel()
            properties = aiormq.spec.Basic.Properties(headers={header: ["train.1"]})
            with contextlib.suppress(aiormq.exceptions.ChannelAccessRefused):
                await channel.basic_publish(
                    b"forged", exchange=topology.exchange("tasks"), routing_key="submit", properties=properties
                )
                routed += 1
    assert routed in {0, 2}
    assert await others.depth(topology.tasks_train.name) == routed
    assert await others.publish(topology.exchange("tasks"), "train.1", note("slice"))
    async with asyncio.timeout(10), await others.consume(topology.tasks_train, prefetch=9) as slices:
        assert (await anext(slices)).body == b"slice"
    async with asyncio.timeout(10), await others.consume(topology.dead) as letters:
        assert [(await anext(letters)).body for _ in range(routed)] == [b"forged"] * routed


async def test_trainers_take_nothing_but_marks_of_a_reader(users: Users, others: Bus, topology: Topology) -> None:
    """Neither another message with the routing key of marks, nor one by way of an exchange of its own."""
    url = await users.make(topology.run, permissions(topology.run, "reader"))
    forged = encode(BatchReady(batch=1, ticket="t" * 32, op="a" * 16, chunks=0, experiences=0))
    async with aiormq.connect(url) as connection:
        channel = await connection.channel()
        ready, own = topology.exchange("ready"), f"{topology.prefix}telemetry.mine"
        await channel.basic_publish(forged, exchange=ready, routing_key="mark")
        await channel.exchange_declare(own, exchange_type="topic", auto_delete=True)
        await channel.exchange_bind(destination=ready, source=own, routing_key="#")
        await channel.basic_publish(forged, exchange=own, routing_key="1")
        assert await others.publish(ready, "1", note("a batch"))
        async with asyncio.timeout(10), await others.consume(topology.ready, offset=0) as feed:
            delivery = await anext(feed)
            assert (delivery.body, delivery.offset) == (b"a batch", 2)


Operation = Callable[[Bus, Topology], Awaitable[object]]


def publishing(exchange: str, key: str) -> Operation:
    return lambda bus, run: bus.publish(run.exchange(exchange), key, note("x"))


def reading(queue: Callable[[Topology], Queue], offset: int | None = None) -> Operation:
    return lambda bus, run: bus.consume(replace(queue(run), redeclare=False), offset=offset)


TABLE: dict[str, Operation] = {
    "submit a task": publishing("tasks", SUBMIT),
    "submit recorded sessions, as a gateway": publishing("tasks", BY_GATEWAY),
    "receive outcomes in a reply queue": lambda bus, run: bus.declare(run.listener("submit", "1", "replies")),
    "publish into a queue by its name": lambda bus, run: bus.publish("", run.closed.name, note("x")),
    "hand a slice to runners": publishing("tasks", "train.1"),
    "take submitted tasks": reading(lambda run: run.submitted),
    "reward or end a session": publishing("sessions", "session"),
    "write a session's answers, as a gateway": publishing("sessions", "event"),
    "read sessions": reading(lambda run: run.sessions, 0),
    "give a verdict": publishing("review", "verdict"),
    "ask for a review": publishing("review", "request"),
    "read reviews": reading(lambda run: run.review, 0),
    "read processed batches": reading(lambda run: run.ready, 0),
    "publish a processed batch": publishing("ready", "17"),
    "read dead letters": reading(lambda run: run.dead),
    "read heartbeats": lambda bus, run: bus.declare(run.listener("look", "1", "telemetry", "beat.#")),
    "restart an agent": publishing("control", "restart.runner-0"),
    "delete a queue": lambda bus, run: bus.delete(run.tasks_eval.name),
}
"""The operations of the table in docs/security.md."""


def test_the_table_of_users_has_each_role_and_operation() -> None:
    columns, *lines = rows("Users of the broker")
    assert columns == ["operation", *ROLES]
    assert [line[0] for line in lines] == list(TABLE)


@pytest.mark.parametrize("role", ROLES)
async def test_each_user_may_do_what_the_table_says(users: Users, others: Bus, topology: Topology, role: Role) -> None:
    await others.declare(topology.sessions, topology.review)
    columns, *lines = rows("Users of the broker")
    written = {line[0]: line[columns.index(role)] for line in lines}
    url = await users.make_by_commands(f"{topology.run}-{role}", permissions(topology.run, role))
    tried = {}
    async with connected(url, topology) as bus:
        for name, operation in TABLE.items():
            tried[name] = "yes"
            try:
                async with asyncio.timeout(10):
                    await operation(bus, topology)
            except BusRefused:
                tried[name] = "no"
    assert tried == written
