"""Executes slices in separate processes, so that a slice can only crash, hang or corrupt its own process.

A fork server imports the heavy modules once; every slice gets a fork of it. Slice and outcome pass through a pipe as
encoded messages and experiences; experiences are never pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from trinity_agents.runner.pool_child import ASK, END, LOST, RUN, child_main
from trinity_mq.config import Config
from trinity_mq.experience import Experience
from trinity_mq.messages import DecodeError, TaskSlice, encode
from trinity_mq.models import InferenceModel
from trinity_mq.models.engine_selection import Engines, auxiliary_models
from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.status import RunFailure, SliceOutcome
from trinity_mq.runtime.threads import in_thread

T = TypeVar("T")

PRELOAD = ["trinity_agents.runner.pool_child"]
START_LIMIT = 120.0
"""Maximum seconds for the start of a process; the first start includes the imports."""
GRACE = 10.0
"""Seconds after the slice's time limit at which its process is killed."""
EXIT_LIMIT = 2.0
"""Maximum seconds from the end of the pipe to the end of the process."""

# multiprocessing polls all its children whenever a child starts; if two threads do so, an exit code can get lost.
_processes = threading.Lock()


class ChildDied(Exception):
    """The process of a slice ended or was killed without an outcome; the message has the details."""

    def __init__(self, message: str, exitcode: int | None = None, *, overdue: bool = False) -> None:
        super().__init__(message)
        self.overdue = overdue
        """True if the pool killed the process because the slice's time was over."""
        self.exitcode = exitcode
        """Exit code as in ``multiprocessing.Process``, negative for a signal; None if the exit code is unknown, for
        example after the pool killed the process because its time was over."""


class ProcessPool:
    """Runs each slice in a separate process.

    Args:
        max_children: Maximum number of processes at a time; further slices wait.
        grace: Seconds beyond the slice's own limit until its process is killed.
    """

    def __init__(self, max_children: int, *, grace: float = GRACE) -> None:
        self._slots, self._grace = asyncio.Semaphore(max_children), grace
        self._children: set[_Child] = set()

    async def run(
        self,
        task_slice: TaskSlice,
        config: Config,
        models: Callable[[], InferenceModel],
        results: RunResults | None = None,
    ) -> SliceOutcome:
        """Execute a slice as ``WorkflowRunner.run_slice`` does, in a separate process.

        Args:
            task_slice: The slice.
            config: The run's configuration.
            models: Returns the engine to use now; the process asks before each attempt.
            results: Receives each run when it finishes, so that finished runs survive a crash of the process.

        Raises:
            ChildDied: The process ended without an outcome, or was killed because its time was over.
        """
        results = RunResults() if results is None else results
        async with self._slots:
            child = _Child(task_slice, config, models, results, self._grace)
            self._children.add(child)
            try:
                await _within(START_LIMIT, child.start, "did not start")
                limit = task_slice.slice_timeout + self._grace
                seconds = await _within(limit, child.follow, "did not end", overdue=True)
            finally:
                self._children.discard(child)
                child.kill()
        return results.outcome(seconds)

    async def close(self) -> None:
        """Kill all running processes; each :meth:`run` that has a process raises ChildDied."""
        for child in list(self._children):
            child.kill()


class _Child:
    """One process with its pipe; answers the requests of the process. :meth:`start` and :meth:`follow` block, so they
    are called on threads.
    """

    def __init__(
        self,
        task_slice: TaskSlice,
        config: Config,
        models: Callable[[], InferenceModel],
        results: RunResults,
        grace: float,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._ours, self._theirs = context.Pipe()
        self._process = context.Process(
            target=child_main, args=(self._theirs, encode(task_slice), config.model_dump_json(), grace), name="isolated"
        )
        self._auxiliaries = [model.name for model in config.explorer.auxiliary_models]
        self._models, self._results, self._loop = models, results, asyncio.get_running_loop()
        self._pid: int | None = None
        self._killed = False

    def start(self) -> None:
        """Start the process, and before the first process the fork server."""
        with _processes:
            self._process.start()
        self._theirs.close()
        self._pid = self._process.pid
        if self._killed:
            self.kill()

    def follow(self) -> float:
        """Receive frames from the process until its slice is over; return the slice's duration in seconds.

        Raises:
            ChildDied: The pipe ended before, or a frame does not decode.
        """
        try:
            while (kind := self._ours.recv_bytes()) != END:
                self._receive(kind)
            end = msgpack.unpackb(self._ours.recv_bytes())
            seconds = float(end["seconds"])
            failure = RunFailure(end["message"], str(end["kind"]), bool(end["retryable"])) if end["message"] else None
        except (EOFError, OSError):
            raise _died(self._end()) from None
        except (DecodeError, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise ChildDied(f"its process sent a frame that does not decode: {error}", self._end()) from error
        if failure is not None:
            self._loop.call_soon_threadsafe(self._results.add_failure, failure)
        self._end()
        return seconds

    def _receive(self, kind: bytes) -> None:
        body = self._ours.recv_bytes()
        if kind == ASK:
            self._ours.send_bytes(asyncio.run_coroutine_threadsafe(self._engine(), self._loop).result())
        elif kind == LOST:
            if isinstance(self._models, Engines):
                lost = InferenceModel.from_dict(msgpack.unpackb(body))
                self._loop.call_soon_threadsafe(self._models.lost, lost)
        elif kind == RUN:
            run = msgpack.unpackb(body)
            experiences = Experience.deserialize_many(self._ours.recv_bytes())
            self._loop.call_soon_threadsafe(self._results.keep, run["run"], experiences, run["metrics"])
        else:
            raise DecodeError(f"a frame of kind {kind[:20]!r}")

    async def _engine(self) -> bytes:
        """Return the encoded answer to ASK: the engines to use now, or the error if no engine is usable."""
        answer: dict[str, Any]
        try:
            auxiliary = auxiliary_models(self._auxiliaries, self._models)
            answer = {"engine": self._models().to_dict(), "auxiliary": [model.to_dict() for model in auxiliary]}
        except EngineNotReady as error:
            answer = {"error": str(error), "retry_after": error.retry_after}
        except EngineLost as error:
            answer = {"error": str(error)}
        packed: bytes = msgpack.packb(answer)
        return packed

    def kill(self) -> None:
        """Kill the process and its child processes, now or as soon as the process has started."""
        self._killed = True
        pid = self._pid
        if pid is not None:
            # The process leads its own process group once it runs; before that only the process itself exists.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _end(self) -> int | None:
        """Wait for the end of the process, kill its remaining child processes and return the exit code."""
        self._ours.close()
        with _processes:
            self._process.join(EXIT_LIMIT)
            self.kill()
            self._pid = None  # from here on another process may get the same pid
            self._process.join()
            exitcode = self._process.exitcode
            self._process.close()
        return exitcode


def _died(exitcode: int | None) -> ChildDied:
    if exitcode is not None and exitcode < 0:
        how = f"was killed by {signal.Signals(-exitcode).name}"
    else:
        how = f"ended with exit code {exitcode}"
    return ChildDied(f"its process {how} before it had an outcome", exitcode)


async def _within(seconds: float, function: Callable[[], T], failure: str, *, overdue: bool = False) -> T:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await in_thread(function, "isolated-slice")
    except TimeoutError:
        if limit.expired():
            raise ChildDied(f"its process {failure} within {seconds:g} s and was killed", overdue=overdue) from None
        raise
