"""Which broker is started, and what a container of ours is started with: asked of a stand-in for a Docker engine."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.local_broker.docker_engine import FakeEngine, serving
from trinity_mq.local_broker import choose as local
from trinity_mq.local_broker.container import DockerNode, is_docker_available
from trinity_mq.local_broker.node import NodeError, PrivateNode, find_rabbitmq
from trinity_mq.local_broker.ports import accepts_connections

OWNER = """
import asyncio, pathlib, sys
from trinity_mq.local_broker.container import DockerNode

async def main():
    await DockerNode(pathlib.Path(sys.argv[1])).launch()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("TRINITY_MQ_RABBITMQ_IMAGE", raising=False)
    engine = FakeEngine()
    with serving(engine) as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        yield engine


async def test_a_container_is_private_and_finds_its_data_again(docker: FakeEngine, tmp_path: Path) -> None:
    base = tmp_path / "broker"
    async with DockerNode(base, plugins=("rabbitmq_stream",), config="channel_max = 9") as node:
        url, port, volume = node.url, node.ports["amqp"], node.container
        assert node.pid is not None
        assert await node.ctl("status") == "status"
        docker.removed.clear()
        with pytest.raises(NodeError, match="already runs"):
            await DockerNode(base).start()
        assert not docker.removed.is_set(), "the container is that of the other"
    (created,) = docker.created
    assert created["Image"] == "rabbitmq:4-management"
    host = created["HostConfig"]
    assert host["PortBindings"] == {"5672/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]}
    assert host["Binds"] == [f"{volume}:/var/lib/rabbitmq:rw"]
    password = url.split(":")[2].split("@")[0]
    assert f"RABBITMQ_DEFAULT_PASS={password}" in created["Env"]
    assert stat.S_IMODE((base / "docker.json").stat().st_mode) == 0o600
    assert docker.files == {
        "/etc/rabbitmq/conf.d/90-extra.conf": ("consumer_timeout = 604800000\nchannel_max = 9", 0o644),
        "/etc/rabbitmq/enabled_plugins": ("[rabbitmq_stream].\n", 0o644),
    }
    assert docker.stops == 1
    assert node.pid is None
    assert not await accepts_connections(port)
    async with DockerNode(base) as again:
        assert again.url == url
    assert docker.volumes == {volume}


async def test_where_rabbitmq_is_not_installed_docker_is_chosen_and_where_neither_is_it_says_what_to_install(
    docker: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_mq.local_broker.node.HOMES", ())
    monkeypatch.delenv("RABBITMQ_HOME", raising=False)
    node = await local.local_broker(tmp_path / "broker")
    assert isinstance(node, DockerNode)
    assert await accepts_connections(node.ports["amqp"])
    await node.stop()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nowhere.sock")
    assert not await is_docker_available()
    with pytest.raises(NodeError, match=r"apt-get install rabbitmq-server.*Docker.*broker\.url"):
        await local.local_broker(tmp_path / "broker")
    with pytest.raises(NodeError, match="apt-get install rabbitmq-server"):
        await PrivateNode(tmp_path / "broker").start()
    script = tmp_path / "sbin" / "rabbitmq-server"
    script.parent.mkdir()
    script.touch(mode=0o755)
    assert find_rabbitmq() is None
    monkeypatch.setenv("RABBITMQ_HOME", str(tmp_path))
    assert find_rabbitmq() == script, "one that is unpacked there"


async def test_an_image_that_cannot_be_had_says_what_to_do(
    docker: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.has_image = False
    node = DockerNode(tmp_path / "broker")
    with pytest.raises(NodeError, match=r"no image rabbitmq:4-management.*no such host.*TRINITY_MQ_RABBITMQ_IMAGE"):
        await node.start()
    assert not docker.created
    await node.stop()
    monkeypatch.setenv("TRINITY_MQ_RABBITMQ_IMAGE", "tmq/rabbitmq:test")
    assert DockerNode(tmp_path).image == "tmq/rabbitmq:test"
    assert DockerNode(tmp_path, image="other").image == "other"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("unix:///nowhere.sock", r"no Docker engine answers at unix:///nowhere\.sock"),
        ("tcp://builder.example:2376", r"tcp://builder.example:2376 is on another machine.*broker\.url"),
    ],
)
async def test_an_engine_that_is_down_or_elsewhere_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, said: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(NodeError, match=said):
        await DockerNode(tmp_path / "broker").start()


async def test_one_that_ends_shows_its_log(docker: FakeEngine, tmp_path: Path) -> None:
    node = DockerNode(tmp_path / "broker")
    await node.start()
    docker.end()
    with pytest.raises(NodeError, match=r"(?s)ended.*the end of its log"):
        await node.wait_ready()
    await node.stop()


async def test_it_is_removed_when_its_owner_is_killed(docker: FakeEngine, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "broker")]
    owner = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    docker.removed.clear()
    owner.kill()
    await owner.wait()
    assert await asyncio.to_thread(docker.removed.wait, 30)
