"""``trinity-mq broker`` and the broker of a run, with a real RabbitMQ where one is installed."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_mq.bus import Topology, create_bus
from trinity_mq.config import BrokerConfig, SupervisorConfig
from trinity_mq.local_broker.base import LocalNode
from trinity_mq.local_broker.node import NodeError, find_rabbitmq
from trinity_mq.targets.private_broker import broker_folder, private_broker

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(find_rabbitmq() is None, reason="a private node needs an installed RabbitMQ"),
]


def command(*words: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", "broker", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    return done.returncode, done.stdout, done.stderr


async def can_connect(url: str, run: str = "t") -> None:
    bus = create_bus(BrokerConfig(url=url), Topology(run), "test")
    await bus.connect()
    await bus.close()


def test_start_status_stop(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    assert command("status", str(folder)) == (1, f"no broker runs in {folder}\n", "")
    code, url, err = command("start", str(folder))
    assert (code, err) == (0, "")
    try:
        asyncio.run(can_connect(url.strip()))
        assert command("start", str(folder)) == (0, url, "")
        pid = broker_folder(folder).holder()
        assert command("status", str(folder)) == (0, f"runs as process {pid}: {url}", "")
        assert stat.S_IMODE((folder / "serve.url").stat().st_mode) == 0o600
        code, out, err = command("serve", str(folder))
        assert (code, out) == (2, "")
        assert err == f"trinity-mq broker: process {pid} already serves a broker in {folder}\n"
    finally:
        assert command("stop", str(folder)) == (0, f"stopped the broker in {folder}\n", "")
    assert command("status", str(folder))[0] == 1
    assert command("stop", str(folder)) == (0, f"no broker runs in {folder}\n", "")


def test_what_keeps_it_from_starting_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "node.json").write_text("{")
    code, out, err = command("start", str(tmp_path / "b"))
    assert (code, out) == (2, "")
    assert err.startswith("trinity-mq broker: the broker did not start: ")
    assert "node.json cannot be read" in err
    assert len(err.splitlines()) == 1


async def test_one_that_dies_too_often_ends_the_run(tmp_path: Path) -> None:
    async with asyncio.timeout(50):
        with pytest.RaisesGroup(pytest.RaisesExc(NodeError, match="died 1 times within 600 s")):
            async with private_broker(tmp_path, SupervisorConfig(max_restarts=0), lambda _text: None):
                os.kill(int((tmp_path / "lock").read_text()), signal.SIGKILL)
                await asyncio.Event().wait()


async def test_one_that_finds_no_room_for_its_files_names_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def launch(_node: LocalNode) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    wanted = f"the broker died and cannot be started again in {tmp_path}: the disk is full"
    async with asyncio.timeout(50):
        with pytest.RaisesGroup(pytest.RaisesExc(NodeError, match=wanted)):
            async with private_broker(tmp_path, SupervisorConfig(), lambda _text: None):
                monkeypatch.setattr(LocalNode, "launch", launch)
                os.kill(int((tmp_path / "lock").read_text()), signal.SIGKILL)
                await asyncio.Event().wait()
