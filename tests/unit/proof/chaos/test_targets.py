"""Processes of a run are told from those of others, and only they are touched; real processes and signals."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until
from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.errors import CommandError
from trinity_mq.proof.chaos.targets import local
from trinity_mq.proof.chaos.targets.base import Victim, VictimGoneError
from trinity_mq.proof.chaos.targets.local import MARK_VARIABLE, LocalTargets, start_ticks
from trinity_mq.proof.chaos.targets.remote import SIGNAL_ALL, ComposeTargets, KubernetesTargets
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


PROGRAM = """#!/usr/bin/env python3
import json, os, sys
folder = os.environ["FAKE_FOLDER"]
with open(f"{folder}/calls", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
for words, answer, code in json.load(open(f"{folder}/answers")):
    if all(word in sys.argv for word in words):
        print(answer, end="", file=sys.stderr if code else sys.stdout)
        sys.exit(code)
"""
RUNNER = "ab" * 32


class Fake:
    """A program on the path."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.name = folder, name
        program = folder / name
        program.write_text(PROGRAM)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def answers(self, *answers: tuple[list[str], Any, int]) -> None:
        """Set what is answered to the first call that has all of some words: text, or what is dumped as JSON."""
        texts = [(words, text if isinstance(text, str) else json.dumps(text), code) for words, text, code in answers]
        (self._folder / "answers").write_text(json.dumps(texts))
        (self._folder / "calls").unlink(missing_ok=True)

    @property
    def calls(self) -> list[list[str]]:
        """The words of each call."""
        path = self._folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def did(self, *reading: str) -> list[list[str]]:
        """Return the calls that change something, without the namespace."""
        words = [call[2:] if call[0] == "--namespace" else call for call in self.calls]
        return [call for call in words if not set(call) & set(reading)]


@pytest.fixture(params=["docker"])
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    return Fake(tmp_path, request.param)


KUBECTL = pytest.mark.parametrize("program", ["kubectl"], indirect=True)


def inspected(project: str = "mine", service: str = "runner", *, running: bool = True) -> list[dict[str, Any]]:
    labels = {"com.docker.compose.project": project, "com.docker.compose.service": service}
    networks = {"mine_default": {"Aliases": ["runner", "mine-runner-1"]}}
    return [{"Config": {"Labels": labels}, "State": {"Running": running}, "NetworkSettings": {"Networks": networks}}]


def pod(name: str, component: str, uid: str = "u1", phase: str = "Running", **metadata: object) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component}
    return {"metadata": {"name": name, "uid": uid, "labels": labels, **metadata}, "status": {"phase": phase}}


LISTED = (["ps"], f"{RUNNER}\tmine-runner-1\tUp 3 seconds\n", 0)


async def test_containers_are_found_by_their_labels(program: Fake) -> None:
    program.answers(LISTED)
    [victim] = await ComposeTargets("mine").find("runner")
    assert victim == Victim("runner", "mine-runner-1", RUNNER, f"runner-{RUNNER[:12]}")
    [call] = program.calls
    assert "label=com.docker.compose.project=mine" in call
    assert "label=com.docker.compose.service=runner" in call


NETWORK = ["mine_default", RUNNER]
ALIASES = ["--alias", "runner", "--alias", "mine-runner-1"]
EXECUTE = ["exec", "runner-a", "--", "sh", "-c", SIGNAL_ALL, "sh"]
DELETE = ["delete", "pod", "runner-a"]
FAULTS: dict[tuple[str, str], tuple[list[list[str]], list[list[str]]]] = {
    ("docker", "kill"): ([["kill", RUNNER], ["start", RUNNER]], []),
    ("docker", "restart"): ([["restart", RUNNER]], []),
    ("docker", "freeze"): ([["pause", RUNNER]], [["unpause", RUNNER]]),
    ("docker", "cut"): ([["network", "disconnect", *NETWORK]], [["network", "connect", *ALIASES, *NETWORK]]),
    ("kubectl", "kill"): ([[*DELETE, "--grace-period=0", "--force", "--wait=false"]], []),
    ("kubectl", "restart"): ([[*DELETE, "--wait=false"]], []),
    ("kubectl", "freeze"): ([[*EXECUTE, "STOP"]], [[*EXECUTE, "CONT"]]),
}


@pytest.mark.parametrize(("program", "kind"), FAULTS, indirect=["program"])
async def test_faults_of_containers_and_pods(program: Fake, kind: str) -> None:
    strikes, relieves = FAULTS[program.name, kind]
    program.answers(LISTED, (["inspect"], inspected(), 0), (["get"], {"items": [pod("runner-a", "runner")]}, 0))
    targets = ComposeTargets("mine") if program.name == "docker" else KubernetesTargets("rl")
    assert kind in targets.possible["runner"]
    [victim] = await targets.find("runner")
    await targets.strike(victim, kind)
    assert program.did("ps", "inspect", "get") == strikes
    await targets.relieve(victim, kind)
    assert program.did("ps", "inspect", "get") == strikes + relieves


GONE = "is gone, or is another one by now"


@pytest.mark.parametrize(
    ("program", "answer", "said"),
    [
        ("docker", (["inspect"], inspected("another"), 0), "is not runner of compose project mine"),
        ("docker", (["inspect"], inspected(service="broker"), 0), "is not runner of compose project mine"),
        ("docker", (["inspect"], inspected(running=False), 0), "does not run"),
        ("docker", (["inspect"], "No such object", 1), "is gone: .*No such object"),
        ("kubectl", (["get"], {"items": [pod("runner-a", "runner", "u2")]}, 0), GONE),
        ("kubectl", (["get"], {"items": [pod("runner-a", "trainer")]}, 0), GONE),
        ("kubectl", (["get"], {"items": [pod("x", "runner", "u9")]}, 0), GONE),
    ],
    indirect=["program"],
)
async def test_what_is_another_one_by_now_is_not_touched(program: Fake, answer: Any, said: str) -> None:
    program.answers(answer)
    if program.name == "docker":
        act = ComposeTargets("mine").strike(Victim("runner", "mine-runner-1", RUNNER), "kill")
    else:
        act = KubernetesTargets("rl").strike(Victim("runner", "runner-a", "u1"), "kill")
    with pytest.raises(VictimGoneError, match=said):
        await act
    assert program.did("inspect", "get") == []


async def test_containers_that_still_run_are_left_over(program: Fake) -> None:
    program.answers((["label=com.docker.compose.service=trainer"], f"{RUNNER}\tmine-trainer-1\tUp 1 minute\n", 0))
    assert await ComposeTargets("mine").left_over() == ["container mine-trainer-1 (trainer): Up 1 minute"]


async def test_an_engine_that_does_not_answer_is_said(program: Fake) -> None:
    program.answers((["ps"], "Cannot connect to the\nDocker daemon", 1))
    with pytest.raises(CommandError, match=r"`docker ps .*: exit code 1: Cannot connect to the Docker daemon"):
        await ComposeTargets("mine").find("runner")


async def test_a_missing_program_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="there is no `kubectl` command on the path"):
        await KubernetesTargets("rl").find("runner")


@KUBECTL
async def test_pods_are_found_by_their_labels(program: Fake) -> None:
    program.answers(
        (
            ["app.kubernetes.io/part-of=trinity-mq"],
            {
                "items": [
                    pod("runner-b", "runner", "u2"),
                    pod("runner-a", "runner", "u1"),
                    pod("runner-c", "runner", "u3", "Pending"),
                    pod("runner-d", "runner", "u4", deletionTimestamp="2026-11-26T00:00:00Z"),
                    pod("trainer-0", "trainer", "u5"),
                    pod("engines-x", "engines", "u7"),
                    pod("exporter-x", "exporter", "u8"),
                ]
            },
            0,
        ),
        (["app.kubernetes.io/component=rabbitmq"], {"items": [pod("mq-server-0", "rabbitmq", "u6")]}, 0),
    )
    mine = KubernetesTargets("rl")
    assert [victim.name for victim in await mine.find("runner")] == ["runner-a", "runner-b"]
    assert [victim.identity for victim in await mine.find("broker")] == ["u6"]
    assert [victim.name for victim in await mine.find("engine")] == ["engines-x"]
    assert await mine.left_over() == [
        "pod runner-b (runner) still runs",
        "pod runner-a (runner) still runs",
        "pod trainer-0 (trainer) still runs",
        "pod engines-x (engine) still runs",
    ]
    assert all(call[:2] == ["--namespace", "rl"] for call in program.calls)


NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
PLAY = """
sleep 60 & agent=$!
until_it_is() { until [ "$(sed 's/.*) \\(.\\).*/\\1/' /proc/$agent/stat)" = "$1" ]; do sleep 0.05; done; }
sh -c "$0" sh STOP && until_it_is T && echo stopped
sh -c "$0" sh CONT && until_it_is S && echo goes on
kill $agent; wait $agent
sh -c "$0" sh STOP 2>&1
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode,
    reason="needs process namespaces of its own",
)
def test_a_container_is_stopped_but_for_its_first_process() -> None:
    """In a process namespace, as in a container: nothing outside of it is signalled."""
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", PLAY, SIGNAL_ALL], check=False, capture_output=True, text=True, timeout=30
    )
    stopped, goes_on, refused = done.stdout.splitlines()
    assert (done.returncode, stopped, goes_on) == (1, "stopped", "goes on"), done
    assert "ignores signals from inside the container" in refused
