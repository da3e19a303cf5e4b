"""Entry point of the process of an isolated slice; the fork server imports it once, including heavy modules."""

from __future__ import annotations

import asyncio
import faulthandler
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from trinity_mq.config import Config
from trinity_mq.experience import EncodeError, Experience
from trinity_mq.messages import TaskSlice, decode
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.workflow_runner import WorkflowRunner
from trinity_mq.runtime.process import die_with_parent
from trinity_mq.runtime.processes.children import limit_memory
from trinity_mq.telemetry import setup_logging, work_for
from trinity_mq.workflows import RunFailedError

ASK, LOST, RUN, END = b"engine?", b"lost", b"run", b"end"
"""Kinds of frames that the process sends, each followed by a body frame. ASK: request for the engine to use (empty
body). LOST: an engine that did not answer. RUN: a finished run, with its experiences in a third frame. END: the
slice's first failure and duration in seconds."""


def child_main(pipe: Connection, body: bytes, config_json: str, grace: float) -> None:
    """Execute the slice in ``body``, send the outcome through ``pipe`` and end the process.

    Args:
        pipe: Pipe to the runner.
        body: An encoded TaskSlice.
        config_json: The run's configuration as JSON.
        grace: Seconds after the slice's time limit at which the kernel ends the process, even if the runner is dead.
    """
    task_slice = decode(body, TaskSlice)
    _die_with_parent(task_slice.slice_timeout + grace)
    config = Config.model_validate_json(config_json)
    setup_logging(
        "runner",
        "isolated",
        config.path,
        config.monitor.log_level,
        run=config.name,
        max_bytes=config.monitor.log_max_bytes,
    )
    runner = WorkflowRunner(config, runner_id=f"isolated-{os.getpid()}")
    if config.runner.memory_limit is not None:
        limit_memory(config.runner.memory_limit)
    results = RunResults()
    results.on_run = lambda run: _send_run(pipe, results, run)
    with work_for(task_slice.batch, task_slice.ticket):
        outcome = asyncio.run(runner.run_slice(task_slice, _ParentEngines(pipe), results))
    end = {
        "message": outcome.message,
        "kind": outcome.failure_kind,
        "retryable": outcome.retryable,
        "seconds": outcome.seconds,
    }
    _send(pipe, END, msgpack.packb(end, unicode_errors="replace"))
    # os._exit ignores threads of workflows that never return, and their exit handlers.
    os._exit(0)


def _die_with_parent(seconds: float) -> None:
    """Make this process end with its runner, and at the latest after ``seconds``, even if it hangs inside C code."""
    os.setsid()  # processes that the slice starts join this group and can be killed with it
    die_with_parent(os.getppid(), signal.SIGKILL)  # the fork server
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seconds))
    faulthandler.enable()
    runner = multiprocessing.parent_process()
    if runner is not None:
        threading.Thread(target=_follow, args=(runner.sentinel,), name="follow-runner", daemon=True).start()


def _follow(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def _send_run(pipe: Connection, results: RunResults, run: int) -> None:
    """Send a finished run, which the runner keeps even if this process crashes later.

    Raises:
        RunFailedError: The experiences cannot be encoded.
    """
    try:
        body = Experience.serialize_many(results.experiences[run])
        head = msgpack.packb({"run": run, "metrics": results.metrics[run]})
    except (EncodeError, TypeError, ValueError, OverflowError) as error:
        raise RunFailedError(f"the experiences do not encode: {error}") from error
    _send(pipe, RUN, head, body)


def _send(pipe: Connection, *frames: bytes) -> None:
    for frame in frames:
        pipe.send_bytes(frame)


class _ParentEngines:
    """Gets engines from the runner: requests each engine over the pipe, and reports lost engines to it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._auxiliary: dict[str, InferenceModel] = {}
        """Auxiliary engines, as reported with the latest engine."""

    def __call__(self) -> InferenceModel:
        """Request the engine to use from the runner.

        Raises:
            EngineNotReady: No engine is ready yet.
            EngineLost: No engine is alive.
        """
        _send(self._pipe, ASK, b"")
        answer: dict[str, Any] = msgpack.unpackb(self._pipe.recv_bytes())
        if "engine" in answer:
            self._auxiliary = {fields["name"]: InferenceModel.from_dict(fields) for fields in answer["auxiliary"]}
            return InferenceModel.from_dict(answer["engine"])
        if "retry_after" in answer:
            raise EngineNotReady(answer["error"], answer["retry_after"])
        raise EngineLost(answer["error"])

    def auxiliary(self, name: str) -> InferenceModel:
        """Return the engine of an auxiliary model, as the runner reported it with the latest engine."""
        if name not in self._auxiliary:
            raise EngineLost(f"no living engine of auxiliary model {name!r} is known")
        return self._auxiliary[name]

    def lost(self, engine: InferenceModel) -> None:
        """Report to the runner that an engine did not answer."""
        _send(self._pipe, LOST, msgpack.packb(engine.to_dict()))
