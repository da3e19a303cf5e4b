"""A real broker for the tests that ask for one, started once a session: given, in Docker, or a private node."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiormq
import pytest
from yarl import URL

from tests import matrix, other_debian
from tests.containers.broker_container import (
    IMAGE_VARIABLE,
    broker_container,
    chosen_image,
    engine_version,
    fetch,
)
from trinity_mq.bus.base import Envelope
from trinity_mq.bus.permissions import Permissions, rabbitmqctl_lines
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.local_broker.node import NodeError, PrivateNode, find_rabbitmq

URL_VARIABLE = "TRINITY_MQ_TEST_BROKER_URL"
KIND_VARIABLE = "TRINITY_MQ_TEST_BROKER"
"""``docker`` or ``node``: that, and nothing else. Not set: Docker where an engine answers, else a private node."""
KINDS = ("docker", "node")
START_TIMEOUT = 60.0
CONTAINER_TIMEOUT = 180.0


class Tools(Protocol):
    """What a test may do to the broker behind its back."""

    async def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl``."""


@dataclass(frozen=True)
class RunningBroker:
    url: str
    origin: str
    version: str

    def told(self) -> tuple[str, str]:
        """What a worker tells: no address, which holds a password."""
        return self.version, self.origin


USED = pytest.StashKey[RunningBroker]()
TOOLS = pytest.StashKey[Tools]()
OF_WORKERS = pytest.StashKey[set[tuple[str, str]]]()
MATRIX = pytest.StashKey[matrix.Matrix]()


def pytest_configure(config: pytest.Config) -> None:
    if (asked := matrix.asked(config)) is not None:
        config.stash[MATRIX] = asked
        config.pluginmanager.register(asked)
    root = os.environ.get(other_debian.ROOT_VARIABLE)
    if root and not hasattr(config, "workerinput"):  # workers inherit the environment
        folder = Path(tempfile.mkdtemp(prefix="tmq-root-"))
        config.add_cleanup(lambda: shutil.rmtree(folder))
        try:
            os.environ.update(other_debian.wrapped(Path(root), folder, os.environ["PATH"]))
        except other_debian.UnusableRoot as error:
            raise pytest.UsageError(str(error)) from error


def pytest_report_header() -> str:
    return f"broker: {_expected()}; of tests that start their own: {_own()}"


def _expected() -> str:
    kind = broker_kind()
    if kind == "given":
        return f"given by {URL_VARIABLE}"
    if kind == "docker":
        return f"a container of {chosen_image()} in Docker {engine_version()}, started when a test asks for it"
    return f"a private node ({_own()}), started when a test asks for it"


def _own() -> str:
    script = find_rabbitmq()
    return script.parts[-3] if script else "none: RabbitMQ is not installed"


def broker_kind() -> str:
    """``given``, ``docker`` or ``node``; pytest.UsageError for a wish that cannot be understood or met."""
    if os.environ.get(URL_VARIABLE):
        return "given"
    wish = os.environ.get(KIND_VARIABLE)
    if wish and wish not in KINDS:
        raise pytest.UsageError(f"{KIND_VARIABLE}={wish}: set it to one of {', '.join(KINDS)}, or leave it out")
    if wish == "docker" and engine_version() is None:
        raise pytest.UsageError(
            f'{KIND_VARIABLE}=docker, but no Docker engine answers: eval "$(scripts/docker-engine start)"'
        )
    if wish:
        return wish
    return "docker" if not os.environ.get(other_debian.ROOT_VARIABLE) and engine_version() is not None else "node"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ran = set(config.stash.get(OF_WORKERS, set()))
    if (used := config.stash.get(USED, None)) is not None:
        ran.add(used.told())
    for version, origin in sorted(ran):
        terminalreporter.write_line(f"broker: RabbitMQ {version}, {origin}")
    if (table := config.stash.get(MATRIX, None)) is not None:
        for line in table.finish(version for version, _ in ran):
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended: take over what it says of its broker."""
    if said := getattr(node, "workeroutput", {}).get("broker"):
        node.config.stash.setdefault(OF_WORKERS, set()).add(tuple(said))


@pytest.fixture(scope="session")
def broker_url(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real RabbitMQ that lives as long as the session (of the worker, where there are several)."""
    kind, aside = broker_kind(), ""
    if kind == "given":
        yield _note(pytestconfig, os.environ[URL_VARIABLE], f"given by {URL_VARIABLE}")
        return
    if kind == "docker":
        image = chosen_image()
        try:
            fetch(image)
        except NodeError as error:
            if os.environ.get(IMAGE_VARIABLE) or os.environ.get(KIND_VARIABLE):
                raise
            aside = f" (Docker answers, but has no {image}: tests/containers/build-images makes one. {error})"
        else:
            yield from _container(pytestconfig, image)
            return
    yield from _private_node(pytestconfig, tmp_path_factory.mktemp("broker"), aside)


@pytest.fixture(scope="session")
def broker_node(broker_url: str, pytestconfig: pytest.Config) -> Tools:
    """The tools of the broker behind ``broker_url``, for tests that need them; skips where it is not ours."""
    tools = pytestconfig.stash.get(TOOLS, None)
    if tools is None:
        pytest.skip("needs the tools of a broker that the tests start themselves")
    return tools


@pytest.fixture
def unique_run(request: pytest.FixtureRequest) -> Iterator[str]:
    """A run name that no other test uses; what a broker test leaves behind under it is deleted."""
    run = f"t{secrets.token_hex(5)}"
    yield run
    used = request.config.stash.get(USED, None)
    if used is not None and request.node.get_closest_marker("broker"):
        asyncio.run(delete_run(used.url, Topology(run)))


@pytest.fixture
def topology(unique_run: str) -> Topology:
    """All names of a run of this test's own."""
    return Topology(unique_run)


@dataclass(frozen=True)
class Users:
    """Makes users of a broker."""

    url: str
    tools: Tools

    async def make(self, name: str, granted: Permissions) -> str:
        """Make a user, and return its URL, with a password of its own. One expression does what several commands do,
        each of which takes a second of the processor.
        """
        password = secrets.token_hex(12)
        calls = [
            ("add_user", name, password),
            ("set_permissions", name, "/", granted.configure, granted.write, granted.read),
            *(("set_topic_permissions", name, "/", on.exchange, on.write, on.read) for on in granted.topics),
        ]
        await self.tools.ctl("eval", ", ".join(_internal_call(*call) for call in calls) + ".")
        return self.url_of(name, password)

    async def make_by_commands(self, name: str, granted: Permissions) -> str:
        """Make a user with the commands that are printed for one, and return its URL."""
        password = secrets.token_hex(12)
        await self.tools.ctl("add_user", name, password)
        for line in rabbitmqctl_lines(name, "/", granted):
            command, *words = shlex.split(line)
            assert command == "rabbitmqctl"
            await self.tools.ctl(*words)
        return self.url_of(name, password)

    def url_of(self, name: str, password: str) -> str:
        return str(URL(self.url).with_user(name).with_password(password))


def _internal_call(function: str, *words: str) -> str:
    """Return a call of the broker's own function that changes users, in Erlang."""
    texts = ['<<"{}">>'.format(word.replace("\\", r"\\")) for word in (*words, "test")]
    return f"rabbit_auth_backend_internal:{function}({', '.join(texts)})"


@asynccontextmanager
async def connected(url: str, topology: Topology, **settings: Any) -> AsyncIterator[RabbitBus]:
    """A connected bus; the names of its connections begin with ``test-RUN``."""
    bus = RabbitBus(url, topology, config=BrokerConfig(**settings), name=f"test-{topology.run}")
    await bus.connect()
    try:
        yield bus
    finally:
        await bus.close()


def note(text: object, size: int = 0, **fields: Any) -> Envelope:
    """A message of no kind of ours: a text, and so many zeros."""
    return Envelope(body=str(text).encode() + bytes(size), kind="note", **fields)


def _private_node(config: pytest.Config, base: Path, aside: str) -> Iterator[str]:
    node = PrivateNode(base)

    async def start() -> None:
        await node.start()
        await node.wait_ready(START_TIMEOUT)

    try:
        asyncio.run(start())
        config.stash[TOOLS] = node
        yield _note(config, node.url, f"a private node{aside}")
    finally:
        asyncio.run(node.kill())
        shutil.rmtree(base, ignore_errors=True)


@contextmanager
def own_node(**settings: Any) -> Iterator[PrivateNode]:
    """A private node that a test may stop, starve or set up as it likes."""
    base = Path(tempfile.mkdtemp(prefix="tmq-"))
    node = PrivateNode(base / "broker", **settings)
    try:
        asyncio.run(node.launch())
        yield node
    finally:
        asyncio.run(node.kill())
        shutil.rmtree(base, ignore_errors=True)


def _container(config: pytest.Config, image: str) -> Iterator[str]:
    with broker_container(image) as container:
        config.stash[TOOLS] = container
        yield _note(config, container.url, f"container of {image}", container.check)


def _note(config: pytest.Config, url: str, origin: str, check: Callable[[], None] = lambda: None) -> str:
    used = RunningBroker(url, origin, asyncio.run(_version(url, check)))
    config.stash[USED] = used
    if hasattr(config, "workeroutput"):
        config.workeroutput["broker"] = used.told()
    return url


async def _version(url: str, check: Callable[[], None]) -> str:
    async with asyncio.timeout(CONTAINER_TIMEOUT):
        while True:
            try:
                async with aiormq.connect(url) as connection:
                    return str(connection.server_properties["version"])
            except (ConnectionError, aiormq.exceptions.AMQPError):
                check()
                await asyncio.sleep(0.2)  # a container publishes its port long before the broker listens


async def delete_run(url: str, topology: Topology) -> None:
    """Delete the lasting queues and the exchanges of a run."""
    async with aiormq.connect(url) as connection:
        channel = await connection.channel()
        for queue in topology.durable:
            await channel.queue_delete(queue.name)
        for exchange in topology.exchanges:
            await channel.exchange_delete(exchange)
