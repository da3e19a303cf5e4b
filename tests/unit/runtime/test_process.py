from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest

from trinity_mq.runtime.process import wait_exit, write_atomic
from trinity_mq.runtime.processes.children import ChildServer, ChildTimeoutError

GRANDCHILD = """
import signal, sys, time
from trinity_mq.runtime.process import die_with_parent
def leave(signum, frame):
    print("told", signum, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux")
def test_a_parent_that_has_gone_already_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", GRANDCHILD, "1"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"told {signal.SIGTERM.value}\n"


async def test_wait_exit_leaves_the_status_to_the_parent() -> None:
    argv = (sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)")
    process = await asyncio.to_thread(subprocess.Popen, argv, stdin=subprocess.PIPE)
    async with asyncio.timeout(20):
        waiting = asyncio.ensure_future(wait_exit(process.pid))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert process.stdin is not None
        process.stdin.close()
        await waiting
        assert process.poll() == 3
        await wait_exit(process.pid)


def test_write_atomic_replaces_whole_files_and_follows_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"one", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = os.umask(0o027)
    try:
        with mock.patch("os.umask") as umask:  # a file that another thread made meanwhile would be open to everybody
            write_atomic(path, b"two")
        assert umask.call_args_list == [], "the umask is not set to be read"
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"old")
    full = mock.patch("os.fsync", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_kept_for_the_next_computation() -> None:
    """Memory that is freed and taken again costs no page faults any more."""
    script = """
import resource, sys
from trinity_mq.runtime.process import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    blocks = [bytearray(b"x" * 3_000_000) for _ in range(8)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", script, how], capture_output=True, check=True, text=True).stdout)
        for how in ("keep", "give back")
    )
    assert kept * 3 < given_back


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc_trim is glibc's")
def test_freed_pages_between_blocks_that_are_in_use_are_given_back() -> None:
    """The last of the blocks keeps malloc from giving back what lies before it by itself."""
    script = """
import asyncio, contextlib, sys
from pathlib import Path
from trinity_mq.runtime.process import trim_memory_periodically

def mebibytes():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("Anonymous:")[2].split()[0]) / 1024

async def main():
    blocks = [bytearray(b"x" * 3000) for _ in range(20_000)]
    blocks = blocks[::100]
    before = mebibytes()
    giving = asyncio.create_task(trim_memory_periodically(0.01))
    async with asyncio.timeout(20):
        while mebibytes() > before - 40:
            await asyncio.sleep(0.01)
    giving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await giving
    print(len(blocks), "in use")

asyncio.run(main())
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout
    assert output == "200 in use\n"


# -- an agent whose supervisor is killed


LEASE = 2.0
ORPHAN = f"""
import asyncio, sys, time
from pathlib import Path
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.runtime import serve
from trinity_mq.runtime.agent import Agent

folder, kind, role = Path(sys.argv[1]), *sys.argv[2:]
begun = []


async def give_back():
    begun.append("gives back")


if kind == "idle":
    serve.trim_memory_periodically = give_back
serve.ORPHAN_LEASE = {LEASE}
URL = "amqp://guest:guest@127.0.0.1:1/"  # its bus is another one


class Worker(Agent):
    async def serve(self):
        if kind == "idle":
            print(*begun or ["keeps"])
            return
        (folder / "up").write_text("up")
        try:
            if kind == "orderly":
                await self.draining.wait()
                (folder / "end").write_text(f"drained within {{self.drain_timeout:g}} s")
            elif kind == "stuck":
                await asyncio.Event().wait()
            else:
                time.sleep(60)
        except asyncio.CancelledError:
            (folder / "end").write_text("cancelled")
            raise


def build(bus, topology):
    memory = MemoryBus(MemoryBroker(), topology, config=config.broker)
    return Worker(config, bus=memory, topology=topology, agent_id=f"{{role}}-0")


Worker.role = role
places = {{"run_dir": str(folder / "run"), "broker": {{"url": URL}}}}
config = load_config({{"name": "w", "model": {{"tiny": {{}}}}, **places}})
sys.exit(serve.run_daemon(config, f"{{role}}-0", role, build))
"""
SUPERVISOR = """
import os, subprocess, sys
agent = subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "TRINITY_MQ_PARENT": str(os.getpid())})
print(agent.pid, flush=True)
agent.wait()
"""


@pytest.mark.parametrize(
    ("kind", "end"), [("orderly", "drained within 0.8 s"), ("stuck", "cancelled"), ("blocked", None)]
)
async def test_an_agent_ends_within_a_lease_of_its_supervisor(tmp_path: Path, kind: str, end: str | None) -> None:
    argv = (sys.executable, "-c", SUPERVISOR, "-c", ORPHAN, str(tmp_path), kind, "runner")
    supervisor = await asyncio.to_thread(subprocess.Popen, argv, stdout=subprocess.PIPE, text=True)
    with supervisor:
        assert supervisor.stdout is not None
        agent = int(await asyncio.to_thread(supervisor.stdout.readline))
        async with asyncio.timeout(40):
            while not (tmp_path / "up").exists():  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(0.05)
            supervisor.kill()
            killed = time.monotonic()
            try:
                await wait_exit(agent)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGKILL)
    assert time.monotonic() - killed < LEASE + 2.0
    assert (tmp_path / "end").exists() == (end is not None)
    assert end is None or (tmp_path / "end").read_text() == end


@pytest.mark.parametrize(("role", "does"), [("runner", "gives back\n"), ("trainer", "keeps\n")])
def test_all_but_trainers_give_freed_memory_back(tmp_path: Path, role: str, does: str) -> None:
    argv = [sys.executable, "-c", ORPHAN, str(tmp_path), "idle", role]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, does), done.stderr


# -- child processes that answer requests


ANSWERS = """
import os, sys, time
from multiprocessing.connection import Connection

pipe = Connection(os.dup(0))
pipe.send_bytes(b"ready")
if sys.argv[1] == "deaf":
    time.sleep(600)
request = pipe.recv_bytes()
if sys.argv[1] == "stuck":
    os.write(pipe.fileno(), (100).to_bytes(4, "big") + b"half an answer")
    time.sleep(600)
pipe.send_bytes(request.upper())
time.sleep(600)
"""


@pytest.mark.parametrize(("kind", "request_size"), [("answers", 3), ("stuck", 10), ("deaf", 10), ("deaf", 10_000_000)])
def test_a_child_that_stops_anywhere_is_killed(tmp_path: Path, kind: str, request_size: int) -> None:
    (tmp_path / "child.py").write_text(ANSWERS)
    server = ChildServer(tmp_path / "child.py", kind, silence=30.0 if kind == "answers" else 1.0)
    if kind == "answers":
        assert server.ask(b"x" * request_size) == b"X" * request_size
        server.close()
    else:
        with pytest.raises(ChildTimeoutError, match="no answer in 1 s"):
            server.ask(b"x" * request_size)
    assert server.pid is None
    commands = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]
