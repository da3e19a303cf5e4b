"""Agents in their sandbox: what they reach, what they leave, and how they end. The agents are shell scripts."""

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from trinity_mq.experience import Experience
from trinity_mq.testing.scripted import scripted_model
from trinity_mq.workflows import SandboxFailed, Task
from trinity_mq.workflows.sessions.sandboxed_agent import Judged, Sandbox, SandboxedAgentWorkflow, read_text

ASK = """
ask() {
    python3 - "$@" <<'PYTHON'
import json, os, sys, urllib.error, urllib.request
body = sys.argv[2].encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
try:
    print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, headers)).status)
except urllib.error.HTTPError as error:
    print(error.code)
PYTHON
}
ask "$OPENAI_BASE_URL/chat/completions" '{"messages": [{"role": "user", "content": "hello"}]}' >calls
"""

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


class Agent(SandboxedAgentWorkflow):
    """Keeps what the script left. Reward 1 if it called the model."""

    def files(self, session: Any) -> dict[str, str]:
        return {"given/task.txt": "for the agent\n", "~/.config/agent.toml": "mine\n"}

    def judge(self, work: Path) -> Judged:
        self.left = {path.name: read_text(work, path.name) for path in sorted(work.iterdir())}
        return Judged(reward=float((self.left.get("calls") or "").startswith("200")), metrics={"files": len(self.left)})


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the sandboxes; it is empty once their agents have ended. Its path is longer than the address of a
    Unix socket may be.
    """
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


async def run(script: str, **arguments: Any) -> tuple[Agent, list[Experience]]:
    command = ["bash", "-c", script, "agent"]
    task = Task(workflow=Agent, raw_task={"question": "?"}, workflow_args={"command": command, **arguments})
    async with scripted_model(lambda _: "hi") as model:
        agent = Agent(task=task, model=model)
        return agent, await agent.run_async()


async def test_an_agent_works_with_its_files_and_its_work_is_judged(folders: Path) -> None:
    script = ASK + 'cat given/task.txt ~/.config/agent.toml >seen; pwd >>seen; echo "$COLOUR" >>seen; exit 3'
    agent, [experience] = await run(script, env={"COLOUR": "blue"})
    assert agent.left["seen"] == "for the agent\nmine\n/agent/files\nblue\n"
    assert experience.reward == 1.0
    assert experience.metrics["files"] == 3
    assert (experience.metrics["agent_failed"], experience.metrics["agent_timed_out"]) == (1.0, 0.0)


async def test_an_agent_sees_no_secret_of_the_host_and_reaches_only_its_session(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_MQ_SECRET", "hunter2")
    secret = Path.cwd() / "pyproject.toml"
    script = (
        ASK
        + f"""
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' >environments
cat '{secret}' /etc/shadow >secrets 2>/dev/null
ls /proc | grep -c '^[0-9]' >processes
ask "${{OPENAI_BASE_URL%/v1}}/reward" '{{"reward": 1.0}}' >reward
ask "${{OPENAI_BASE_URL%/s/*}}/sessions" '{{}}' >sessions
cat /proc/net/dev | grep : | cut -d: -f1 >networks
for path in /proc/sys/kernel/core_pattern /usr/new /etc/passwd /new /dev/new /agent/gateway; do
    (echo x >"$path") 2>/dev/null && echo "$path" >>written
done
unshare --user true 2>/dev/null && echo "user namespaces" >>written
ln -s /etc/hostname link; mkfifo pipe; ln -s '{secret}' config; ln -s ../gateway socket
"""
    )
    agent, [experience] = await run(script)
    assert experience.reward == 1.0
    assert "hunter2" not in (agent.left["environments"] or "")
    assert "OPENAI_API_KEY" in (agent.left["environments"] or "")
    assert agent.left["secrets"] == ""
    assert int(agent.left["processes"] or 0) < 10
    assert (agent.left["reward"], agent.left["sessions"]) == ("403\n", "401\n")
    assert (agent.left["networks"] or "").split() == ["lo"]
    assert "written" not in agent.left
    assert {agent.left[name] for name in ("link", "pipe", "config", "socket")} == {None}


async def test_processes_that_outlive_the_agent_or_its_time_are_ended(folders: Path, tmp_path: Path) -> None:
    for ending, is_late in (("", 0.0), ("sleep 987654", 1.0)):
        _, [experience] = await run(f"{ASK}(sleep 987654 &)\n{ending}", seconds=3.0)
        assert (experience.reward, experience.metrics["agent_timed_out"]) == (1.0, is_late)
    await until(lambda: not sleepers())


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that nobody can read: that of root may be in its home."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if os.getuid() == 0:
        program = shutil.which(name, path="/usr/local/bin:/usr/bin")
        if program is None:
            pytest.skip(f"there is no {name} that the user nobody can read")
        monkeypatch.setattr("sys.base_prefix", str(Path(program).parents[1]))


@contextlib.asynccontextmanager
async def sandbox_of(**limits: Any) -> AsyncIterator[Sandbox]:
    """A sandbox without a gateway, in a folder that nobody can reach."""
    sandbox = Sandbox(Path(tempfile.mkdtemp(dir="/tmp")), **limits)
    sandbox.prepare({"task.txt": "4\n", "~/.config/agent.toml": "2\n"})
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.bind(str(sandbox.socket))
        try:
            yield sandbox
        finally:
            await sandbox.remove()


WRITERS = """
for number in $(seq 40); do setsid bash -c 'while :; do echo $RANDOM >987654; done' </dev/null >/dev/null 2>&1 & done
sleep 1
"""


@pytest.mark.parametrize(
    ("script", "code", "seconds"),
    [("exit 3", 3, 20.0), ("kill -9 $PPID", 137, 20.0), ("sleep 987654", None, 3.0)],
    ids=["it ends", "it kills the first process", "its time is over"],
)
async def test_no_process_runs_beside_the_judge(script: str, code: int | None, seconds: float) -> None:
    async with sandbox_of() as sandbox:
        ended = await sandbox.run(["bash", "-c", WRITERS + script], {}, 8000, seconds)
        assert sleepers() == []
    assert ended.code == code


@pytest.mark.usefixtures("python")
async def test_the_number_of_processes_is_limited_for_root_too() -> None:
    script = "cat task.txt ~/.config/agent.toml >read; for number in $(seq 100); do sleep 5 & done"
    async with sandbox_of(processes=32) as sandbox:
        ended = await sandbox.run(["bash", "-c", script], {}, 8000, 20.0)
        assert "Resource temporarily unavailable" in ended.output
        assert read_text(sandbox.work, "read") == "4\n2\n"


async def test_other_users_of_the_host_do_not_see_the_variables_of_an_agent() -> None:
    async with sandbox_of() as sandbox:
        running = asyncio.create_task(sandbox.run(["sleep", "2"], {"OPENAI_API_KEY": "sk-secret-1"}, 8000, 20.0))
        seen: set[bytes] = set()
        while not running.done():
            seen |= {reading(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
            await asyncio.sleep(0.05)
        assert (await running).code == 0
    assert b"sleep\x002\x00" in seen
    assert not [line for line in seen if b"sk-secret-1" in line]


def sleepers() -> list[str]:
    """Return the processes that the scripts left."""
    return [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"987654" in reading(path) and int(path.parent.name) != os.getpid()
    ]


def reading(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


async def test_a_cancelled_run_ends_its_agent_and_leaves_no_folder(folders: Path) -> None:
    running = asyncio.create_task(run(ASK + "touch begun; sleep 987654"))
    await until(lambda: any(folders.glob("*/*/begun")))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not sleepers() and not list(folders.iterdir()))


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("echo no key in the drawer >&2; exit 7", {}, "ended with 7 before it asked the model: no key in the drawer"),
        ("head -c 3000000 /dev/zero | tr '\\0' x; echo the end; exit 1", {}, "xxxthe end\n"),
        ("sleep 987654", {"seconds": 1.0}, "got no answer within 1 s: raise workflow_args.seconds"),
        ("", {"command": ["no-such-agent"]}, "no-such-agent cannot be started: [Errno 2] No such file"),
        ("", {"visible": ["/nowhere/codex"]}, "visible: there is no '/nowhere/codex' on this machine; install it, or"),
    ],
    ids=["it says why", "it says very much", "its time is over", "it does not exist", "a folder does not exist"],
)
async def test_an_agent_that_never_asks_the_model_is_a_failure_of_the_sandbox(
    folders: Path, script: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(SandboxFailed) as failed:
        await run(script, **arguments)
    assert words in str(failed.value)
    assert len(str(failed.value)) < 6000
    await until(lambda: not sleepers())


async def test_a_file_may_not_grow_without_end_and_folders_that_cannot_be_entered_are_removed(folders: Path) -> None:
    script = (
        ASK
        + """
head -c 2000000 /dev/zero >large 2>/dev/null
mkdir -p deep; python3 -c "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1200)]"
mkdir locked; touch locked/file; chmod 0 locked
"""
    )
    agent, _ = await run(script, file_bytes=1_000_000)
    assert len(agent.left["large"] or "") == 1_000_000


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "~/../outside", "~//etc/outside"])
def test_first_files_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads out of the sandbox"):
        Sandbox(tmp_path).prepare({name: "x"})


def test_a_text_is_read_from_regular_files_inside_only_and_not_beyond_its_limit(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "outside").write_text("secret")
    work = tmp_path / "work"
    (work / "file").write_bytes(b"abc\xff")
    (work / "link").symlink_to("../outside")
    (work / "self").symlink_to("self")
    (work / "folder").mkdir()
    os.mkfifo(work / "pipe", stat.S_IRUSR)
    assert read_text(work, "file", 4) == "abc\ufffd"
    assert read_text(work, "file", 2) == "ab"
    assert {read_text(work, name) for name in ("link", "self", "folder", "pipe", "../outside", "none")} == {None}
