"""The broker of the tests itself: which one is chosen, and that a session which is killed leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests import broker_fixtures
from tests.containers.broker_container import (
    BUILT_IMAGE,
    OFFICIAL_IMAGE,
    chosen_image,
    engine_version,
    has_image,
    is_gone,
    owner_of,
    remove_orphans,
)
from tests.containers.docker_command import docker
from tests.waiting import until

SESSION = """
import sys
from tests.containers.broker_container import broker_container

with broker_container(sys.argv[1]) as broker:
    print(broker.container_id, broker.owned.pid, flush=True)
    sys.stdin.read()
"""
needs_image = pytest.mark.skipif(
    engine_version() is None or not has_image(chosen_image()), reason="needs a Docker engine with an image of RabbitMQ"
)


@pytest.fixture
def session() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A process with a broker in a container, the container, and the guard of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION, chosen_image()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        container, guard = process.stdout.readline().split()
        yield process, container, int(guard)
        process.kill()


async def there(container: str) -> bool:
    return bool(await docker("ps", "--all", "--quiet", "--filter", f"id={container}"))


async def gone(container: str) -> bool:
    return not await there(container)


@needs_image
class TestKilledSession:
    async def test_its_guard_removes_the_container(self, session: tuple[subprocess.Popen[str], str, int]) -> None:
        process, container, _ = session
        assert await there(container)
        process.send_signal(signal.SIGKILL)
        await until(lambda: gone(container), 30.0)

    async def test_the_next_session_removes_what_a_killed_guard_has_left(
        self, session: tuple[subprocess.Popen[str], str, int]
    ) -> None:
        process, container, guard = session
        assert container[:12] not in await remove_orphans()
        os.kill(guard, signal.SIGKILL)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert container[:12] in await remove_orphans()
        assert await gone(container)

    async def test_one_that_ends_leaves_nothing(self, session: tuple[subprocess.Popen[str], str, int]) -> None:
        process, container, guard = session
        process.communicate("")
        assert process.returncode == 0
        assert await gone(container)
        assert not psutil.pid_exists(guard)


def test_owners_are_known_by_machine_id_and_start() -> None:
    mine = owner_of(psutil.Process())
    machine, pid, start = mine.rsplit("/", 2)
    assert not is_gone(mine)
    assert is_gone(f"{machine}/{pid}/{float(start) - 100:.1f}")
    assert not is_gone(f"elsewhere/{pid}/{float(start) - 100:.1f}")
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    label = owner_of(psutil.Process(ended.pid))
    assert not is_gone(label)
    ended.communicate(b"\n")
    assert is_gone(label)
    assert not any(is_gone(label) for label in ("", "x", "a/b", "a/b/c", f"{machine}/x/1.0"))


class TestChoice:
    @pytest.fixture(autouse=True)
    def _nothing_wished(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TEST_BROKER_URL", "TEST_BROKER", "TEST_RABBITMQ_IMAGE", "RABBITMQ_ROOT"):
            monkeypatch.delenv(f"TRINITY_MQ_{name}", raising=False)
        monkeypatch.setattr(broker_fixtures, "engine_version", lambda: "28.0")

    def test_docker_comes_before_a_private_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert broker_fixtures.broker_kind() == "docker"
        assert "Docker 28.0" in broker_fixtures.pytest_report_header()
        monkeypatch.setattr(broker_fixtures, "engine_version", lambda: None)
        assert broker_fixtures.broker_kind() == "node"

    def test_a_url_comes_before_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRINITY_MQ_TEST_BROKER_URL", "amqp://user:secret@broker/")
        assert broker_fixtures.broker_kind() == "given"
        assert "secret" not in broker_fixtures.pytest_report_header()

    @pytest.mark.parametrize("setting", [("TRINITY_MQ_TEST_BROKER", "node"), ("TRINITY_MQ_RABBITMQ_ROOT", "/nowhere")])
    def test_a_private_node_can_be_asked_for(self, setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(*setting)
        assert broker_fixtures.broker_kind() == "node"

    def test_a_wish_that_cannot_be_met_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRINITY_MQ_TEST_BROKER", "podman")
        with pytest.raises(pytest.UsageError, match=r"=podman: set it to one of docker, node"):
            broker_fixtures.broker_kind()
        monkeypatch.setenv("TRINITY_MQ_TEST_BROKER", "docker")
        monkeypatch.setattr(broker_fixtures, "engine_version", lambda: None)
        with pytest.raises(pytest.UsageError, match="scripts/docker-engine start"):
            broker_fixtures.broker_kind()

    def test_the_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known = {BUILT_IMAGE}
        monkeypatch.setattr("tests.containers.broker_container.has_image", lambda image: image in known)
        assert chosen_image() == BUILT_IMAGE
        known.clear()
        assert chosen_image() == OFFICIAL_IMAGE
        monkeypatch.setenv("TRINITY_MQ_TEST_RABBITMQ_IMAGE", "mine:1")
        assert chosen_image() == "mine:1"
