from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from trinity_mq.runtime.process import wait_exit, write_atomic

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
