"""A container of ours on a real engine: what survives a crash, what ends with us, what is refused and why."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.containers.broker_container import chosen_image, engine_version, has_image
from tests.containers.docker_command import docker
from tests.waiting import queues_noted, until
from trinity_mq.bus.base import Envelope
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.local_broker import choose as local
from trinity_mq.local_broker.container import LABEL, DockerNode
from trinity_mq.local_broker.node import NodeError
from trinity_mq.local_broker.ports import LOOPBACK, accepts_connections

IMAGE = chosen_image()
pytestmark = [
    pytest.mark.extended,
    pytest.mark.broker,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        engine_version() is None or not has_image(IMAGE), reason=f"needs a Docker engine that has {IMAGE}"
    ),
]
OWNER = """
import asyncio, pathlib, sys
from trinity_mq.local_broker.container import DockerNode

async def main():
    node = DockerNode(pathlib.Path(sys.argv[1]), image=sys.argv[2])
    await node.launch()
    print(node.container, node.ports["amqp"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def base(tmp_path: Path) -> AsyncIterator[Path]:
    """A folder for a node; the volume of the node in it is removed."""
    yield tmp_path / "broker"
    mine = await docker("volume", "ls", "--quiet", "--filter", f"label={LABEL}={tmp_path / 'broker'}")
    for volume in mine.split():
        await docker("volume", "rm", volume)


def node_in(base: Path, **options: object) -> DockerNode:
    return DockerNode(base, image=IMAGE, **options)


async def containers(base: Path) -> list[str]:
    return (await docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={base}")).split()


async def stored(url: str, topology: Topology) -> list[bytes]:
    """What lies in the queue of dead letters, taken out of it."""
    bus = RabbitBus(url, topology, config=BrokerConfig(), name="test")
    await bus.connect()
    consumer, found = await bus.consume(topology.dead), []
    while len(found) < 20:
        delivery = await anext(consumer)
        found.append(delivery.body)
    await bus.close()
    return sorted(found, key=int)


async def test_crash_and_restart_keep_address_and_data(base: Path, topology: Topology) -> None:
    node = node_in(base)
    try:
        await node.launch()
        url, bodies = node.url, [str(number).encode() for number in range(20)]
        bus = RabbitBus(url, topology, config=BrokerConfig(), name="test")
        await bus.connect()
        await bus.declare(topology.dead)
        for body in bodies:
            await bus.publish("", topology.dead.name, Envelope(body=body, kind="note", message_id=body.decode()))
        await bus.close()
        await queues_noted(node)

        await node.kill()
        assert (node.pid, await containers(base)) == (None, [])
        assert not await accepts_connections(node.ports["amqp"])
        await node.launch()
        assert node.url == url
        assert await stored(url, topology) == bodies
        await node.stop()
    finally:
        await node.kill()
    async with node_in(base) as again:
        assert again.url == url
        assert await stored(url, topology) == bodies


async def test_a_queue_made_just_before_a_crash_answers_again(base: Path, topology: Topology) -> None:
    """As with a private node: what was in it may be gone, but it can be asked."""
    for _ in range(2):
        async with node_in(base) as node:
            bus = RabbitBus(node.url, topology, config=BrokerConfig(), name="test")
            await bus.connect()
            try:
                await bus.declare(topology.dead)
                body = Envelope(body=b"body", kind="note")
                assert await bus.publish("", topology.dead.name, body, timeout=10.0)
                await node.kill()
            finally:
                await bus.close()


async def test_where_rabbitmq_is_not_installed_it_runs_and_is_started_anew_when_killed(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_mq.local_broker.choose.find_rabbitmq", lambda: None)
    monkeypatch.setenv("TRINITY_MQ_RABBITMQ_IMAGE", IMAGE)
    node = await local.local_broker(base)
    assert isinstance(node, DockerNode)
    assert node.pid is not None
    await docker("kill", node.container)
    await until(lambda: node.pid is None)
    with pytest.raises(NodeError, match=r"container tmq-\w+ of .* ended"):
        await node.wait_ready()
    await node.launch()
    assert node.pid is not None
    await node.stop()
    assert await containers(base) == []


async def test_settings_and_plugins_arrive_whatever_the_umask_and_nobody_is_root(base: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        async with node_in(base, config="channel_max = 9", plugins=("rabbitmq_shovel",)) as node:
            assert "{ok,9}" in await node.ctl("eval", "application:get_env(rabbit, channel_max).")
            assert "rabbitmq_shovel" in await node.ctl("eval", "rabbit_plugins:active().")
            users = [line.split()[0] for line in (await node.ctl("list_users")).splitlines()[1:]]
            assert users == ["tmq"]
            port = node.ports["amqp"]
            assert await docker("port", node.container) == f"5672/tcp -> {LOOPBACK}:{port}"
            top = (await docker("top", node.container, "-o", "pid,uid,comm")).splitlines()[1:]
            assert any("beam" in line for line in top)
            assert {line.split()[1] for line in top}.isdisjoint({"0"})
            with pytest.raises(NodeError, match=f"port {port} is in use"):
                await node_in(tmp_path / "other", port=port).start()
            assert await containers(tmp_path / "other") == []
    finally:
        os.umask(before)


async def test_it_ends_with_the_process_that_started_it(base: Path) -> None:
    """SIGKILL leaves no time to clean up: the guard does it."""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, str(base), IMAGE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    container, port = (await owner.stdout.readline()).decode().split()
    assert await containers(base) != []
    owner.send_signal(signal.SIGKILL)
    await owner.wait()

    async def ended() -> bool:
        return await containers(base) == []

    await until(ended, 30.0)
    async with node_in(base) as node:
        assert (node.container, node.ports["amqp"]) == (container, int(port))


async def test_a_port_that_is_taken_at_the_last_moment(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our look at the port and the engine's use of it: what the engine says is passed on."""
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr("trinity_mq.local_broker.node_files.is_free", lambda _port: True)
    async with server:
        with pytest.raises(NodeError, match=rf"docker start: .*{port}.*(in use|allocated)"):
            await node_in(base, port=port).start()
    assert await containers(base) == []


async def test_no_such_image_and_no_engine(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = DockerNode(base, image="trinity-mq-test/no-such-image:0")
    with pytest.raises(NodeError, match=r"no image trinity-mq-test/no-such-image:0.*TRINITY_MQ_RABBITMQ_IMAGE"):
        await missing.start()
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(NodeError, match=r"no Docker engine answers at unix:///nowhere\.sock"):
        await node_in(base).start()


async def test_an_image_that_ends_at_once_shows_its_log(base: Path) -> None:
    node = node_in(base, config="no.such.setting = 1")
    with pytest.raises(NodeError, match=r"(?s)ended.*no\.such\.setting"):
        await node.launch()
    assert await containers(base) == []
