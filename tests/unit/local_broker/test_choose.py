"""Which broker is started, and what a container of ours is started with: asked of a stand-in for the docker command."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_mq.local_broker import choose as local
from trinity_mq.local_broker.container import DockerNode, docker_answers
from trinity_mq.local_broker.node import NodeError, PrivateNode, find_rabbitmq
from trinity_mq.local_broker.ports import accepts

FAKE = '''#!{python}
"""Answers as docker does, and runs a listener that greets as a broker does in the place of a container."""
import json, os, pathlib, select, signal, socket, subprocess, sys

here = pathlib.Path(__file__).parent
arguments = sys.argv[1:]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
running = here / "running"
greeting = (
    "import socket, sys\\n"
    "server = socket.create_server(('127.0.0.1', int(sys.argv[1])))\\n"
    "while True:\\n"
    "    client, _ = server.accept()\\n"
    "    client.recv(8) and client.sendall(b'\\\\x01')\\n"
    "    client.close()\\n"
)
engine = not (here / "no-engine").exists()
match arguments[0]:
    case _ if not engine:
        sys.exit("Cannot connect to the Docker daemon at unix:///tmp/nowhere. Is the docker daemon running?")
    case "version":
        print("28.0")
    case "image" if (here / "no-image").exists():
        sys.exit("No such image: rabbitmq:4-management")
    case "pull":
        sys.exit("dial tcp: no such host")
    case "create":
        port = next(word for word in arguments if word.startswith("--publish=")).split(":")[1]
        (here / "port").write_text(port)
    case "start":
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        child = subprocess.Popen([sys.executable, "-c", greeting, (here / "port").read_text()], **quiet)
        running.write_text(str(child.pid))
    case "wait" if running.exists():
        descriptor = os.pidfd_open(int(running.read_text()))
        select.select([descriptor], [], [])
    case "rm":
        if not running.exists():
            sys.exit("No such container")
        os.kill(int(running.read_text()), signal.SIGKILL)
        running.unlink()
    case "logs":
        print("the end of its log")
    case "exec":
        print("out of", arguments[-1])
'''


class Docker:
    """The stand-in's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = folder / "docker"
        command.write_text(FAKE.replace("{python}", sys.executable))
        command.chmod(0o755)

    def calls(self, verb: str) -> list[list[str]]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [call for call in map(json.loads, lines) if call[0] == verb]

    def mark(self, name: str) -> None:
        (self.folder / name).touch()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("TRINITY_MQ_RABBITMQ_IMAGE", "TRINITY_MQ_RABBITMQ_ROOT", "DOCKER_HOST"):
        monkeypatch.delenv(name, raising=False)
    yield Docker(folder)
    if (running := folder / "running").exists():
        os.kill(int(running.read_text()), signal.SIGKILL)


@pytest.fixture
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_mq.local_broker.node.HOMES", ())
    monkeypatch.delenv("RABBITMQ_HOME", raising=False)


@pytest.mark.usefixtures("_not_installed")
class TestChoice:
    async def test_docker_where_rabbitmq_is_not_installed(self, docker: Docker, tmp_path: Path) -> None:
        node = await local.local_broker(tmp_path / "broker")
        assert isinstance(node, DockerNode)
        assert await accepts(node.ports["amqp"])
        await node.stop()

    async def test_neither_says_what_to_install(self, docker: Docker, tmp_path: Path) -> None:
        docker.mark("no-engine")
        assert not await docker_answers()
        with pytest.raises(NodeError, match=r"apt-get install rabbitmq-server.*Docker.*broker\.url"):
            await local.local_broker(tmp_path / "broker")
        with pytest.raises(NodeError, match="apt-get install rabbitmq-server"):
            await PrivateNode(tmp_path / "broker").start()

    async def test_no_docker_command(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert not await docker_answers()

    def test_finds_an_unpacked_rabbitmq(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = tmp_path / "sbin" / "rabbitmq-server"
        script.parent.mkdir()
        script.touch(mode=0o755)
        assert find_rabbitmq() is None or find_rabbitmq() != script
        monkeypatch.setenv("RABBITMQ_HOME", str(tmp_path))
        assert find_rabbitmq() == script


class TestContainer:
    async def test_is_private_and_finds_its_data_again(self, docker: Docker, tmp_path: Path) -> None:
        base = tmp_path / "broker"
        async with DockerNode(base, plugins=("rabbitmq_stream",), config="channel_max = 9") as node:
            url, port = node.url, node.ports["amqp"]
            assert node.pid is not None
            assert await node.ctl("status") == "out of status"
        (run,) = docker.calls("create")
        assert run[-1] == "rabbitmq:4-management"
        assert f"--publish=127.0.0.1:{port}:5672" in run
        password = url.split(":")[2].split("@")[0]
        assert not any(password in word for word in run)
        secrets = base / "container.env"
        assert f"RABBITMQ_DEFAULT_PASS={password}" in secrets.read_text()
        assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
        given = {call[1]: call[2].partition(":")[2] for call in docker.calls("cp")}
        assert given == {
            str(base / "extra.conf"): "/etc/rabbitmq/conf.d/90-extra.conf",
            str(base / "enabled_plugins"): "/etc/rabbitmq/enabled_plugins",
        }
        assert [Path(file).read_text() for file in given] == ["channel_max = 9", "[rabbitmq_stream].\n"]
        assert {stat.S_IMODE(Path(file).stat().st_mode) for file in given} == {0o644}
        assert node.pid is None
        assert not await accepts(port)
        async with DockerNode(base) as again:
            assert again.url == url
        volumes = {word for call in docker.calls("create") for word in call if word.endswith(":/var/lib/rabbitmq")}
        assert len(volumes) == 1
        assert docker.calls("stop")

    async def test_a_folder_in_use_is_refused(self, docker: Docker, tmp_path: Path) -> None:
        async with DockerNode(tmp_path / "broker"):
            with pytest.raises(NodeError, match="already runs"):
                await DockerNode(tmp_path / "broker").start()

    async def test_an_image_that_cannot_be_had_says_what_to_do(self, docker: Docker, tmp_path: Path) -> None:
        docker.mark("no-image")
        node = DockerNode(tmp_path / "broker")
        with pytest.raises(NodeError, match=r"no image rabbitmq:4-management.*no such host.*TRINITY_MQ_RABBITMQ_IMAGE"):
            await node.start()
        assert not docker.calls("create")
        await node.stop()

    async def test_an_engine_that_is_down_is_named(self, docker: Docker, tmp_path: Path) -> None:
        docker.mark("no-engine")
        with pytest.raises(NodeError, match=r"Cannot connect.*Is the docker daemon running"):
            await DockerNode(tmp_path / "broker").start()

    async def test_an_engine_elsewhere_is_refused(
        self, docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DOCKER_HOST", "tcp://builder.example:2376")
        with pytest.raises(NodeError, match=r"tcp://builder.example:2376 is on another machine.*broker\.url"):
            await DockerNode(tmp_path / "broker").start()

    async def test_one_that_ends_shows_its_log(self, docker: Docker, tmp_path: Path) -> None:
        node = DockerNode(tmp_path / "broker")
        await node.start()
        await node._remove()
        with pytest.raises(NodeError, match=r"(?s)ended.*the end of its log"):
            await node.wait_ready()
        await node.stop()

    async def test_the_image_comes_from_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRINITY_MQ_RABBITMQ_IMAGE", "tmq/rabbitmq:test")
        assert DockerNode(tmp_path).image == "tmq/rabbitmq:test"
        assert DockerNode(tmp_path, image="other").image == "other"
