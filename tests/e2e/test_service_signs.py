"""What a service manager hears of a real agent: ready, pings, what it waits for, and silence when it is stuck."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until
from trinity_mq.runtime.errors import EXIT_FATAL
from trinity_mq.testing.tcp_proxy import FaultProxy

EXAMPLES = Path(__file__).parents[2] / "examples"
WATCHDOG = 2.0
"""Seconds; pings come twice as often."""
START = 150.0
"""Seconds for imports and a first connection on a busy machine."""

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.broker, pytest.mark.timeout(300)]


class Manager:
    """The notify socket of a service manager, and all that came through it."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(address)
        self.address = address
        self.lines: list[str] = []
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        self.lines += self._socket.recv(4096).decode().split("\n")

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def count(self, line: str) -> int:
        return self.lines.count(line)

    @property
    def status(self) -> str:
        return next((line for line in reversed(self.lines) if line.startswith("STATUS=")), "")

    async def pinged(self, times: int = 3) -> None:
        """Return after so many further pings."""
        before = self.count("WATCHDOG=1")
        await until(lambda: self.count("WATCHDOG=1") >= before + times, 30.0)


@pytest.fixture
def run_folder(tmp_path: Path, unique_run: str) -> Path:
    return tmp_path / unique_run


@asynccontextmanager
async def runner(url: str, folder: Path, manager: Manager, **variables: str) -> Any:
    """A runner as systemd starts it: ``exec`` keeps the process id that WATCHDOG_PID names."""
    environ = {
        **os.environ,
        "TRINITY_MQ_BROKER_URL": url,
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": str(int(WATCHDOG * 1e6)),
        **variables,
    }
    command = [sys.executable, "-m", "trinity_mq.cli.main", "runner", str(EXAMPLES / "smoke.yaml")]
    command += [f"name={folder.name}", f"run_dir={folder}"]
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", 'WATCHDOG_PID=$$ exec "$@"', "sh", *command, env=environ, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def manager(tmp_path: Path) -> Any:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


async def test_ready_pings_freeze_outage_drain(
    broker_url: str, run_folder: Path, tmp_path: Path, manager: Manager
) -> None:
    health = tmp_path / "health"
    async with (
        FaultProxy(broker_url) as proxy,
        runner(proxy.url, run_folder, manager, TRINITY_MQ_HEALTH_FILE=str(health)) as process,
    ):
        await until(lambda: manager.count("READY=1") == 1, START)
        assert manager.lines[0].startswith("STATUS=starting")
        await manager.pinged()
        await until(lambda: manager.status == "STATUS=idle; waits for a slice", 30.0)
        assert json.loads(health.read_text())["ready"] is True
        # frozen: the pings end, and the watchdog would strike
        process.send_signal(signal.SIGSTOP)
        await until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        await asyncio.sleep(0.2)  # what was sent before is read
        silent_since = manager.count("WATCHDOG=1")
        await asyncio.sleep(2 * WATCHDOG)
        assert manager.count("WATCHDOG=1") == silent_since
        process.send_signal(signal.SIGCONT)
        await manager.pinged()

        # the broker is away: alive all the same, and it says what it waits for
        proxy.refuse()
        await until(lambda: "waits for the broker" in manager.status, 30.0)
        await manager.pinged()
        assert process.returncode is None
        assert "tmq:" not in manager.status, "no password goes into the journal"
        proxy.accept()
        await until(lambda: manager.status == "STATUS=idle; waits for a slice", 60.0)

        assert manager.count("STOPPING=1") == 0
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60.0) == 0
        await until(lambda: manager.count("STOPPING=1") == 1)
    assert manager.count("READY=1") == 1
    assert not health.exists()


async def test_a_wrong_password_ends_for_good(broker_url: str, run_folder: Path, manager: Manager) -> None:
    """With the code that the units do not restart on."""
    before, _, host = broker_url.rpartition("@")
    wrong = f"{before.rpartition(':')[0]}:wrong@{host}"
    async with runner(wrong, run_folder, manager) as process:
        assert await asyncio.wait_for(process.wait(), START) == EXIT_FATAL
    await until(lambda: manager.count("STOPPING=1") == 1)
    assert manager.count("READY=1") == 0
