from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_mq.runtime.process import die_with_parent, wait_exit, write_atomic

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
CHILD = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux")
def test_the_kernel_tells_when_the_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.kill()
        assert child.stdout.readline() == f"told {signal.SIGTERM.value}\n"
        assert child.stdout.read() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux")
def test_a_parent_that_has_gone_already_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", GRANDCHILD, "1"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"told {signal.SIGTERM.value}\n"


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    die_with_parent(1)


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


def test_write_atomic_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"one")
    write_atomic(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomic_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "state", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o640


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the umask")
def test_the_umask_is_not_set_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another thread made meanwhile would be open to everybody."""
    asked: list[int] = []
    monkeypatch.setattr(os, "umask", asked.append)
    write_atomic(tmp_path / "state", b"x")
    assert asked == []


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
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
