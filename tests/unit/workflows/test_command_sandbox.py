"""The sandbox in which the commands of mini-swe-agent run (examples/harness-mini-swe-agent/sandbox.py), attacked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

SANDBOX = Path(__file__).parents[3] / "examples" / "harness-mini-swe-agent" / "sandbox.py"
CHECKED = subprocess.run([SANDBOX, "bash", "-c", ":"], capture_output=True, text=True, check=False)
NEEDS_BWRAP = pytest.mark.skipif(
    CHECKED.returncode != 0, reason=f"bubblewrap cannot run here: {CHECKED.stdout}{CHECKED.stderr}".strip()
)

LIMITS = {
    "processes": ("for i in $(seq 200); do sleep 5 & done 2>&1; echo", "Resource temporarily unavailable"),
    "fork bomb": (":(){ :|:& };: 2>&1 | head -c 300; exit", "Resource temporarily unavailable"),
    "memory": ("python3 -c 'bytearray(2 << 30)'", "MemoryError"),
    "temporary files": ("head -c 100M /dev/zero > /tmp/x", "No space left on device"),
    "shared memory": ("head -c 100M /dev/zero > /dev/shm/x", "No space left on device"),
    "root": ("touch /x", "Read-only file system"),
    "devices": ("touch /dev/x", "Read-only file system"),
    "file": ("head -c 300M /dev/zero > x; echo $?", "153"),
    "output": ("yes", "the sandbox ended the command after 1048576 bytes of output"),
}


def sandboxed(command: str, folder: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    words = [str(SANDBOX), "--bind", folder, folder, "--chdir", folder, "bash", "-c", command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=env)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """A working folder where mini-swe-agent makes it, while the folder of temporary files is private."""
    tmp_path.chmod(0o700)
    program = [sys.executable, "-c", "import sandbox; print(sandbox.reachable_folder())"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    chosen = subprocess.run(program, cwd=SANDBOX.parent, env=env, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(dir=chosen.strip()) as path:
        yield path


@NEEDS_BWRAP
class TestSandbox:
    async def test_a_command_sees_neither_environment_nor_files_nor_processes_nor_network(
        self, folder: str, tmp_path: Path
    ) -> None:
        (tmp_path / "secret").write_text("sk-file")
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        attack = f"""
            env; cat /proc/[0-9]*/environ; cat {tmp_path}/secret /etc/shadow; ls /proc | grep -c '^[0-9]'
            (exec 3<>/dev/tcp/127.0.0.1/{port}) && echo connected
            unshare -U true && echo nested; touch /usr/x /etc/x && echo written
            (echo core > /proc/sys/kernel/core_pattern) && echo written
            echo kept > {folder}/kept; id -u
        """
        done = await asyncio.to_thread(
            sandboxed, attack, folder, env={**os.environ, "OPENAI_API_KEY": "sk-environment"}
        )
        server.close()
        assert "sk-" not in done.stdout
        for success in ("connected", "nested", "written"):
            assert success not in done.stdout.splitlines()
        assert Path(folder, "kept").read_text() == "kept\n"
        assert done.stdout.splitlines()[-1] != "0"

    @pytest.mark.parametrize(("command", "output"), LIMITS.values(), ids=LIMITS)
    def test_a_command_is_limited(self, folder: str, command: str, output: str) -> None:
        done = sandboxed(command, folder)
        assert output in done.stdout[-2000:]
        assert len(done.stdout) < 2 << 20

    async def test_nothing_of_a_killed_command_is_left(self, folder: str) -> None:
        command = f"setsid sleep 6789 & echo on > {folder}/on; wait"
        process = subprocess.Popen([str(SANDBOX), "--bind", folder, folder, "bash", "-c", command])  # noqa: ASYNC220
        try:
            await until(Path(folder, "on").exists)
            await until(lambda: running("sleep 6789") != [])  # bash may write the file before setsid is the sleep
        finally:
            process.kill()
        await until(lambda: process.poll() is not None and not running("sleep 6789"))


def test_a_missing_bubblewrap_is_named(tmp_path: Path) -> None:
    words = [sys.executable, str(SANDBOX), "bash", "-c", ":"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert done.returncode == 125
    assert "bubblewrap is not installed" in done.stderr


def running(command: str) -> list[int]:
    """Return the processes with this command line."""
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if " ".join(process.info["cmdline"] or ()) == command]
