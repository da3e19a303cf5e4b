"""A container of ours on a real engine: what survives a crash, what ends with us, what is refused and why."""

from __future__ import annotations

import os
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


async def containers(base: Path) -> list[str]:
    return (await docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={base}")).split()


def node_in(base: Path, **options: object) -> DockerNode:
    return DockerNode(base, image=IMAGE, **options)


@pytest.fixture
async def base(tmp_path: Path) -> AsyncIterator[Path]:
    """A folder for a node; the volume of the node in it is removed."""
    yield tmp_path / "broker"
    mine = await docker("volume", "ls", "--quiet", "--filter", f"label={LABEL}={tmp_path / 'broker'}")
    for volume in mine.split():
        await docker("volume", "rm", volume)


async def test_crash_and_restart_keep_address_and_data(base: Path, topology: Topology) -> None:
    """A broker in a container is started anew when the engine has killed it, and by another node in its folder."""
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
        await docker("kill", node.container)
        await until(lambda: node.pid is None)
        with pytest.raises(NodeError, match=r"container tmq-\w+ of .* ended"):
            await node.wait_ready()
        assert not await accepts_connections(node.ports["amqp"])
        await node.launch()
        await node.kill()
        assert (node.pid, await containers(base)) == (None, [])
    finally:
        await node.kill()
    async with node_in(base) as again:
        assert again.url == url
        bus = RabbitBus(url, topology, config=BrokerConfig(), name="test")
        await bus.connect()
        consumer = await bus.consume(topology.dead)
        assert sorted([(await anext(consumer)).body for _ in bodies], key=int) == bodies
        await bus.close()


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
