"""Engine process: started in its own session so that it outlives its host, watched, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import structlog

from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.engines.host.ready_file import FATAL, TOKEN_VARIABLE, ReadyFile
from trinity_mq.models.errors import EngineFailed, ModelError
from trinity_mq.runtime.process import wait_exit
from trinity_mq.runtime.processes.exit_reasons import read_output_tail
from trinity_mq.runtime.processes.forking import ADDRESS_VARIABLE, NotForkedError, fork, is_forkable

log = structlog.get_logger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "trinity_agents.engine.agent")
TAIL_LINES = 20
EXIT_SECONDS = 10.0
"""Maximum seconds from the closing of its pipe to the end of a process that failed to start."""
_VLLM = "explorer.rollout_model.vllm"
_MEMORY_ADVICE = (
    (
        r"less than desired GPU memory utilization",
        f"other processes, such as the trainer, use the GPU; lower {_VLLM}.gpu_memory_utilization, or give the engine "
        "a GPU of its own",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache",
        f"its KV cache does not fit; raise {_VLLM}.gpu_memory_utilization or {_VLLM}.kv_cache_memory_bytes, or lower "
        "model.max_model_len",
    ),
    (
        r"OutOfMemoryError|CUDA out of memory",
        f"the GPU has too little free memory; lower {_VLLM}.gpu_memory_utilization (vllm) or "
        "explorer.rollout_model.max_batch_sequences (transformers), or give the engine a GPU of its own",
    ),
)
"""Patterns of the output of torch and vLLM, and the settings that help."""


class EngineProcess:
    """One engine process, started here or adopted."""

    def __init__(self, ready: ReadyFile, child: subprocess.Popen[bytes] | None) -> None:
        """Wrap a process. ``child`` is None for an adopted process and for a process that a fork server started."""
        self.ready = ready
        self._child = child

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        ready_file: Path,
        output: Path,
        *,
        environment: Mapping[str, str],
        timeout: float,
    ) -> EngineProcess:
        """Start ``command``, with ``environment`` added to the environment of this process, and return when it has
        written ``ready_file``.

        Raises:
            ModelError: The process ended with the report that a restart does not help.
            EngineFailed: The process ended, or was not ready within ``timeout`` seconds. Both errors carry the end of
                its output.
        """
        ready_file.unlink(missing_ok=True)
        reader, writer = os.pipe()
        try:
            with output.open("ab") as out:
                start = out.tell()
                pid, child = await _start([*command, "--ready-file", str(ready_file)], out, writer, environment)
        except OSError as error:
            os.close(reader)
            raise EngineFailed(f"the engine cannot be started: {error}") from error
        finally:
            os.close(writer)
        try:
            async with asyncio.timeout(timeout):
                # readable when the engine is ready, or when it ends, which also closes the pipe
                await _readable(reader)
            ready = ReadyFile.read(ready_file)
            if ready is not None and ready.pid == pid:
                return cls(ready, child)
            is_fatal = os.read(reader, len(FATAL)) == FATAL
            async with asyncio.timeout(EXIT_SECONDS):
                await wait_exit(pid)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if child is not None:
                child.wait()
            if isinstance(error, TimeoutError):
                output_tail = tail(output)
                raise EngineFailed(
                    f"the engine was not ready within {timeout:g} s; its last output:\n{output_tail}"
                ) from None
            raise
        finally:
            os.close(reader)
        code = None if child is None else child.wait()
        if is_fatal:
            raise ModelError(f"the engine cannot run: {tail(output, 1)}")
        how = "" if code is None else f" (exit code {code})"
        advice = memory_advice(read_output_tail(output, start))
        raise EngineFailed(f"the engine ended before it was ready{how}{advice}; its last output:\n{tail(output)}")

    async def exited(self) -> int | None:
        """Wait for the end of the process; return its exit code if it was our child."""
        await wait_exit(self.ready.pid)
        return None if self._child is None else self._child.wait()

    def kill(self) -> None:
        """Kill the process at once."""
        if self.ready.lives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ready.pid, signal.SIGKILL)

    def detach(self) -> None:
        """Let the process live on without this host."""
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0  # else Popen warns of a child without wait()


async def _start(
    command: Sequence[str], output: IO[bytes], ready_fd: int, environment: Mapping[str, str]
) -> tuple[int, subprocess.Popen[bytes] | None]:
    """Start an engine, with a fork server if one runs. Return its pid, and our child unless a fork server started it.

    Raises:
        OSError: The engine cannot be started.
    """
    command = [*command, "--ready-fd", str(ready_fd)]
    # an engine needs no broker, and the URL may hold a password
    inherited = {name: value for name, value in os.environ.items() if name != URL_VARIABLE}
    env = {**inherited, TOKEN_VARIABLE: secrets.token_hex(16), **environment}
    if (address := os.environ.get(ADDRESS_VARIABLE)) and is_forkable(command):
        try:
            return await fork(address, command, env=env, output=output.fileno(), fds=[ready_fd], adopted=False), None
        except NotForkedError as error:
            log.warning("engine_not_forked", reason=str(error))
    child = subprocess.Popen(  # noqa: ASYNC220  # returns once the program runs
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
        pass_fds=(ready_fd,),
    )
    return child.pid, child


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)


def memory_advice(output: str) -> str:
    """Return the settings that help if an engine's output reports a lack of GPU memory, as the continuation of a
    sentence. Return an empty text if the output does not report it.
    """
    return next((f": {advice}" for pattern, advice in _MEMORY_ADVICE if re.search(pattern, output)), "")


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a file."""
    try:
        return "\n".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
    except OSError as error:
        return f"({path} cannot be read: {error.strerror})"
