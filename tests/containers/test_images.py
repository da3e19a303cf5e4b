"""The images of build-images: as the official ones to those who use them, and nobody in them is root."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiormq
import psutil
import pytest

from tests.containers.broker_container import OWNER_LABEL, engine_version, has_image, owner_of
from tests.containers.docker_command import docker
from tests.waiting import until
from trinity_mq.local_broker.node import NodeError

BUILD = Path(__file__).parent / "build-images"
BROKERS = {"3.10": "3.10.8", "4.0": "4.0.5"}
START_SECONDS = 200.0


def wanted(image: str) -> pytest.MarkDecorator:
    missing = engine_version() is None or not has_image(image)
    return pytest.mark.skipif(missing, reason=f"needs a Docker engine with {image} (tests/containers/build-images)")


class Container:
    """One that runs for a test, health and all."""

    def __init__(self, identity: str) -> None:
        self.identity = identity

    async def ask(self, form: str) -> str:
        return await docker("inspect", "--format", form, self.identity)

    async def exec(self, *words: str, user: str | None = None) -> str:
        return await docker("exec", *([f"--user={user}"] if user else []), self.identity, *words)

    async def url(self) -> str:
        return f"amqp://lena:s3cret@{await docker('port', self.identity, '5672')}/agents"

    async def is_healthy(self) -> bool:
        assert await self.ask("{{.State.Running}}") == "true", await docker("logs", self.identity)
        return await self.ask("{{.State.Health.Status}}") == "healthy"


@pytest.fixture(params=[pytest.param(tag, marks=wanted(f"trinity-mq-test/rabbitmq:{tag}")) for tag in BROKERS])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Container, str]]:
    """A broker's container from its first moment on, and the version that it should be."""
    settings = {"USER": "lena", "PASS": "s3cret", "VHOST": "agents"}
    identity = await docker(
        "run", "--detach", f"--label={OWNER_LABEL}={owner_of(psutil.Process())}", "--publish=127.0.0.1::5672",
        *(f"--env=RABBITMQ_DEFAULT_{name}={value}" for name, value in settings.items()),
        f"trinity-mq-test/rabbitmq:{request.param}",
    )  # fmt: skip
    yield Container(identity), BROKERS[request.param]
    await docker("rm", "--force", "--volumes", identity)


@pytest.mark.extended
@pytest.mark.broker
@pytest.mark.timeout(300)
async def test_a_broker_is_as_the_official_one(broker: tuple[Container, str]) -> None:
    container, version = broker
    # the race that kills an image whose health check is rabbitmqctl as root: asked before there is a cookie
    asked = [container.exec("healthy"), container.exec("rabbitmqctl", "status")]
    told = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, NodeError) for one in told)
    await until(container.is_healthy, START_SECONDS)

    async with aiormq.connect(await container.url()) as connection:
        assert connection.server_properties["version"] == version
    with pytest.raises((aiormq.exceptions.AMQPError, ConnectionError)):
        await aiormq.connect((await container.url()).replace("s3cret", "guess"))
    assert (await container.exec("rabbitmqctl", "-q", "list_users")).split()[-2:] == ["lena", "[administrator]"]
    plugins = (await container.exec("rabbitmq-plugins", "list", "--quiet", "--minimal", "--enabled")).split()
    assert {"rabbitmq_management", "rabbitmq_prometheus"} <= set(plugins)
    every = (await container.exec("rabbitmq-plugins", "list", "--quiet", "--minimal")).split()
    assert {"rabbitmq_stream", "rabbitmq_shovel"} <= set(every)

    processes = (await docker("top", container.identity, "-o", "pid,uid,comm")).splitlines()[1:]
    assert {line.split()[1] for line in processes}.isdisjoint({"0"})
    assert (await container.exec("cat", "/proc/1/comm")).startswith("beam")
    assert (await container.exec("cat", "/var/lib/rabbitmq/.erlang.cookie", user="0")).isalpha()
    await docker("stop", "-t", "30", container.identity)
    assert await container.ask("{{.State.ExitCode}} {{.State.OOMKilled}}") == "0 false"


def test_wrong_names_and_no_engine_are_told(tmp_path: Path) -> None:
    settings = os.environ | {"DOCKER_HOST": "unix:///nowhere.sock", "TRINITY_MQ_DOCKER_FOLDER": str(tmp_path)}

    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run([BUILD, *words], capture_output=True, text=True, check=False, env=settings)
        return done.returncode, done.stderr.splitlines()[-1]

    assert said("--only", "rabbitmq:5") == (
        2,
        "no image is called rabbitmq:5: one of python:3.11-slim rabbitmq:3.10 rabbitmq:4.0",
    )
    code, why = said()
    assert code == 69
    assert "no Docker engine answers" in why
