"""Processes of a run are told from those of others, and only they are touched; real processes and signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from tests.waiting import until
from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.proof.chaos.targets import local
from trinity_mq.proof.chaos.targets.base import Victim, VictimGoneError
from trinity_mq.proof.chaos.targets.local import MARK_VARIABLE, LocalTargets, start_ticks
from trinity_mq.testing.tcp_proxy import FaultProxy

SLEEPS = "import sys; print('up', flush=True); sys.stdin.read()"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes with the command lines of agents; all end with the test."""
    started: list[subprocess.Popen[str]] = []

    def make(*words: str, program: str = SLEEPS, session: bool = True, mark: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=session,
            env={**os.environ, **({MARK_VARIABLE: mark} if mark else {})},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield make
    for process in started:
        process.kill()
        process.communicate()


def agent(run: Path, role: str, name: str) -> list[str]:
    return ["-m", "trinity_mq.cli.main", role, str(run / "config.yaml"), "--id", name]


def targets(run: Path, **more: object) -> LocalTargets:
    async def restart(name: str) -> None:
        RESTARTED.append(name)

    RESTARTED.clear()
    return LocalTargets(run, os.getpid(), restart=restart, **more)  # type: ignore[arg-type]


RESTARTED: list[str] = []


async def test_only_the_runs_own_agents_are_found(tmp_path: Path, start: Start) -> None:
    one = start(*agent(tmp_path / "a", "runner", "runner-1"))
    other = start(*agent(tmp_path / "a", "runner", "runner-0"))
    start(*agent(tmp_path / "b", "runner", "runner-0"))  # another run's
    start(*agent(tmp_path / "a", "runner", "runner-0"), session=False)  # a child that an agent has forked
    start(*agent(tmp_path / "a", "trainer", "trainer-0"))
    found = await targets(tmp_path / "a").find("runner")
    assert [(victim.name, victim.identity) for victim in found] == [
        (name, f"{process.pid}@{start_ticks(process.pid)}")
        for name, process in (("runner-0", other), ("runner-1", one))
    ]
    assert await targets(tmp_path / "c").find("runner") == []


async def test_faults_hit_their_victim(tmp_path: Path, start: Start) -> None:
    process = start(*agent(tmp_path, "operator", "operator-0"))
    ours = targets(tmp_path)
    [victim] = await ours.find("operator")
    await ours.strike(victim, "freeze")
    await until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    await ours.relieve(victim, "freeze")
    await until(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED)
    await ours.strike(victim, "restart")
    assert RESTARTED == ["operator-0"]
    assert process.poll() is None, "its supervisor restarts it"
    await ours.strike(victim, "kill")
    assert process.wait() == -9
    with pytest.raises(VictimGoneError, match="has ended"):
        await ours.strike(victim, "kill")
    with pytest.raises(VictimGoneError, match="has ended"):
        await ours.strike(victim, "restart")
    await ours.relieve(victim, "freeze")  # it was replaced: fine


async def test_processes_of_others_are_refused(tmp_path: Path, start: Start) -> None:
    foreign = start(*agent(tmp_path / "other", "runner", "runner-0"))
    ours = targets(tmp_path / "mine")
    victim = Victim("runner", "runner-0", f"{foreign.pid}@{start_ticks(foreign.pid)}", "runner-0")
    for kind in ("kill", "freeze", "restart"):
        with pytest.raises(VictimGoneError, match="is not runner-0 of this run"):
            await ours.strike(victim, kind)
    reused = replace(victim, identity=f"{foreign.pid}@1")
    with pytest.raises(VictimGoneError, match="has ended"):
        await ours.strike(reused, "kill")
    assert foreign.poll() is None


async def test_an_engine_is_known_by_its_ready_file(tmp_path: Path, start: Start) -> None:
    (tmp_path / "engines").mkdir()
    path = tmp_path / "engines" / "explorer-0-engine.ready.json"
    process = start("--ready-file", str(path))
    said = {"url": "", "token": "", "name": "", "model_path": "", "fingerprint": "", "digest": ""}
    ready = ReadyFile(
        id="explorer-0-engine", pid=process.pid, create_time=psutil.Process(process.pid).create_time(), **said
    )
    ready.write(path)
    ours = targets(tmp_path)
    [victim] = await ours.find("engine")
    assert victim.agent == "explorer-0-engine"
    stranger = start("something else")
    path.write_text(json.dumps({**asdict(ready), "pid": stranger.pid}))
    assert await ours.find("engine") == [], "another process has its pid now"
    with pytest.raises(VictimGoneError):
        await ours.strike(victim, "kill")
    ready.write(path)
    await ours.strike(victim, "restart")
    assert process.wait() == -15


async def test_what_is_left_of_a_run_is_found_whoever_its_parent_is(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ENDING_SECONDS", 0.2)
    supervisor = start("a supervisor")
    ours = LocalTargets(tmp_path, supervisor.pid, restart=None, mark="0123")  # type: ignore[arg-type]
    orphan = start("left behind", mark="0123")
    start("of another trial", mark="4567")
    supervisor.kill()
    supervisor.wait()
    [line] = await ours.left_over()
    assert line.startswith(f"process {orphan.pid}: ")
    ours.end_left_over()
    assert orphan.wait() == -9
    assert await ours.left_over() == []


def test_what_is_possible_depends_on_whose_the_broker_is(tmp_path: Path) -> None:
    proxy = FaultProxy("amqp://h:5672/")
    assert targets(tmp_path).possible["broker"] == ()
    assert targets(tmp_path).possible["runner"] == ("kill", "freeze", "restart")
    assert targets(tmp_path, proxy=proxy).possible["broker"] == ("cut",)
    assert targets(tmp_path, proxy=proxy, broker_parent=1).possible["broker"] == ("kill", "freeze", "cut", "restart")
