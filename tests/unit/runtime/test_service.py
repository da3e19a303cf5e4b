from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import stat
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runtime.test_agent import Idler as AnyIdler
from trinity_mq.bus.memory.bus import MemoryBroker
from trinity_mq.cli.health import HEALTH_VARIABLE as READ_VARIABLE
from trinity_mq.cli.health import check_health, health
from trinity_mq.runtime.serve import (
    EXTENSION,
    HEALTH_VARIABLE,
    LONGEST_DRAIN,
    HealthFile,
    LivenessReporter,
    ServiceManager,
    status_of,
)
from trinity_mq.testing.virtual_time import run_virtually


class Idler(AnyIdler):
    """Waits until it is drained, and then as long as it is told to."""

    def __init__(self, drain_seconds: float = 0.0) -> None:
        super().__init__(MemoryBroker())
        self._drain_seconds = drain_seconds

    async def serve(self) -> None:
        self.set_state("idle", "a slice")
        await self.draining.wait()
        await asyncio.sleep(self._drain_seconds)


class Ears:
    """The service manager's end of the socket."""

    def __init__(self, address: str | Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(str(address))

    def heard(self) -> list[list[str]]:
        """The datagrams since the last call, each as its lines."""
        found = []
        while True:
            try:
                found.append(self.socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return found


class Noting(ServiceManager):
    """Notes what is told, and when."""

    def __init__(self, watchdog: float | None) -> None:
        super().__init__("/nowhere", watchdog)
        self.told: list[tuple[float, tuple[str, ...]]] = []
        self.deaf = False

    def send(self, *lines: str) -> bool:
        if not self.deaf:
            self.told.append((asyncio.get_running_loop().time(), lines))
        return not self.deaf

    def times(self, line: str) -> list[float]:
        return [when for when, lines in self.told if line in lines]


pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def ears(tmp_path: Path) -> Iterator[Ears]:
    made = Ears(tmp_path / "notify")
    yield made
    made.socket.close()


def live(signs: LivenessReporter, script: Any, agent: Idler | None = None) -> None:
    async def main() -> None:
        one = agent or Idler()
        running = asyncio.create_task(one.run_with_background(one.run(), signs.report(one)))
        await script(one)
        one.drain()
        await running

    run_virtually(main())


# -- what is asked of us


@pytest.mark.parametrize("is_supervised", [False, True], ids=["", "the agents of a supervisor say nothing"])
def test_the_environment_is_taken_out(tmp_path: Path, ears: Ears, is_supervised: bool) -> None:
    health_file = tmp_path / "health"
    environ = {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": str(os.getpid()),
        HEALTH_VARIABLE: str(health_file),
        "PATH": "/bin",
    }
    signs = LivenessReporter.from_environment(environ, supervised=is_supervised)
    assert environ == {"PATH": "/bin"}
    with signs.ended():
        live(signs, lambda _agent: asyncio.sleep(12))
        assert health_file.exists() != is_supervised
    heard = ears.heard()
    assert any("STOPPING=1" in lines for lines in heard) == bool(heard) != is_supervised
    assert not health_file.exists()
    assert is_supervised or signs.interval == 1.5
    with LivenessReporter(ServiceManager(str(tmp_path / "notify"))).ended():
        pass
    assert ears.heard() == [["STOPPING=1"]], "also where no agent has said so"


@pytest.mark.parametrize(
    ("address", "event"), [("vsock:2:1234", "service_manager_unknown"), ("/nowhere/gone", "service_manager_not_told")]
)
def test_a_manager_that_cannot_be_told_costs_one_line_of_log(address: str, event: str, logs: list[Any]) -> None:
    live(LivenessReporter.from_environment({"NOTIFY_SOCKET": address}), lambda _agent: asyncio.sleep(12))
    assert [entry["event"] for entry in logs if entry["event"].startswith("service_manager")] == [event]


def test_datagrams_go_to_paths_and_abstract_names_and_a_full_socket_does_not_block(ears: Ears, tmp_path: Path) -> None:
    name = f"tmq-test-{os.getpid()}"
    abstract = Ears(f"\0{name}")
    assert ServiceManager(f"@{name}").send("READY=1", "STATUS=up")
    assert abstract.heard() == [["READY=1", "STATUS=up"]]
    abstract.socket.close()
    manager = ServiceManager(str(tmp_path / "notify"))
    told = [manager.send("WATCHDOG=1") for _ in range(10_000)]
    assert (told[0], told[-1]) == (True, False)
    assert ears.heard()[0] == ["WATCHDOG=1"]
    assert manager.send("WATCHDOG=1")


@pytest.mark.parametrize(
    ("variables", "interval"),
    [
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, 5.0),  # another process is watched
        ({"WATCHDOG_USEC": "4000000"}, 2.0),  # whoever has the variable
        ({"WATCHDOG_USEC": "600000000"}, 5.0),  # the status is told more often
        ({"WATCHDOG_USEC": "soon"}, 5.0),
        ({"WATCHDOG_USEC": "-4"}, 5.0),
        ({"WATCHDOG_USEC": "0"}, 5.0),
        ({}, 5.0),
    ],
)
def test_the_watchdog_is_ours_or_not(variables: dict[str, str], interval: float, logs: list[Any]) -> None:
    signs = LivenessReporter.from_environment({"NOTIFY_SOCKET": "/nowhere", **variables})
    assert signs.interval == interval
    unusable = variables.get("WATCHDOG_USEC") in {"soon", "-4", "0"}
    assert [entry["event"] for entry in logs] == (["watchdog_unusable"] if unusable else [])


# -- what an agent's life sounds like


def test_ready_status_pings_stopping_in_order_and_what_was_not_heard_is_said_again() -> None:
    manager = Noting(watchdog=4.0)
    manager.deaf = True

    async def script(_agent: Idler) -> None:
        await asyncio.sleep(30)
        manager.deaf = False
        await asyncio.sleep(30)

    live(LivenessReporter(manager), script)
    assert "STATUS=idle; waits for a slice" in manager.told[0][1]
    assert len(manager.times("READY=1")) == len(manager.times("STOPPING=1")) == 1
    assert manager.times("READY=1") < manager.times("STOPPING=1")
    pings = manager.times("WATCHDOG=1")
    assert max(after - before for before, after in itertools.pairwise(pings)) <= 2.0
    said = [line for _, lines in manager.told for line in lines if line.startswith("STATUS=")]
    assert all(one != other for one, other in itertools.pairwise(said)), "only changes are told"


def test_not_ready_before_it_is_connected() -> None:
    manager = Noting(watchdog=4.0)
    agent = Idler()
    connect = agent.bus.connect

    async def late() -> None:
        await asyncio.sleep(100)
        await connect()

    agent.bus.connect = late  # type: ignore[method-assign]
    live(LivenessReporter(manager), lambda _agent: asyncio.sleep(110), agent)
    starting = [lines for when, lines in manager.told if when < manager.times("READY=1")[0]]
    assert len(starting) >= 40
    assert manager.times("READY=1")[0] - manager.told[0][0] >= 100
    assert all("WATCHDOG=1" in lines for lines in starting)
    assert all(any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in lines) for lines in starting)


def test_draining_before_the_connection_stands_ends_at_once() -> None:
    agent = Idler()
    agent.bus.connect = lambda: asyncio.sleep(1e6)  # type: ignore[method-assign, assignment]

    async def main() -> None:
        running = asyncio.create_task(agent.run())
        await asyncio.sleep(5)
        agent.drain()
        await asyncio.wait_for(running, 1)

    run_virtually(main())


def test_a_long_drain_asks_for_time_but_not_for_ever() -> None:
    manager = Noting(watchdog=20.0)
    live(LivenessReporter(manager), lambda _agent: asyncio.sleep(30), Idler(drain_seconds=LONGEST_DRAIN + 300))
    asked = [when for when, lines in manager.told if any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in lines)]
    begun = manager.times("STOPPING=1")[0]
    during = [when - begun for when in asked if when >= begun]
    assert during[0] == 0
    assert LONGEST_DRAIN - 10 <= during[-1] < LONGEST_DRAIN
    assert not any(20 < when < begun for when in asked), "no excuse while it works"
    assert f"EXTEND_TIMEOUT_USEC={int((EXTENSION + 5) * 1e6)}" in {line for _, lines in manager.told for line in lines}


async def test_the_status_names_what_is_wrong_with_the_broker() -> None:
    agent = Idler()

    class Troubled:
        trouble = "connection to amqp://tmq:secret@b:1/ lost:\n reset"

    agent.bus = Troubled()  # type: ignore[assignment]
    assert status_of(agent) == "starting; connects to the broker"
    agent.serving.set()
    agent.state = "working"
    assert status_of(agent) == "working; waits for the broker: connection to amqp://tmq:***@b:1/ lost: reset"
    agent.draining.set()
    agent.state = "x" * 1000
    assert status_of(agent).startswith("draining; waits for the broker")
    Troubled.trouble = "x" * 1000
    assert len(status_of(agent)) == 200


async def test_a_blocked_loop_is_silent(tmp_path: Path, ears: Ears) -> None:
    agent = Idler()
    signs = LivenessReporter(ServiceManager(str(tmp_path / "notify"), 0.2), HealthFile(tmp_path / "health"))
    task = asyncio.create_task(signs.report(agent))

    async def pings(number: int) -> None:
        async with asyncio.timeout(10):
            while number > 0:
                number -= sum("WATCHDOG=1" in lines for lines in ears.heard())
                await asyncio.sleep(0.01)

    await pings(3)
    ears.heard()
    before = (tmp_path / "health").read_text()
    time.sleep(1.0)  # noqa: ASYNC251 - blocks the loop: that is what is tested
    assert ears.heard() == []
    assert (tmp_path / "health").read_text() == before
    await pings(1)
    task.cancel()
    await asyncio.wait([task])


# -- the health file


def run_health(path: Path, max_age: float = 30.0) -> int:
    return health(Namespace(file=str(path), max_age=max_age))


async def test_the_health_file_is_what_the_command_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    HealthFile(tmp_path / "no" / "such" / "folder").write(Idler())  # costs a line of log
    path = tmp_path / "health"
    path.write_text("of an earlier life")
    file = HealthFile(path)
    assert not path.exists()
    assert run_health(path) == 1
    assert "the file does not exist" in capsys.readouterr().out
    agent = Idler()
    file.write(agent)
    assert run_health(path) == 1
    assert "runner-0 starts" in capsys.readouterr().out
    agent.serving.set()
    file.write(agent)
    assert run_health(path) == 0
    assert stat.S_ISREG(path.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["health"]
    assert READ_VARIABLE == HEALTH_VARIABLE
    monkeypatch.setenv(HEALTH_VARIABLE, str(path))
    assert health(Namespace(file=None, max_age=30.0)) == 0
    assert run_health(path, max_age=0.0) == 1
    assert "event loop is blocked" in capsys.readouterr().out
    monkeypatch.delenv(HEALTH_VARIABLE)
    assert health(Namespace(file=None, max_age=30.0)) == 1
    assert HEALTH_VARIABLE in capsys.readouterr().out


NOT_A_FILE = ["", "{", "[]", "3", "{}", '{"clock": "x", "ready": true, "agent": 1, "state": 1}']
OLD = "runner-0 wrote it 31 s ago, wanted at most 30 s: its event loop is blocked, or it was killed"
WRITTEN = json.dumps({"clock": 100.0, "ready": True, "agent": "runner-0", "state": "idle"})


@pytest.mark.parametrize(
    ("content", "now", "said"),
    [
        *((content, 100.0, "not a health file") for content in NOT_A_FILE),
        (WRITTEN, 129.0, None),
        (WRITTEN, 131.0, OLD),
        (WRITTEN, 5.0, "before this machine started"),
    ],
)
def test_a_health_file_is_ours_and_young_on_the_machine_s_own_clock(content: str, now: float, said: str | None) -> None:
    healthy, line = check_health(content, 30.0, now)
    assert healthy == (said is None)
    assert (said or "") in line
