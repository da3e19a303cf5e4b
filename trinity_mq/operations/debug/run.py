"""Selects one task, by its number or as JSON, runs it without a broker and records what happens."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trinity_mq.config import Config, TasksetConfig
from trinity_mq.data import open_taskset
from trinity_mq.errors import CommandError
from trinity_mq.messages import TaskBody
from trinity_mq.observability.experiences.printer import note
from trinity_mq.operations.submit import read_task

if TYPE_CHECKING:
    from trinity_mq.messages import TaskBody
    from trinity_mq.models import InferenceModel
    from trinity_mq.operations.debug.engine import DebugEngine
    from trinity_mq.operations.debug.report import Report
    from trinity_mq.workflows import Task

T = TypeVar("T")

CRASH_SECONDS = 2.0
"""Maximum seconds to detect a dead engine after an unanswered call."""


async def debug_task(config: Config, body: TaskBody, number: int, arguments: argparse.Namespace, report: Report) -> int:
    """Run task ``number`` once, on the engine of ``--engine`` or a new engine, and record it in ``report``. Return 1 if
    the workflow failed, else 0.
    """
    from trinity_mq.operations.debug.engine import auxiliary_engine

    task = _task(body, number)
    with tempfile.TemporaryDirectory(prefix="tmq-debug-", ignore_cleanup_errors=True) as folder:
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(_engine(config, arguments, Path(folder)))
            auxiliaries = [
                await stack.enter_async_context(auxiliary_engine(config, Path(folder), model, note))
                for model in config.explorer.auxiliary_models
            ]
            note(f"running {body.workflow}")
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
    from trinity_mq.operations.debug.engine import child_engine, external_engine

    weights = None if arguments.weights is None else Path(arguments.weights).expanduser().resolve()
    if arguments.engine is None:
        return child_engine(config, folder, weights, note)
    if weights is not None:
        raise CommandError("--weights is for an engine that this command starts: leave --weights or --engine out")
    return external_engine(config, arguments.engine)


async def _run(
    config: Config, task: Task, engine: DebugEngine, auxiliaries: Sequence[DebugEngine], report: Report
) -> int:
    from trinity_mq.operations.debug.errors import ErrorRecorder, recording_errors
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
    """Yield the engine's model with the URL of a proxy that reports each call."""
    from trinity_mq.operations.debug.proxy import ProxiedCall, RecordingProxy

    def on_call(call: ProxiedCall) -> None:
        engine.unanswered += bool(call.error)
        report.call(call, engine.texts)

    name = engine.model.name if engine.model.role == "auxiliary" else ""
    async with RecordingProxy(engine.model.url, on_call, name=name, numbers=numbers).running() as url:
        yield dataclasses.replace(engine.model, url=url)


async def _run_until_lost(lost: Callable[[], Awaitable[object]], work: Awaitable[T]) -> T:
    """Return the result of ``work``. If ``lost`` raises first, cancel ``work``; the error is in an ExceptionGroup."""

    async def watch() -> None:
        await lost()

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        result = await work
        watching.cancel()
    return result


def find_task(config: Config, task: str, taskset: str | None) -> tuple[int, TaskBody]:
    """Return the number of a task, and the task. A task in JSON has number 0.

    Args:
        config: Configuration of the run.
        task: The number of a record in storage order, or a task as JSON, ``@FILE`` or ``-``.
        taskset: Name of a taskset in ``buffer.tasksets`` or ``buffer.eval_tasksets``. Tasks of the latter are made as
            for an evaluation. None: the first training taskset.

    Raises:
        CommandError: The taskset, record or task does not exist.
        TasksetError: The taskset cannot be read.
    """
    section = _section(config, taskset)
    if not task.lstrip("+-").isdecimal():
        return 0, _completed(section, read_task(task))
    if not section.storage.holds_records:
        raise CommandError(
            f"taskset {section.name!r} gets its tasks from outside and has no records. Give the task itself, as "
            "--task '{\"raw_task\": {...}}', or --taskset with the name of an evaluation taskset"
        )
    records = open_taskset(
        section.model_copy(update={"selector": "sequential", "data_selector": None}),
        repeat_times=1,
        seed=config.seed,
        is_eval=taskset in {evaluated.name for evaluated in config.buffer.eval_tasksets},
    )
    number = int(task)
    if not 0 <= number < len(records):
        raise CommandError(f"--task {number}: taskset {section.name!r} has records 0 to {len(records) - 1}")
    records.restore({**records.state(), "cursor": number})
    return number, records.next_batch(1)[0]


def _section(config: Config, taskset: str | None) -> TasksetConfig:
    if taskset is None:
        return config.buffer.training_tasksets[0]
    sections = {
        taskset_section.name: taskset_section
        for taskset_section in (*config.buffer.tasksets, *config.buffer.eval_tasksets)
    }
    if taskset not in sections:
        raise CommandError(
            f"--taskset {taskset!r} is in neither buffer.eval_tasksets nor buffer.tasksets; this configuration has "
            + (", ".join(map(repr, sections)) if sections else "none")
        )
    return sections[taskset]


def _completed(section: TasksetConfig, task: TaskBody) -> TaskBody:
    """Return a task with missing fields filled in from its taskset's section, as the explorer does."""
    defaults = {
        "workflow": section.workflow_of(task.raw_task),
        "workflow_args": section.workflow_args,
        "reward_fn": section.reward_fn_of(task.raw_task) or None,
        "reward_fn_args": section.reward_fn_args,
        "format_args": section.format.as_args(),
        "rollout_args": section.task_rollout_args,
    }
    return task.model_copy(
        update={"repeat_times": 1, **{name: getattr(task, name) or value for name, value in defaults.items()}}
    )
