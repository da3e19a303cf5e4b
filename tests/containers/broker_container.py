"""A broker in a container for a test session, by testcontainers; it ends with the process that asked for it.

testcontainers' own RabbitMqContainer is left aside: it brings another AMQP client (pika) that blocks between tries, and
takes port, user and password from the environment. Its reaper, Ryuk, is an image of its own; it is used where it is
there. Without it a guard process removes the container as soon as its owner is gone, and the next session removes
what a killed guard has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from tests.containers.docker_command import Owned, docker
from trinity_mq.local_broker.container import ERLANG, OPEN_FILES, NodeError

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

IMAGE_VARIABLE = "TRINITY_MQ_TEST_RABBITMQ_IMAGE"
BUILT_IMAGE = "trinity-mq-test/rabbitmq:4.0"
OFFICIAL_IMAGE = "rabbitmq:4-management"
RYUK_VARIABLE = "TESTCONTAINERS_RYUK_DISABLED"
OWNER_LABEL = "trinity-mq.test-owner"
OWNER = re.compile(r"(?P<machine>.*)/(?P<pid>\d+)/(?P<created>[\d.]+)")
AMQP_PORT = 5672
ANSWER_SECONDS = 10
CLOCK_TOLERANCE = 2.0
"""Seconds by which the start time of one process may differ between two readings."""


def engine_version() -> str | None:
    """The version of the Docker engine that answers, None where none does."""
    return _ask("version", "--format", "{{.Server.Version}}")


def chosen_image() -> str:
    """The image that the environment names, else the one of build-images where it is there, else the official one."""
    if named := os.environ.get(IMAGE_VARIABLE):
        return named
    return BUILT_IMAGE if has_image(BUILT_IMAGE) else OFFICIAL_IMAGE


def has_image(image: str) -> bool:
    return _ask("image", "inspect", "--format", "{{.Id}}", image) is not None


def fetch(image: str) -> None:
    """Pull what is not there; NodeError where that fails."""
    if not has_image(image):
        asyncio.run(docker("pull", "--quiet", image, timeout=None))


@dataclass(frozen=True)
class BrokerContainer:
    """A started container; its broker may not listen yet."""

    url: str
    container_id: str
    owned: Owned

    async def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` in it and return what it prints, as a private node's tools do."""
        return await docker("exec", "--user", "rabbitmq", self.container_id, "rabbitmqctl", "-q", *arguments)

    def check(self) -> None:
        """Raise NodeError with the end of its log if it has ended."""
        if self.owned.pid is None:
            raise NodeError(f"the broker's container ended\n{_ask('logs', '--tail', '20', self.container_id)}")


@contextlib.contextmanager
def broker_container(image: str) -> Iterator[BrokerContainer]:
    """Have a container of ``image`` with a user of its own; removed at the end, also of a process that is killed."""
    if not has_image(os.environ.get("RYUK_CONTAINER_IMAGE", "testcontainers/ryuk:0.8.1")):
        os.environ.setdefault(RYUK_VARIABLE, "true")
    from docker.types import Ulimit
    from testcontainers.core.container import DockerContainer

    asyncio.run(remove_orphans())
    password = secrets.token_hex(16)
    container = DockerContainer(
        image,
        labels={OWNER_LABEL: owner_of(psutil.Process())},
        ulimits=[Ulimit(name="nofile", soft=OPEN_FILES, hard=OPEN_FILES)],
        hostname="tmq-test",
    )
    container.with_env("RABBITMQ_DEFAULT_USER", "tmq").with_env("RABBITMQ_DEFAULT_PASS", password)
    container.with_env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", ERLANG)
    loopback = _loopback_reaches(container)
    container.ports[f"{AMQP_PORT}/tcp"] = ("127.0.0.1", None) if loopback else None
    owned = None
    try:
        container.start()
        identity = container.get_container_id()
        owned = Owned(identity)
        host = "127.0.0.1" if loopback else container.get_container_host_ip()
        port = (
            container.get_docker_client().port(identity, AMQP_PORT)
            if loopback
            else container.get_exposed_port(AMQP_PORT)
        )
        yield BrokerContainer(f"amqp://tmq:{password}@{host}:{port}/%2F", identity, owned)
    finally:
        container.stop()
        if owned is not None:
            asyncio.run(owned.release())


def _loopback_reaches(container: DockerContainer) -> bool:
    """Whether a port published on loopback only is ours to use: the engine is here, and we are not in its network.

    testcontainers takes a machine with a /.dockerenv for a container and would have the port open to all.
    """
    from testcontainers.core.config import ConnectionMode, testcontainers_config

    client = container.get_docker_client()
    if testcontainers_config.connection_mode_override or testcontainers_config.tc_host_override:
        return False
    local = os.environ.get("DOCKER_HOST", "unix://").startswith("unix://")
    return local and client.get_connection_mode() != ConnectionMode.bridge_ip


def owner_of(process: psutil.Process) -> str:
    """A process as a label: the id alone may be another one's later, and another machine's on a shared engine."""
    return f"{platform.node()}/{process.pid}/{process.create_time():.1f}"


def is_gone(owner: str) -> bool:
    """Whether the process of a label has ended; False for one of another machine, of which nothing is known here."""
    form = OWNER.fullmatch(owner)
    if form is None or form["machine"] != platform.node():
        return False
    try:
        process = psutil.Process(int(form["pid"]))
        ended = process.status() == psutil.STATUS_ZOMBIE
        return ended or abs(process.create_time() - float(form["created"])) > CLOCK_TOLERANCE
    except psutil.NoSuchProcess:
        return True


async def remove_orphans() -> list[str]:
    """Remove the containers of test sessions that were killed; return their ids."""
    form = f'{{{{.ID}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
    listed = await docker("ps", "--all", "--filter", f"label={OWNER_LABEL}", "--format", form)
    orphans = [one for one, _, owner in (line.partition(" ") for line in listed.splitlines()) if is_gone(owner)]
    for orphan in orphans:
        with contextlib.suppress(NodeError):  # another session removes it at the same moment
            await docker("rm", "--force", "--volumes", orphan)
    return orphans


def _ask(*arguments: str) -> str | None:
    command = shutil.which("docker")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
