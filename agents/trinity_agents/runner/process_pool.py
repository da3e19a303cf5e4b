"""Executes slices in processes of their own, which they may kill, hang or corrupt.

A fork server imports the heavy modules once; every slice gets a fork of it. Slice and outcome cross a pipe as messages
and experience bodies; no experience is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgpack

from trinity_agents.runner.pool_child import ASK, LOST, RUN, child_main
from trinity_mq.config import Config
from trinity_mq.experience import Experience
from trinity_mq.messages import DecodeError, TaskResult, TaskSlice, decode, encode
from trinity_mq.models import InferenceModel
from trinity_mq.models.engine_selection import Engines, auxiliary_models
from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.threads import in_thread

T = TypeVar("T")

PRELOAD = ["trinity_agents.runner.pool_child"]
START_LIMIT = 120.0
"""Seconds for a process to start; the first one waits for the imports."""
GRACE = 10.0
"""Seconds over the slice's own time until its process is killed."""
EXIT_LIMIT = 2.0
"""Seconds from the end of the pipe to the end of the process."""

# multiprocessing looks after all its children whenever one starts, and two threads doing so can lose an exit code.
_processes = threading.Lock()


class ChildDied(Exception):
    """The process of a slice ended, or was ended, without an outcome; the message says how."""

    def __init__(self, message: str, exitcode: int | None = None, *, overdue: bool = False) -> None:
        super().__init__(message)
        self.overdue = overdue
        """It was killed here because the time of its slice was over."""
        self.exitcode = exitcode
        """As of ``multiprocessing.Process``: below 0 a signal. None if it was killed here because its time was over."""


class ProcessPool:
    """Runs slices in processes of their own, so many at a time.

    Args:
        max_children: Processes at a time; further slices wait.
    """

    def __init__(self, max_children: int) -> None:
        self._slots = asyncio.Semaphore(max_children)
        self._children: set[_Child] = set()

    async def run(
        self,
        task_slice: TaskSlice,
        config: Config,
        models: Callable[[], InferenceModel],
        results: RunResults | None = None,
    ) -> SliceOutcome:
        """Do a slice as ``WorkflowRunner.run_slice`` does, in a process of its own.

        Args:
            task_slice: The slice.
            config: The run's configuration.
            models: Says which engine to use now; the process asks before each attempt.
            results: Gets each run as it is finished: what is in it survives the process.

        Raises:
            ChildDied: The process ended without an outcome, or was killed because its time was over.
        """
        results = RunResults() if results is None else results
        conversation = _Conversation(models, results, [model.name for model in config.explorer.auxiliary_models])
        async with self._slots:
            child = _Child(task_slice, config)
            self._children.add(child)
            try:
                await _within(START_LIMIT, child.start, "did not start")
                seconds = task_slice.slice_timeout + GRACE
                end = await _within(seconds, lambda: child.follow(conversation), "did not end", overdue=True)
            finally:
                self._children.discard(child)
                child.kill()
        if end.message:
            results.add_failure(end.message)
        return results.outcome(end.seconds)

    async def close(self) -> None:
        """Kill what still runs: each :meth:`run` under way raises ChildDied."""
        for child in list(self._children):
            child.kill()


class _Conversation:
    """The runner's end of the conversation with a child; its methods are called in a thread."""

    def __init__(self, models: Callable[[], InferenceModel], results: RunResults, auxiliaries: Sequence[str]) -> None:
        self._models, self._results, self._auxiliaries = models, results, auxiliaries
        self._loop = asyncio.get_running_loop()

    def engine(self) -> bytes:
        """Return which engine to use now."""
        return asyncio.run_coroutine_threadsafe(_engine(self._models, self._auxiliaries), self._loop).result()

    def lost(self, engine: bytes) -> None:
        """Pass on that an engine did not answer."""
        if isinstance(self._models, Engines):
            self._loop.call_soon_threadsafe(self._models.lost, InferenceModel.from_dict(msgpack.unpackb(engine)))

    def run_finished(self, head: bytes, body: bytes) -> None:
        """Keep a run."""
        said = msgpack.unpackb(head)
        experiences = Experience.deserialize_many(body)
        self._loop.call_soon_threadsafe(self._results.keep, said["run"], experiences, said["metrics"])


class _Child:
    """One process and the pipe to it. Its methods block, except :meth:`kill`."""

    def __init__(self, task_slice: TaskSlice, config: Config) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._ours, self._theirs = context.Pipe()
        self._process = context.Process(
            target=child_main, args=(self._theirs, encode(task_slice), config.model_dump_json(), GRACE), name="isolated"
        )
        self._pid: int | None = None
        self._killed = False

    def start(self) -> None:
        """Start the process, and before the first one the fork server."""
        with _processes:
            self._process.start()
        self._theirs.close()
        self._pid = self._process.pid
        if self._killed:
            self.kill()

    def follow(self, conversation: _Conversation) -> TaskResult:
        """Listen to the process until its slice is over; return what it says at the end, which is not about runs.

        Raises:
            ChildDied: The pipe ended before, or what came through it is none of what it should be.
        """
        try:
            while True:
                head = self._ours.recv_bytes()
                if head == ASK:
                    self._ours.send_bytes(conversation.engine())
                elif head == LOST:
                    conversation.lost(self._ours.recv_bytes())
                elif head == RUN:
                    conversation.run_finished(self._ours.recv_bytes(), self._ours.recv_bytes())
                else:
                    break
        except (EOFError, OSError):
            raise _died(self._end()) from None
        except DecodeError as error:
            raise ChildDied(f"its process sent a run that does not decode: {error}", self._end()) from error
        exitcode = self._end()
        try:
            return decode(head, TaskResult)
        except DecodeError as error:
            raise ChildDied(f"its process sent an outcome that does not decode: {error}", exitcode) from error

    def kill(self) -> None:
        """Kill the process and what it has started, now or as soon as it has started."""
        self._killed = True
        pid = self._pid
        if pid is not None:
            # It is the leader of its group, once it runs; until then it is alone.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _end(self) -> int | None:
        """See the process end, and what it has started; return its exit code."""
        self._ours.close()
        with _processes:
            self._process.join(EXIT_LIMIT)
            self.kill()
            self._pid = None  # from here on the number may be another process's
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


async def _engine(models: Callable[[], InferenceModel], auxiliaries: Sequence[str]) -> bytes:
    """Return which engines to use, or why there is none, as the process reads it."""
    answer: dict[str, Any]
    try:
        beside = auxiliary_models(auxiliaries, models)
        answer = {"engine": models().to_dict(), "auxiliary": [model.to_dict() for model in beside]}
    except EngineNotReady as error:
        answer = {"error": str(error), "retry_after": error.retry_after}
    except EngineLost as error:
        answer = {"error": str(error)}
    packed: bytes = msgpack.packb(answer)
    return packed


async def _within(seconds: float, function: Callable[[], T], failure: str, *, overdue: bool = False) -> T:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await in_thread(function, "isolated-slice")
    except TimeoutError:
        if limit.expired():
            raise ChildDied(f"its process {failure} within {seconds:g} s and was killed", overdue=overdue) from None
        raise
