"""A private node as users and tests start it: what survives, what is refused, what ends with it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.broker_fixtures import connected, note
from tests.processes import gone
from tests.waiting import queues_noted, until
from trinity_mq.bus.topology import Topology
from trinity_mq.config import load_config
from trinity_mq.errors import CommandError
from trinity_mq.local_broker.base import ELECT
from trinity_mq.local_broker.node import UNLESS_ORPHANED, NodeError, PrivateNode, find_rabbitmq
from trinity_mq.local_broker.ports import LOOPBACK, accepts_connections, free_ports
from trinity_mq.targets.connection import Target, open_bus

pytestmark = [pytest.mark.broker, pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here")]


@pytest.fixture
def base() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="tmq-"))
    yield made / "broker"
    shutil.rmtree(made)


async def silent(port: int) -> bool:
    return not await accepts_connections(port)


@pytest.mark.timeout(180)
async def test_crash_and_restart_lose_nothing_confirmed(base: Path, topology: Topology) -> None:
    """SIGKILL, start again, then a clean restart: the same address, and every confirmed message is there."""
    async with PrivateNode(base) as node, connected(node.url, topology) as bus:
        url, ports = node.url, node.ports
        await check_folder(node, base)
        await check_where_it_looks_for_modules(node, base)
        await bus.declare(topology.dead, topology.results)
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(bus.publish("", topology.dead.name, note(number, message_id=str(number))))
                streamed = note(number, message_id=f"stream-{number}")
                group.create_task(bus.publish(topology.exchange("results"), "1", streamed))
        consumer = await bus.consume(topology.dead)
        stream = await bus.consume(topology.results, offset=0)
        held = [await anext(consumer) for _ in range(10)]
        read = [(await anext(stream)).body for _ in range(10)]
        await held[0].ack()
        await queues_noted(node)

        assert node.pid is not None
        os.kill(node.pid, signal.SIGKILL)
        await until(lambda: not bus.usable and node.pid is None)
        publishing = asyncio.create_task(bus.publish("", topology.dead.name, note(50, message_id="50")))
        await node.start()
        await node.wait_ready()
        assert node.url == url
        async with asyncio.timeout(30):
            await bus.wait_usable()
            assert await publishing
            again = [await anext(consumer) for _ in range(50)]
            read += [(await anext(stream)).body for _ in range(40)]
        assert {one.body for one in again} == {b"%d" % number for number in range(1, 51)}
        assert {one.deliveries_before for one in again if one.message_id != "50"} == {1}
        assert read == [b"%d" % number for number in range(50)]

        await bus.close()
        await node.stop()
        assert node.pid is None
        assert not await accepts_connections(ports["epmd"])
        left_over = base / "plugins" / "rabbit-0.0.1"
        left_over.symlink_to("/no/such/folder")  # as an earlier release would have left it
        async with PrivateNode(base) as second, connected(url, topology) as reader:
            assert (second.url, second.ports) == (url, ports)
            assert await reader.depth(topology.dead.name) == 50
            assert not left_over.is_symlink()
    with pytest.raises(NodeError, match="made with user 'tmq'"):
        await PrivateNode(base, user="another").start()


async def check_folder(node: PrivateNode, base: Path) -> None:
    """A folder in use is refused, and its files are private."""
    with pytest.raises(NodeError, match=rf"already runs in {base} \(process {node.pid}\)"):
        await PrivateNode(base).start()
    for name, mode in {
        ".": 0o700,
        "node.json": 0o600,
        "rabbitmq.conf": 0o600,
        "advanced.config": 0o600,
        "home/.erlang.cookie": 0o400,
    }.items():
        assert stat.S_IMODE((base / name).stat().st_mode) == mode, name
    password = json.loads((base / "node.json").read_text())["password"]
    assert len(password) >= 32
    assert not any(password in word for word in psutil.Process(node.pid).cmdline())


async def check_where_it_looks_for_modules(node: PrivateNode, base: Path) -> None:
    """First where most of them are."""
    path = await node.ctl("eval", 'io:format("~s", [lists:join("\\n", code:get_path())]).')  # prints once: quick
    folders = [Path(line) for line in path.splitlines() if line.startswith("/")]
    assert [folder.parent.name.partition("-")[0] for folder in folders[:4]] == ["rabbit", "kernel", "stdlib", "rabbit"]
    assert folders[0].is_relative_to(base / "plugins")
    assert len(list((base / "plugins").iterdir())) == 1
    assert "rabbit_common" in await node.ctl("eval", "code:which(rabbit_misc).")


async def test_a_port_in_use_is_named(base: Path) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NodeError, match=f"port {port} is in use"):
            await PrivateNode(base, port=port).start()


async def test_a_server_that_dies_shows_its_log(base: Path) -> None:
    node = PrivateNode(base, config="no.such.setting = 1")
    await node.start()
    try:
        with pytest.raises(NodeError, match=r"(?s)died \(exit code \d+\).*no\.such\.setting"):
            await node.wait_ready()
    finally:
        await node.stop()


async def test_a_left_over_epmd_is_ended(base: Path) -> None:
    port = free_ports(1)[0]
    epmd = await asyncio.create_subprocess_exec("epmd", "-port", str(port), "-address", LOOPBACK)
    try:
        await until(lambda: accepts_connections(port))
        base.mkdir()
        (base / "node.json").write_text(json.dumps({"user": "tmq", "password": "x", "ports": {"epmd": port}}))
        node = PrivateNode(base)
        await node.start()
        await node.kill()
        async with asyncio.timeout(5):
            await epmd.wait()
    finally:
        if epmd.returncode is None:
            epmd.kill()
            await epmd.wait()


def test_nothing_is_started_for_a_parent_that_has_ended_meanwhile(tmp_path: Path) -> None:
    for parent, starts in ((os.getpid(), True), (os.getppid(), False)):
        file = tmp_path / str(parent)
        ended = subprocess.run([*UNLESS_ORPHANED, str(parent), "touch", str(file)], check=False)
        assert (ended.returncode == 0, file.exists()) == (starts, starts)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
async def test_it_dies_with_the_process_that_started_it(base: Path) -> None:
    program = f"""
import asyncio, pathlib, time
from trinity_mq.local_broker.node import PrivateNode
node = PrivateNode(pathlib.Path({str(base)!r}))
asyncio.run(node.start())
print(node.pid, node.ports["epmd"], flush=True)
time.sleep(60)
"""
    mounts = Path("/proc/self/mounts").read_text()
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        pid, epmd_port = map(int, (await parent.stdout.readline()).split())
        assert psutil.pid_exists(pid)
        assert await accepts_connections(epmd_port)
        assert Path("/proc/self/mounts").read_text() == mounts, "what a server below another root needs, it alone sees"
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: gone(pid))
    await until(lambda: silent(epmd_port))


STOP = (
    "[ra:stop_server(quorum_queues, amqqueue:get_pid(Q)) || Q <- rabbit_amqqueue:list(), "
    'element(4, amqqueue:get_name(Q)) =:= <<"{}">>], ok.'
)


async def test_a_queue_that_goes_during_the_elections_spoils_no_other(
    broker_node: Any, broker_url: str, topology: Topology
) -> None:
    """Agents are back before the elections are over, and an operator deletes the queue of its batch."""
    async with connected(broker_url, topology) as bus:
        await bus.declare(topology.closed)
        await broker_node.ctl("eval", STOP.format(topology.closed.name))
        await broker_node.ctl("eval", ELECT)


@pytest.mark.timeout(180)
async def test_an_error_while_a_command_uses_the_node_of_a_stopped_run_comes_as_it_is(base: Path) -> None:
    config = load_config({"name": "mine", "run_dir": str(base.parent), "model": {"tiny": {}}})
    with pytest.raises(CommandError, match="no stream"):
        async with open_bus(Target("mine", config.broker, config), "audit"):
            raise CommandError("no stream")
