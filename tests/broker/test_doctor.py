"""The doctor on a live broker that is set wrong on purpose, by each way that it has of asking."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.broker_fixtures import connected, delete_run, own_node
from tests.processes import command
from tests.waiting import until
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.config import load_config
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.messages import Heartbeat
from trinity_mq.operations.doctor.checks import DoctorFinding
from trinity_mq.operations.doctor.facts import Needs
from trinity_mq.operations.doctor.run import check_broker
from trinity_mq.runtime.deliveries import envelope

RUN = "sick"
TOPOLOGY = Topology(RUN)
NEEDS = Needs.of(load_config({"name": RUN, "model": {"tiny": {}}, "run_dir": "/nonexistent"}), None)
WRONG = "consumer_timeout = 60000\nmax_message_size = 1048576"
FINE = {"connection", "version", "permissions", "feature flags", "clock", "policies", "alarms"}
FINE |= {"queues of the run", "releases", "dead letters", "broker's disk"}

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]


@pytest.fixture(scope="module")
def node() -> Iterator[PrivateNode]:
    """A private node of the RabbitMQ that tests use."""
    with own_node(plugins=("rabbitmq_management",), config=WRONG) as made:
        yield made


async def look(
    node: PrivateNode, *, ctl: bool = False, management: bool = False, url: str | None = None, login: str = "amqp://"
) -> dict[str, DoctorFinding]:
    """The findings by subject; the worst one where there are several. ``login``: URL with a user for the API."""
    port = node.ports["rabbitmq_management"] if management else 1  # where nobody listens
    broker = BrokerConfig(url=url or node.url)
    user, at, _ = urlsplit(login).netloc.rpartition("@")
    found = await check_broker(broker, NEEDS, f"http://{user}{at}127.0.0.1:{port}", None, node.ctl if ctl else None)
    worst: dict[str, DoctorFinding] = {}
    order = ("not looked at", "ok", "warning", "problem")
    for one in found:
        before = worst.get(one.subject)
        if before is None or order.index(one.verdict) > order.index(before.verdict):
            worst[one.subject] = one
    return worst


def verdicts(found: dict[str, DoctorFinding]) -> dict[str, str]:
    return {subject: one.verdict for subject, one in found.items()}


@asynccontextmanager
async def user(node: PrivateNode, pattern: str | None, tag: str = "") -> AsyncIterator[str]:
    """The URL of a user with that pattern for all three permissions, None for no permission at all."""
    await node.ctl("add_user", "weak", "weak")
    try:
        if pattern is not None:
            await node.ctl("set_permissions", "-p", "/", "weak", pattern, pattern, pattern)
        if tag:
            await node.ctl("set_user_tags", "weak", tag)
        yield f"amqp://weak:weak@127.0.0.1:{node.ports['amqp']}/%2F"
    finally:
        await node.ctl("delete_user", "weak")


@asynccontextmanager
async def agents(node: PrivateNode) -> AsyncIterator[RabbitBus]:
    """The run, as far as the broker sees it; what it declared stays only as long."""
    try:
        async with connected(node.url, TOPOLOGY) as bus:
            await bus.declare(*TOPOLOGY.durable)
            yield bus
    finally:
        await delete_run(node.url, TOPOLOGY)


@asynccontextmanager
async def beating(bus: RabbitBus) -> AsyncIterator[None]:
    """Runners of two releases send heartbeats."""

    async def go_on() -> None:
        common = {"role": "runner", "seq": 1, "incarnation": "i", "lease": 10.0, "state": "idle"}
        while True:
            for name, fields in ("runner-0", {}), ("runner-1", {"release": "0.3.0", "reads": (1, 2), "writes": 2}):
                beat = Heartbeat.model_validate({**common, "id": name, **fields})
                await bus.publish(TOPOLOGY.exchange("telemetry"), f"beat.runner.{name}", envelope(beat))
            await asyncio.sleep(0.5)

    going = asyncio.create_task(go_on())
    try:
        yield
    finally:
        going.cancel()
        await asyncio.wait([going])


async def queues_have_timeouts(node: PrivateNode) -> bool:
    """Whether the release lets each queue have a consumer timeout of its own."""
    return tuple(int(number) for number in (await node.ctl("version")).strip().split(".")[:2]) >= (3, 12)


async def test_limits_that_are_too_low_are_problems_and_nothing_is_changed(node: PrivateNode) -> None:
    listing = (("list_queues", "name"), ("list_exchanges", "name"), ("list_bindings",))
    before = [await node.ctl(*words) for words in listing]
    found = await look(node, ctl=True)
    timeout = "ok" if await queues_have_timeouts(node) else "problem"
    assert verdicts(found) == {"consumer timeout": timeout, "message size": "problem", **dict.fromkeys(FINE, "ok")}
    assert found["version"].seen == f"RabbitMQ {(await node.ctl('version')).strip()}"
    if timeout == "problem":
        assert found["consumer timeout"].seen == "60 s"
        assert "add the line `consumer_timeout = 86400000`" in found["consumer timeout"].do
    assert (found["message size"].seen, "8 MiB" in found["message size"].wanted) == ("1 MiB", True)
    assert "broker.max_message_bytes to 1048576" in found["message size"].do
    assert [await node.ctl(*words) for words in listing] == before


async def test_the_management_api_tells_the_rest(node: PrivateNode) -> None:
    disk: list[dict[str, DoctorFinding]] = []

    async def measured() -> bool:
        disk[:] = [await look(node, management=True)]
        return disk[0]["broker's disk"].verdict != "not looked at"

    await until(measured, 60.0)  # a node measures its disk some seconds after its start
    found = disk[0]
    timeout = "ok" if await queues_have_timeouts(node) else "not looked at"
    unseen = {"consumer timeout": timeout, "message size": "not looked at"}
    assert verdicts(found) == {**unseen, **dict.fromkeys(FINE, "ok")}
    assert "rabbitmqctl" in found["message size"].do
    assert "'.*' '.*' '.*'" in found["permissions"].seen


async def test_amqp_alone_says_what_it_can_and_what_it_cannot(node: PrivateNode) -> None:
    found = await look(node)
    by_amqp = {"connection", "version", "queues of the run", "releases", "dead letters"}
    by_amqp |= {"consumer timeout"} if await queues_have_timeouts(node) else set()
    assert {subject for subject, verdict in verdicts(found).items() if verdict == "ok"} == by_amqp
    assert set(verdicts(found).values()) == {"ok", "not looked at"}
    assert "no management API at http://127.0.0.1:1" in found["alarms"].seen
    async with agents(node) as bus:
        found = await look(node)
        assert found["releases"].seen == "no agent is running"
        assert "not in use" in found["queues of the run"].seen
        by_ctl = (await look(node, ctl=True))["queues of the run"]
        assert (by_ctl.verdict, by_ctl.seen) == ("warning", "7 queues, not in use")
        assert "trinity-mq broker clean sick" in by_ctl.do
        async with await bus.consume(TOPOLOGY.dead), beating(bus):
            found = await look(node)
    assert found["queues of the run"].verdict == "ok"
    assert found["releases"].verdict == "problem"
    assert found["releases"].seen.startswith("0.1.0: runner-0; 0.3.0: runner-1")


async def test_policies_that_clash(node: PrivateNode) -> None:
    await node.ctl("set_policy", "short", "^tmq\\.", '{"message-ttl": 1000}', "--apply-to", "queues")
    await node.ctl("set_operator_policy", "small", "ready$", '{"max-length-bytes": 1000}', "--apply-to", "queues")
    await node.ctl("set_policy", "others", "^other\\.", '{"max-length": 5}', "--priority", "9")
    try:
        by_ctl, by_api = await look(node, ctl=True), await look(node, management=True)
        for found in (by_ctl, by_api):
            assert found["policies"].verdict == "problem"
    finally:
        for words in (("clear_policy", "short"), ("clear_operator_policy", "small"), ("clear_policy", "others")):
            await node.ctl(*words)
    assert (await look(node, ctl=True))["policies"].verdict == "ok"


async def test_a_user_who_may_not(node: PrivateNode) -> None:
    async with user(node, r"^tmq\.sick\.", tag="management") as url:
        assert (await look(node, ctl=True, url=url))["permissions"].verdict == "ok"
        # asks for more than its tag opens, which is no finding against it
        by_api = await look(node, management=True, url=url)
        assert (by_api["permissions"].verdict, by_api["alarms"].verdict) == ("not looked at", "not looked at")
        assert "401" in by_api["alarms"].seen
        assert "no tag that permits this" in by_api["permissions"].seen
        assert "--management" in by_api["permissions"].do
    async with user(node, r"^tmq\.healthy\.") as url:
        for found in (await look(node, ctl=True, url=url), await look(node, management=True, url=url, login=node.url)):
            assert found["permissions"].verdict == "problem"
            assert "rabbitmqctl set_permissions -p / weak '^tmq\\.sick\\.'" in found["permissions"].do
    async with user(node, None) as url:
        found = await look(node, url=url)
        assert verdicts(found) == {"broker": "problem"}
        assert "weak:weak" not in found["broker"].seen


async def test_alarms(node: PrivateNode) -> None:
    async with agents(node):
        await node.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
        try:
            by_ctl = await look(node, ctl=True)
        finally:
            await node.ctl("set_vm_memory_high_watermark", "0.4")
        assert by_ctl["alarms"].verdict == "problem"
        assert by_ctl["alarms"].seen.startswith("memory (")
        assert "vm_memory_high_watermark" in by_ctl["alarms"].do
        await node.ctl("set_disk_free_limit", "100000GB")
        try:
            found = await look(node, ctl=True)
        finally:
            await node.ctl("set_disk_free_limit", "50MB")
        assert found["alarms"].seen.startswith("disk (")
        assert found["broker's disk"].verdict == "problem"

        async def over() -> bool:
            return (await look(node, ctl=True))["alarms"].verdict == "ok"

        await until(over, 60.0)


async def doctor(*words: str) -> tuple[int, str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRINITY_MQ_BROKER")}
    return await command("doctor", *words, env=env)


async def test_the_command(node: PrivateNode, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"name: {RUN}\nmodel: {{tiny: {{}}}}\nrun_dir: {tmp_path}/run\n")
    code, output, errors = await doctor(
        str(config), "--url", node.url, "--node", str(node.base), "--management", "http://127.0.0.1:1"
    )
    assert (code, errors) == (1, "")
    assert "PROBLEM  message size" in output
    if not await queues_have_timeouts(node):
        assert "PROBLEM  consumer timeout" in output
        assert "do: add the line `consumer_timeout = 86400000` to rabbitmq.conf" in output
    assert "torch" in output
    assert "run folder's disk" in output
    assert not (tmp_path / "run").exists()
    # without a run and a node to ask there is nothing to complain about
    code, output, errors = await doctor("--broker", node.url, "--management", "http://127.0.0.1:1", "--json")
    assert (code, errors) == (0, "")
    found = {one["subject"]: one for one in json.loads(output)["findings"]}
    assert found["version"]["verdict"] == "ok"
    assert found["permissions"]["seen"] == "no run is named"
    assert node.url.split(":")[2].split("@")[0] not in output, "the password"
