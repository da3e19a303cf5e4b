"""A real broker for the tests that ask for one, started once a session: given, in Docker, or a private node."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiormq
import pytest

from trinity_mq.bus.node import PrivateNode
from trinity_mq.bus.topology import Topology

URL_VARIABLE = "TRINITY_MQ_TEST_BROKER_URL"
IMAGE_VARIABLE = "TRINITY_MQ_TEST_RABBITMQ_IMAGE"
DEFAULT_IMAGE = "rabbitmq:4-management"
START_TIMEOUT = 60.0


@dataclass(frozen=True)
class RunningBroker:
    url: str
    origin: str
    version: str


USED = pytest.StashKey[RunningBroker]()
NODE = pytest.StashKey[PrivateNode]()


def pytest_report_header() -> str:
    choice = f"{URL_VARIABLE}" if os.environ.get(URL_VARIABLE) else "Docker if it answers, else a private node"
    return f"broker: {choice}; started when a test asks for it"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    used = config.stash.get(USED, None)
    if used is not None:
        terminalreporter.write_line(f"broker: RabbitMQ {used.version}, {used.origin}")


@pytest.fixture(scope="session")
def broker_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """The URL of a real RabbitMQ that lives as long as the session."""
    if given := os.environ.get(URL_VARIABLE):
        yield _note(pytestconfig, given, f"given by {URL_VARIABLE}")
    elif _docker_answers():
        yield from _container(pytestconfig)
    else:
        yield from _private_node(pytestconfig)


@pytest.fixture(scope="session")
def broker_node(broker_url: str, pytestconfig: pytest.Config) -> PrivateNode:
    """The node behind ``broker_url``, for tests that need its tools; skips where it is not ours."""
    node = pytestconfig.stash.get(NODE, None)
    if node is None:
        pytest.skip("needs the tools of a private node")
    return node


@pytest.fixture
def unique_run(request: pytest.FixtureRequest) -> Iterator[str]:
    """A run name that no other test uses; what a broker test leaves behind under it is deleted."""
    run = f"t{secrets.token_hex(5)}"
    yield run
    used = request.config.stash.get(USED, None)
    if used is not None and request.node.get_closest_marker("broker"):
        asyncio.run(_clean(used.url, Topology(run)))


@pytest.fixture
def topology(unique_run: str) -> Topology:
    """All names of a run of this test's own."""
    return Topology(unique_run)


def _private_node(config: pytest.Config) -> Iterator[str]:
    base = Path(tempfile.mkdtemp(prefix="tmq-"))
    node = PrivateNode(base)

    async def start() -> None:
        await node.start()
        await node.wait_ready(START_TIMEOUT)

    try:
        asyncio.run(start())
        config.stash[NODE] = node
        yield _note(config, node.url, "a private node")
    finally:
        asyncio.run(node.kill())
        shutil.rmtree(base, ignore_errors=True)


def _container(config: pytest.Config) -> Iterator[str]:
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # its reaper needs an image of its own
    from testcontainers.core.container import DockerContainer

    image = os.environ.get(IMAGE_VARIABLE, DEFAULT_IMAGE)
    password = secrets.token_hex(16)
    container = DockerContainer(image).with_exposed_ports(5672)
    container.with_env("RABBITMQ_DEFAULT_USER", "tmq").with_env("RABBITMQ_DEFAULT_PASS", password)
    with container:
        host, port = container.get_container_host_ip(), container.get_exposed_port(5672)
        yield _note(config, f"amqp://tmq:{password}@{host}:{port}/%2F", f"container of {image}")


def _note(config: pytest.Config, url: str, origin: str) -> str:
    config.stash[USED] = RunningBroker(url, origin, asyncio.run(_version(url)))
    return url


async def _version(url: str) -> str:
    async with asyncio.timeout(START_TIMEOUT):
        while True:
            try:
                async with aiormq.connect(url) as connection:
                    return str(connection.server_properties["version"])
            except (ConnectionError, aiormq.exceptions.AMQPError):
                await asyncio.sleep(0.2)  # a container publishes its port long before the broker listens


async def _clean(url: str, topology: Topology) -> None:
    async with aiormq.connect(url) as connection:
        channel = await connection.channel()
        for queue in topology.durable:
            await channel.queue_delete(queue.name)
        for exchange in topology.exchanges:
            await channel.exchange_delete(exchange)


def _docker_answers() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    try:
        return subprocess.run([docker, "info"], capture_output=True, timeout=10, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
