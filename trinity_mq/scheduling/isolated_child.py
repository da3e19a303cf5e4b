"""What runs in the process of an isolated slice. Imported once by the fork server, heavy modules included."""

from __future__ import annotations

import asyncio
import ctypes
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
from trinity_mq.messages import TaskResult, TaskSlice, decode, encode
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.scheduling.status import SliceOutcome
from trinity_mq.scheduling.workflow_runner import WorkflowRunner
from trinity_mq.telemetry import setup_logging

ASK = b"engine?"
"""What the process sends to be told which engine to use; anything else it sends is an outcome."""

_PR_SET_PDEATHSIG = 1


def child_main(pipe: Connection, body: bytes, config_json: str, grace: float) -> None:
    """Do the slice in ``body``, send the outcome through ``pipe`` and end the process.

    Args:
        pipe: To the runner.
        body: An encoded TaskSlice.
        config_json: The run's configuration.
        grace: Seconds over the slice's time after which the kernel ends the process, whoever is left to watch it.
    """
    piece = decode(body, TaskSlice)
    _die_when_forgotten(piece.slice_timeout + grace)
    config = Config.model_validate_json(config_json)
    setup_logging("runner", "isolated", config.path, config.monitor.log_level)
    runner = WorkflowRunner(config, runner_id=f"isolated-{os.getpid()}")
    outcome = asyncio.run(runner.run_slice(piece, lambda: _ask(pipe)))
    try:
        experiences = Experience.serialize_many(outcome.experiences)
    except EncodeError as error:
        outcome = SliceOutcome.failure(f"the experiences do not encode: {error}", outcome.seconds)
        experiences = Experience.serialize_many([])
    pipe.send_bytes(encode(_result(piece, outcome)))
    pipe.send_bytes(experiences)
    # Threads of workflows that never return, and what they registered to do at exit, keep nobody here.
    os._exit(0)


def _die_when_forgotten(seconds: float) -> None:
    """See to it that this process does not outlive those who wait for it, even where it hangs inside of C code."""
    os.setsid()  # with what the slice starts, a group that can be killed as one
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # of the fork server
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seconds))
    faulthandler.enable()
    runner = multiprocessing.parent_process()
    if runner is not None:
        threading.Thread(target=_follow, args=(runner.sentinel,), name="follow-runner", daemon=True).start()


def _follow(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def _ask(pipe: Connection) -> InferenceModel:
    """Ask the runner which engine to use."""
    pipe.send_bytes(ASK)
    answer: dict[str, Any] = msgpack.unpackb(pipe.recv_bytes())
    if "engine" in answer:
        return InferenceModel.from_dict(answer["engine"])
    if "retry_after" in answer:
        raise EngineNotReady(answer["error"], answer["retry_after"])
    raise EngineLost(answer["error"])


def _result(piece: TaskSlice, outcome: SliceOutcome) -> TaskResult:
    return TaskResult(
        batch=piece.batch,
        ticket=piece.ticket,
        task_id=piece.task_id,
        run_base=piece.run_base,
        repeat_times=piece.repeat_times,
        attempt="isolated",
        outcome="finished" if len(outcome.runs) == piece.repeat_times else "partial" if outcome.runs else "failed",
        runs=outcome.runs,
        metrics=outcome.metrics,
        message=outcome.message,
        seconds=outcome.seconds,
        version_min=outcome.version_min,
        version_max=outcome.version_max,
    )
