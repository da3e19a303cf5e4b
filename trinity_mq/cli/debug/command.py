"""``trinity-mq debug workflow``: runs one task once, and shows its calls, tokens, logprobs and rewards."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trinity_mq.cli.arguments import add_actions, add_target
from trinity_mq.cli.debug.task import find_task
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.cli.target import configuration
from trinity_mq.config import Config
from trinity_mq.runtime.plugins import add_plugins

if TYPE_CHECKING:
    from trinity_mq.cli.debug.engine import DebugEngine
    from trinity_mq.cli.debug.report import Report
    from trinity_mq.messages import TaskBody
    from trinity_mq.models import InferenceModel
    from trinity_mq.workflows import Task

T = TypeVar("T")

CRASH_SECONDS = 2.0
"""Maximum seconds to detect a dead engine after an unanswered call."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``trinity-mq debug`` and their arguments."""
    add = add_actions(parser)
    action = add("workflow", "run a task once, and show every message, token, logprob and reward", workflow)
    add_target(action)
    action.add_argument(
        "--task", metavar="N", default="0", help="number of a record, or a task as JSON, @FILE or - (default: 0)"
    )
    action.add_argument("--taskset", metavar="NAME", help="an evaluation taskset (default: the one that is trained on)")
    action.add_argument("--engine", metavar="URL", help="use the engine there instead of starting one")
    action.add_argument("--weights", metavar="FOLDER", help="such as runs/x/final (default: what a run begins with)")
    action.add_argument("--json", action="store_true", help="print one JSON object a line")
    action = add("algorithm", "run the algorithm on a small batch, show its gradient and check it", algorithm)
    add_target(action)


def algorithm(arguments: argparse.Namespace) -> int:
    """Run the algorithm of a configuration on a small batch."""
    from trinity_mq.cli.debug.algorithm import algorithm as run

    return run(arguments)


def workflow(arguments: argparse.Namespace) -> int:
    """Run a task once and print its events. Return 1 if it failed."""
    from trinity_mq.cli.debug.report import JsonReport, TextReport
    from trinity_mq.telemetry import setup_logging

    config = configuration(arguments)
    add_plugins(config.plugin_dirs)
    number, body = find_task(config, arguments.task, arguments.taskset)
    setup_logging("debug", "debug", None, "error")
    report: Report = JsonReport(sys.stdout) if arguments.json else TextReport(sys.stdout)
    report.task(number, body)
    with contextlib.redirect_stdout(sys.stderr):  # keep the workflow's prints out of the report
        return run_to_the_end(_debug(config, body, number, arguments, report))


def _print_note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _debug(config: Config, body: TaskBody, number: int, arguments: argparse.Namespace, report: Report) -> int:
    from trinity_mq.cli.debug.engine import auxiliary_engine

    task = _task(body, number)
    with tempfile.TemporaryDirectory(prefix="tmq-debug-", ignore_cleanup_errors=True) as folder:
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(_engine(config, arguments, Path(folder)))
            auxiliaries = [
                await stack.enter_async_context(auxiliary_engine(config, Path(folder), model, _print_note))
                for model in config.explorer.auxiliary_models
            ]
            _print_note(f"running {body.workflow}")
            return await _run(config, task, engine, auxiliaries, report)


def _task(body: TaskBody, number: int) -> Task:
    from trinity_mq.workflows import Task, TaskError

    try:
        return Task.from_body(body, 0, number)
    except TaskError as error:
        raise CommandError(str(error)) from error


def _engine(
    config: Config, arguments: argparse.Namespace, folder: Path
) -> contextlib.AbstractAsyncContextManager[DebugEngine]:
    from trinity_mq.cli.debug.engine import given_engine, own_engine

    weights = None if arguments.weights is None else Path(arguments.weights).expanduser().resolve()
    if arguments.engine is None:
        return own_engine(config, folder, weights, _print_note)
    if weights is not None:
        raise CommandError("--weights is for an engine of our own: leave it or --engine out")
    return given_engine(config, arguments.engine)


async def _run(
    config: Config, task: Task, engine: DebugEngine, auxiliaries: Sequence[DebugEngine], report: Report
) -> int:
    from trinity_mq.cli.debug.errors import ErrorRecorder, recording_errors
    from trinity_mq.scheduling import WorkflowRunner

    assert task.workflow is not None
    errors = ErrorRecorder(task.workflow)
    task.workflow = recording_errors(task.workflow, errors)
    explorer = config.explorer.model_copy(update={"max_retry_times": 0})
    numbers = itertools.count(1)
    async with contextlib.AsyncExitStack() as stack:
        model, *others = [
            await stack.enter_async_context(_recorded(served, report, numbers)) for served in (engine, *auxiliaries)
        ]
        runner = WorkflowRunner(config.model_copy(update={"explorer": explorer}), model, others, runner_id="debug")
        stack.push_async_callback(runner.close)
        status, experiences = await _run_until_lost(engine.lost, runner.run_task_async(task, 1))
        if not status.ok and engine.unanswered:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CRASH_SECONDS):
                    await engine.lost()
    for experience in experiences:
        report.experience(experience, engine.texts)
    report.end(status, next(numbers) - 1, None if status.ok else errors.failure())
    return 0 if status.ok else 1


@contextlib.asynccontextmanager
async def _recorded(engine: DebugEngine, report: Report, numbers: Iterator[int]) -> AsyncIterator[InferenceModel]:
    """Yield the model's URL behind a proxy that reports each call."""
    from trinity_mq.cli.debug.proxy import Call, RecordingProxy

    def on_call(call: Call) -> None:
        engine.unanswered += bool(call.error)
        report.call(call, engine.texts)

    name = engine.model.name if engine.model.role == "auxiliary" else ""
    async with RecordingProxy(engine.model.url, on_call, name=name, numbers=numbers).running() as url:
        yield dataclasses.replace(engine.model, url=url)


async def _run_until_lost(lost: Callable[[], Awaitable[object]], work: Awaitable[T]) -> T:
    """Await ``work``, unless ``lost`` raises first."""

    async def watch() -> None:
        await lost()

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        result = await work
        watching.cancel()
    return result
