"""Selects the task of ``trinity-mq debug``: a record of a taskset by its number, or a task in JSON."""

from __future__ import annotations

from trinity_mq.config import Config, TasksetConfig
from trinity_mq.data import open_taskset
from trinity_mq.errors import CommandError
from trinity_mq.messages import TaskBody
from trinity_mq.operations.submit import read_task


def find_task(config: Config, task: str, taskset: str | None) -> tuple[int, TaskBody]:
    """Return a task and its number. A task in JSON has number 0.

    Args:
        config: Configuration of the run.
        task: The number of a record in storage order, or a task as JSON, ``@FILE`` or ``-``.
        taskset: Name of an evaluation taskset; None: the training taskset.

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
        is_eval=taskset is not None,
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
            f"--taskset {taskset!r} is not an evaluation taskset; this configuration has "
            + (", ".join(map(repr, sections)) if sections else "none")
        )
    return sections[taskset]


def _completed(section: TasksetConfig, task: TaskBody) -> TaskBody:
    """Return a task with missing fields filled in from its taskset's section, as the explorer does."""
    defaults = {
        "workflow": section.workflow,
        "workflow_args": section.workflow_args,
        "reward_fn": section.reward_fn or None,
        "reward_fn_args": section.reward_fn_args,
        "format_args": section.format.model_dump(),
        "rollout_args": section.rollout_args,
    }
    return task.model_copy(
        update={"repeat_times": 1, **{name: getattr(task, name) or value for name, value in defaults.items()}}
    )
