"""Users with exactly the permissions that are documented: what they can do, and that it ends at their own run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiormq
import pytest

from tests.broker_fixtures import own_node
from tests.processes import command
from tests.security_tables import rows
from trinity_mq.bus.base import Bus, BusRefused
from trinity_mq.bus.permissions import ROLES, Permissions, Role, permissions, rabbitmqctl_lines
from trinity_mq.bus.properties import Envelope
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import BY_GATEWAY, SUBMIT, Queue, Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.messages import BatchReady, encode
from trinity_mq.testing.runs import LocalRun

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = '{"raw_task": {"question": "3,7,2=", "answer": "7"}}'


@pytest.fixture(scope="module")
def node() -> Iterator[PrivateNode]:
    with own_node() as made:
        yield made


async def user(node: PrivateNode, name: str, wanted: Permissions) -> str:
    """Make a user with the commands that are printed for one, and return its URL."""
    await node.ctl("add_user", name, f"{name}-password")
    for line in rabbitmqctl_lines(name, "/", wanted):
        command, *words = shlex.split(line)
        assert command == "rabbitmqctl"
        await node.ctl(*words)
    place = urlsplit(node.url)
    return f"amqp://{name}:{name}-password@{place.hostname}:{place.port}/%2F"


async def bus_of(url: str, topology: Topology) -> RabbitBus:
    bus = RabbitBus(url, topology, config=BrokerConfig(connect_timeout=10.0), name="test")
    await bus.connect()
    return bus


def note(text: str) -> Envelope:
    return Envelope(body=text.encode(), kind="note")


@pytest.fixture
async def others(node: PrivateNode, topology: Topology) -> AsyncIterator[Bus]:
    """Another run, as its own agents made it."""
    bus = await bus_of(node.url, topology)
    await bus.declare(*topology.durable, topology.batch_queue(1, "t" * 32))
    yield bus
    await bus.close()


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


@pytest.mark.parametrize("what", OPERATIONS)
async def test_an_agent_of_another_run_is_refused(
    node: PrivateNode, others: Bus, topology: Topology, what: str
) -> None:
    """At once, in one line, and neither the run that was tried nor the agent's own work suffers."""
    mine = f"{topology.run}-x"  # begins with the other run's name
    url = await user(node, mine, permissions(mine, "agent"))
    intruder = await bus_of(url, topology)  # its exchanges are looked for: that needs no permission
    try:
        async with asyncio.timeout(8):
            with pytest.raises(BusRefused) as refused:
                await OPERATIONS[what](intruder, topology)
        said = str(refused.value)
        assert "\n" not in said
        assert f"refused for user '{mine}'" in said
        assert "trinity-mq broker permissions" in said
    finally:
        await intruder.close()
    for queue in topology.durable:
        assert await others.depth(queue.name) == 0
    own = await bus_of(url, Topology(mine))
    try:
        await own.declare(*Topology(mine).durable)
        assert await own.publish(Topology(mine).exchange("dead"), "k", note("mine"))
    finally:
        await own.close()


async def test_a_refused_publish_takes_no_other_along(node: PrivateNode, topology: Topology) -> None:
    """The broker closes the channel for one; what else is under way on it is repeated and confirmed."""
    bus = await bus_of(await user(node, topology.run, permissions(topology.run, "agent")), topology)
    try:
        await bus.declare(topology.dead)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            good = [group.create_task(bus.publish(topology.exchange("dead"), "k", note(str(n)))) for n in range(200)]
            bad = group.create_task(refused(bus.publish("", topology.dead.name, note("reply"))))
            good += [group.create_task(bus.publish(topology.exchange("dead"), "k", note(str(n)))) for n in range(200)]
        assert all(task.result() for task in good)
        assert "amq.default" in bad.result()
    finally:
        await bus.close()


async def refused(work: Awaitable[object]) -> str:
    with pytest.raises(BusRefused) as found:
        await work
    return str(found.value)


async def test_a_run_that_is_not_there_is_said_to_be_so(node: PrivateNode, topology: Topology) -> None:
    url = await user(node, topology.run, permissions(topology.run, "reader"))
    said = await refused(bus_of(url, topology))
    assert f"run '{topology.run}' is not on the broker (start the agents that make it first)" in said


async def test_a_run_that_taps_another_reads_its_stream_and_nothing_else(
    node: PrivateNode, others: Bus, topology: Topology
) -> None:
    mine = f"{topology.run}-y"
    url = await user(node, mine, permissions(mine, "agent", taps=topology.run))
    ready, stream = topology.exchange("ready"), dataclasses.replace(topology.ready, redeclare=False)
    assert await others.publish(ready, "1", note("a batch"))
    bus, own = await bus_of(url, topology), await bus_of(url, Topology(mine))
    try:
        await own.declare(*Topology(mine).durable)
        assert await own.publish(Topology(mine).exchange("ready"), "1", note("a batch of mine"))
        assert await bus.publish(ready, "mark", note("mark"))
        async with asyncio.timeout(10), await bus.consume(stream, offset=0) as feed:
            assert [(await anext(feed)).body for _ in range(2)] == [b"a batch", b"mark"]
        await refused(bus.publish(ready, "17", note("a batch")))
        await refused(bus.publish(topology.exchange("dead"), "k", note("x")))
        await refused(bus.consume(topology.closed))
        await refused(bus.delete(topology.ready.name))
    finally:
        await bus.close()
        await own.close()


@pytest.mark.parametrize("header", ["CC", "BCC"])
async def test_runners_take_nothing_that_a_submitter_has_the_broker_route_to_them(
    node: PrivateNode, others: Bus, topology: Topology, header: str
) -> None:
    """The broker checks the routing key of a publish alone, and routes by these headers too."""
    url = await user(node, f"{topology.run}-{header}", permissions(topology.run, "submitter"))
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel()
        properties = aiormq.spec.Basic.Properties(headers={header: ["train.1"]})
        await channel.basic_publish(
            b"forged", exchange=topology.exchange("tasks"), routing_key="submit", properties=properties
        )
        assert await others.depth(topology.tasks_train.name) == 1
        assert await others.publish(topology.exchange("tasks"), "train.1", note("slice"))
        async with asyncio.timeout(10), await others.consume(topology.tasks_train, prefetch=9) as slices:
            assert (await anext(slices)).body == b"slice"
        async with asyncio.timeout(10), await others.consume(topology.dead) as letters:
            assert (await anext(letters)).body == b"forged"
    finally:
        await connection.close()


async def test_trainers_take_nothing_but_marks_of_a_reader(node: PrivateNode, others: Bus, topology: Topology) -> None:
    """Neither another message with the routing key of marks, nor one by way of an exchange of its own."""
    url = await user(node, topology.run, permissions(topology.run, "reader"))
    forged = encode(BatchReady(batch=1, ticket="t" * 32, op="a" * 16, chunks=0, experiences=0))
    connection = await aiormq.connect(url)
    try:
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
    finally:
        await connection.close()


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
async def test_each_user_may_do_what_the_table_says(
    node: PrivateNode, others: Bus, topology: Topology, role: Role
) -> None:
    await others.declare(topology.sessions, topology.review)
    columns, *lines = rows("Users of the broker")
    written = {line[0]: line[columns.index(role)] for line in lines}
    url = await user(node, f"{topology.run}-{role}", permissions(topology.run, role))
    tried = {}
    for name, operation in TABLE.items():
        bus = await bus_of(url, topology)
        try:
            async with asyncio.timeout(10):
                await operation(bus, topology)
            tried[name] = "yes"
        except BusRefused:
            tried[name] = "no"
        finally:
            await bus.close()
    assert tried == written


async def as_user(url: str, *words: str) -> str:
    """Run ``trinity-mq`` as the user of ``url`` and return its output."""
    code, out, errors = await command(*words, "--broker", url)
    assert code == 0, out + errors
    return out


@pytest.mark.e2e
@pytest.mark.timeout(500)
async def test_a_whole_run_works_with_them(
    node: PrivateNode, topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents, a submitter and a reader, each as its own user; drained, and taken up again to its end."""
    run = topology.run
    agent = await user(node, f"{run}-a", permissions(run, "agent", replies=True))
    submitter = await user(node, f"{run}-s", permissions(run, "submitter"))
    reader = await user(node, f"{run}-r", permissions(run, "reader"))
    (tmp_path / "url").write_text(f"{agent}\n")
    monkeypatch.delenv("TRINITY_MQ_BROKER_URL", raising=False)
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL_FILE", str(tmp_path / "url"))
    few = (f"name={run}", "buffer.eval_tasksets=[]", "buffer.batch_size=4")
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run", (*few, "buffer.total_steps=500")) as going:
        await going.until_progress(1, 180.0)
        answer, told, letters, shown, tapped, regraded = await asyncio.gather(
            as_user(submitter, "submit", run, "--task", TASK, "--wait", "90"),
            as_user(reader, "status", run, "--seconds", "3"),
            as_user(reader, "dead", "list", run),
            as_user(reader, "inspect", run),
            as_user(reader, "tap", run, "--from", "beginning", "--no-follow", "--fields", "uid"),
            as_user(reader, "regrade", str(tmp_path / "run"), "--reward", "char_match", "--json", "-"),
        )
        assert json.loads(answer.splitlines()[-1])["outcome"] == "finished"
        assert [name for name in ("explorer-0", "trainer-0", "operator-0", "runner-0") if name not in told] == []
        assert run in letters
        assert "reward" in shown
        assert '"uid"' in tapped
        regrading = json.loads(regraded[regraded.index("{") :])
        assert (regrading["changed"], regrading["experiences"] > 0) == (0, True)
        assert going.process is not None
        going.process.send_signal(signal.SIGINT)
        code, output = await going.ended(60.0)
        assert code == 130, output
    reached = max(step for step, _ in going.values("trainer/step"))
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run", (*few, f"buffer.total_steps={reached + 1}")) as rest:
        code, output = await rest.ended(180.0)
    assert code == 0, output
    assert max(step for step, _ in rest.values("trainer/step")) > reached
    for log in (tmp_path / "run" / "logs").glob("*.jsonl"):
        assert "ACCESS_REFUSED" not in log.read_text()
