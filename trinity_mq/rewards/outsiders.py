"""Decides which names and settings a task from outside may use. Pure functions of the configuration and the task."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trinity_mq.config import Config, TasksetConfig
from trinity_mq.messages import SessionReplay, TaskBody


class NotAllowed(ValueError):
    """A task from outside uses a name or a setting that the configuration does not allow. The message tells which
    setting allows it.
    """


def restrict_task(config: Config, task: TaskBody) -> TaskBody:
    """Return a task from outside, completed with the configuration's values for everything that the task does not set
    or may not set.

    Nothing is imported: names are compared as text.

    Raises:
        NotAllowed: The task uses a name that is not allowed, sets an argument that is not open to another value than
            the configuration's, has too many runs, or has an invalid record.
    """
    outsiders, tasksets, taskset = config.outsiders, _tasksets(config), _taskset(config, task)
    try:
        taskset.check_record(task.raw_task)
    except ValueError as error:
        raise NotAllowed(f"raw_task: {error}") from error
    record_workflow, record_reward = taskset.workflow_of(task.raw_task), taskset.reward_fn_of(task.raw_task)
    workflow, reward = task.workflow or record_workflow, task.reward_fn or record_reward
    reward_fn_args = taskset.reward_fn_args
    if workflow != record_workflow:
        _check_name("workflow", workflow, {*outsiders.workflows, *(configured.workflow for configured in tasksets)})
    if reward not in {record_reward, taskset.reward_fn}:
        configured_args = {configured.reward_fn: configured.reward_fn_args for configured in reversed(tasksets)}
        _check_name("reward_fn", reward, {*outsiders.rewards, *configured_args} - {""})
        reward_fn_args = configured_args.get(reward, {})
    if task.repeat_times > outsiders.max_runs:
        raise NotAllowed(
            f"repeat_times is {task.repeat_times}, wanted at most outsiders.max_runs, {outsiders.max_runs}"
        )
    workflow_args = taskset.workflow_args if workflow in {record_workflow, taskset.workflow} else {}
    open_args, open_reward_args = outsiders.workflows.get(workflow, ()), outsiders.rewards.get(reward, ())
    rules: dict[str, tuple[Mapping[str, Any], Collection[str], str]] = {
        "workflow_args": (workflow_args, open_args, f"outsiders.workflows: {{{workflow}: [...]}}"),
        "reward_fn_args": (reward_fn_args, open_reward_args, f"outsiders.rewards: {{{reward or 'NAME'}: [...]}}"),
        "rollout_args": (taskset.task_rollout_args, outsiders.rollout_args, "outsiders.rollout_args"),
        "format_args": (taskset.format.as_args(), outsiders.format_args, "outsiders.format_args"),
    }
    return task.model_copy(
        update={
            "workflow": workflow,
            "reward_fn": reward or None,
            **{field: _arguments(field, getattr(task, field), *rule) for field, rule in rules.items()},
            "record_args": list(outsiders.record_args),
            "index": {},  # only a record of a taskset has a position in it
        }
    )


def replay_refusal(config: Config, replay: SessionReplay) -> str | None:
    """Return the reason why a session may not be replayed with these settings, or None if it may."""
    body = TaskBody(workflow=replay.workflow, workflow_args=replay.workflow_args, repeat_times=replay.runs)
    try:
        restrict_task(config, body)
    except NotAllowed as error:
        return str(error)
    return None


def _tasksets(config: Config) -> tuple[TasksetConfig, ...]:
    return (*config.buffer.training_tasksets, *config.buffer.eval_tasksets)


def _taskset(config: Config, task: TaskBody) -> TasksetConfig:
    """Return the taskset whose settings complete a task: the first taskset with the task's workflow and, if the task
    names a reward function, this function; else the first with its workflow; else the first of all.
    """
    first, *_ = tasksets = _tasksets(config)
    workflow = task.workflow or first.workflow
    running = [taskset for taskset in tasksets if workflow in taskset.workflows]
    return next(
        (taskset for taskset in running if task.reward_fn in {None, "", taskset.reward_fn}), (*running, first)[0]
    )


def _check_name(field: str, name: str, allowed: Collection[str]) -> None:
    if name not in allowed:
        setting = "outsiders.workflows" if field == "workflow" else "outsiders.rewards"
        raise NotAllowed(
            f"{field} {name!r:.120} may not be named from outside; allowed: {', '.join(sorted(allowed)) or 'none'}. "
            f"Name one of these, or list it under {setting} in the configuration of the run"
        )


def _arguments(
    field: str, task_args: Mapping[str, Any], config_args: Mapping[str, Any], open_keys: Collection[str], setting: str
) -> dict[str, Any]:
    """Return the arguments that apply: the configuration's arguments, overridden by the task's arguments with an open
    key.

    Raises:
        NotAllowed: The task sets a closed key to another value than the configuration's.
    """
    closed = [
        key
        for key, value in task_args.items()
        if key not in open_keys and not (key in config_args and config_args[key] == value)
    ]
    if closed:
        raise NotAllowed(
            f"{field}.{closed[0]!r:.120} may not be set from outside: leave it out, or open this key with {setting} in "
            "the configuration of the run"
        )
    return {**config_args, **{key: value for key, value in task_args.items() if key in open_keys}}
