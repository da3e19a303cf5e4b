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
NEEDS_IMAGE = pytest.mark.skipif(
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


async def gone(container: str) -> bool:
    return not await docker("ps", "--all", "--quiet", "--filter", f"id={container}")


@NEEDS_IMAGE
@pytest.mark.parametrize("killed", ["session", "session and guard", "none"])
async def test_a_session_leaves_no_container(session: tuple[subprocess.Popen[str], str, int], killed: str) -> None:
    """Its guard removes it where the session is killed, and the next session where the guard is killed too."""
    process, container, guard = session
    assert not await gone(container)
    assert container[:12] not in await remove_orphans()
    if killed == "none":
        process.communicate("")
        assert process.returncode == 0
        assert not psutil.pid_exists(guard)
    else:
        if killed == "session and guard":
            os.kill(guard, signal.SIGKILL)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if killed == "session and guard":
            assert container[:12] in await remove_orphans()
    await until(lambda: gone(container), 30.0)


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


@pytest.mark.parametrize(
    ("settings", "engine", "kind"),
    [
        ({}, "28.0", "docker"),
        ({}, None, "node"),
        ({"TEST_BROKER_URL": "amqp://user:secret@broker/"}, "28.0", "given"),
        ({"TEST_BROKER": "node"}, "28.0", "node"),
        ({"RABBITMQ_ROOT": "/nowhere"}, "28.0", "node"),
        ({"TEST_BROKER": "podman"}, "28.0", "=podman: set it to one of docker, node"),
        ({"TEST_BROKER": "docker"}, None, "scripts/docker-engine start"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_the_broker_of_the_tests_is_chosen(
    settings: dict[str, str], engine: str | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TEST_BROKER_URL", "TEST_BROKER", "TEST_RABBITMQ_IMAGE", "RABBITMQ_ROOT"):
        monkeypatch.delenv(f"TRINITY_MQ_{name}", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(f"TRINITY_MQ_{name}", value)
    monkeypatch.setattr(broker_fixtures, "engine_version", lambda: engine)
    if kind not in {"docker", "node", "given"}:
        with pytest.raises(pytest.UsageError, match=kind):
            broker_fixtures.broker_kind()
        return
    assert broker_fixtures.broker_kind() == kind
    assert "secret" not in broker_fixtures.pytest_report_header()
