"""What a node keeps in its folder, which broker is started, and what a container is started with (a stand-in's)."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.local_broker.docker_engine import FakeEngine, serving
from trinity_mq.local_broker import choose as local
from trinity_mq.local_broker import ports
from trinity_mq.local_broker.container import DockerNode, is_docker_available
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.local_broker.node_files import (
    FolderLock,
    NodeError,
    NodeState,
    boot_script,
    failure_excerpt,
    server_config,
    server_environment,
    server_user,
)
from trinity_mq.local_broker.ports import LOOPBACK, accepts_connections, free_ports, is_free

SAME_DRAW = """
import json, sys
from trinity_mq.local_broker import ports
ports.secrets.randbelow = lambda _: 1234
print(json.dumps(ports.free_ports(3)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_state_survives_and_stays_private(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    first = NodeState.load(file, "tmq", None)
    first.choose_ports(("amqp", "dist"), {})
    first.save(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = NodeState.load(file, "tmq", None)
    assert again == first
    again.choose_ports(("amqp", "dist", "epmd"), {})
    assert {name: again.ports[name] for name in ("amqp", "dist")} == first.ports
    passwords = {NodeState.load(tmp_path / name, "tmq", None).password for name in "abc"}
    assert len(passwords) == 3, "each folder has its own"
    assert all(len(password) >= 32 for password in passwords)
    with pytest.raises(NodeError, match="own password") as error:
        NodeState.load(file, "tmq", "another")
    assert first.password not in str(error.value)
    file.write_text("{")
    with pytest.raises(NodeError, match="to start afresh"):
        NodeState.load(file, "tmq", None)


def test_a_port_that_is_taken_is_replaced_if_it_was_remembered_and_named_if_it_is_fixed(taken_port: int) -> None:
    assert not is_free(taken_port)
    state = NodeState(user="u", password="p", ports={"amqp": taken_port})
    state.choose_ports(("amqp", "dist"), {})
    assert state.ports["amqp"] != taken_port
    assert len(set(state.ports.values())) == 2
    with pytest.raises(NodeError, match=f"port {taken_port} is in use"):
        NodeState(user="u", password="p").choose_ports(("amqp",), {"amqp": taken_port})


async def test_no_other_process_is_given_the_same_ports_and_their_user_may_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(ports.MOST_HELD + 3):
        free_ports(1)
    monkeypatch.setattr(ports.secrets, "randbelow", lambda _: 1234)
    mine = free_ports(3)
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SAME_DRAW), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert other.stdin is not None
    assert other.stdout is not None
    theirs = json.loads(await other.stdout.readline())
    assert len({*mine, *theirs}) == 6
    for port in (*mine, *theirs):
        assert 20_000 < port < 61_000, "below the ephemeral range"
        server = await asyncio.start_server(lambda reader, writer: writer.close(), LOOPBACK, port)
        assert await ports.accepts_connections(port)
        server.close()
        await server.wait_closed()
    other.stdin.close()
    await other.wait()


async def test_a_lock_excludes_and_names_the_holder(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path / "lock"), FolderLock(tmp_path / "lock")
    await first.take()
    first.note(None)
    with pytest.raises(NodeError, match=r"already runs in .* \(process \d+\)"):
        await second.take()
    with pytest.raises(NodeError, match="already started by this process"):
        await first.take()
    first.free()
    await second.take()
    second.free()


def test_configuration_listens_on_loopback_only() -> None:
    state = NodeState(user="tmq", password="secret", ports={"amqp": 1, "rabbitmq_management": 2})
    text = server_config(state, ("rabbitmq_management", "rabbitmq_shovel"), "channel_max = 99")
    lines = text.splitlines()
    assert "listeners.tcp.1 = 127.0.0.1:1" in lines
    assert "management.tcp.ip = 127.0.0.1" in lines
    assert "management.tcp.port = 2" in lines
    assert lines[-1] == "channel_max = 99"
    text = server_user(NodeState(user="tmq", password='a:"é'))
    assert text == "[{rabbit,[{default_user,<<116,109,113>>},{default_pass,<<97,58,34,195,169>>}]}].\n", "byte by byte"


def test_environment_leaves_no_path_of_a_system_wide_broker(tmp_path: Path) -> None:
    state = NodeState(user="u", password="p", ports={"amqp": 1, "dist": 2, "epmd": 3})
    environment = server_environment(tmp_path, "tmq@localhost", state)
    paths = {name: value for name, value in environment.items() if value.startswith("/") and name != "PATH"}
    assert len(paths) > 10
    assert all(Path(value).is_relative_to(tmp_path) for value in paths.values())
    assert "p" not in environment.values()


def test_before_the_boot_a_folder_of_plugins_is_replaced_only_where_none_is_wanted() -> None:
    assert "make_symlink" in boot_script(rabbit_only=True)
    assert "RABBITMQ_PLUGINS_DIR" not in boot_script(rabbit_only=False)
    for text in (boot_script(rabbit_only=True), boot_script(rabbit_only=False)):
        assert "Applications = [kernel, stdlib, rabbit, " in text
        assert text.endswith(".\n"), "Erlang evaluates nothing of a file whose last expression has no end"


def test_an_excerpt_shows_what_led_to_a_failed_boot_and_else_the_ends_of_everything(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "tmq.log").write_text("\n".join(f"log {n}" for n in range(100)))
    said = failure_excerpt(tmp_path)
    assert "log 99" in said
    assert "log 50" not in said
    assert str(tmp_path / "log") in said
    noise = [f"2026-01-01 00:00:00.0+00:00 [info] <0.1.0> step {n}" for n in range(50)]
    cause = "2026-01-01 00:00:00.0+00:00 [error] <0.132.0> no setting with that name"
    crash = [f"crash line {n}" for n in range(100)]
    (tmp_path / "console.log").write_text("\n".join([*noise, cause, "", "BOOT FAILED", "====", "reason", *crash]))
    lines = failure_excerpt(tmp_path).splitlines()
    assert "no setting with that name" in lines
    assert "reason" in lines
    assert len(lines) < 30


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


@pytest.mark.parametrize(("older", "newer"), [("3.9.13", "3.12.1"), ("4.0.9", "4.0.10"), ("4.1.0-rc.1", "4.1.0")])
def test_of_several_releases_the_newest_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: str, newer: str
) -> None:
    monkeypatch.setenv("RABBITMQ_HOME", f"{tmp_path}/rabbitmq_server-*")
    for version in (newer, older):
        script = tmp_path / f"rabbitmq_server-{version}" / "sbin" / "rabbitmq-server"
        script.parent.mkdir(parents=True)
        script.touch(mode=0o755)
    assert find_rabbitmq() == tmp_path / f"rabbitmq_server-{newer}" / "sbin" / "rabbitmq-server"


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
