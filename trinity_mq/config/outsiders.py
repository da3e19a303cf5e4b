"""The allow list of a run: the code that external tasks may name, and the arguments that they may set."""

from __future__ import annotations

from pydantic import Field

from trinity_mq.config.base import Section

Keys = tuple[str, ...]


class OutsidersConfig(Section):
    """Permissions of outsiders: programs that submit tasks, and agents whose sessions end with a replay.

    An outsider may name each ``workflow`` and ``reward_fn`` of the run's own tasksets, for training and evaluation, and
    the additional workflows and reward functions listed here. Names in ``allowed_workflows`` and ``allowed_reward_fns``
    of a taskset may only stand in the task's record. The arguments of the taskset apply. The outsider may set only the
    keys listed here, to any value. Do not list a key that names a command, path, URL, module or model, unless every
    outsider may choose it.
    """

    workflows: dict[str, Keys] = Field(default_factory=dict)
    """Additional workflows that outsiders may name, each with the keys of ``workflow_args`` that they may set, such as
    ``{my.module.Workflow: [max_turns]}``. Under the name of a taskset's workflow, list keys of its arguments that they
    may set."""
    rewards: dict[str, Keys] = Field(default_factory=dict)
    """Additional reward functions that outsiders may name, each with the keys of ``reward_fn_args`` that they may set.
    """
    rollout_args: Keys = ()
    """Keys of ``rollout_args`` that outsiders may set, such as ``temperature``."""
    format_args: Keys = ()
    """Keys of ``format_args`` that outsiders may set, such as ``system_prompt``."""
    record_args: Keys = ()
    """Keys of ``raw_task`` that outsiders may set as arguments of the workflow, such as ``seed`` of a game. A task
    fails if its ``raw_task`` sets another argument of the workflow. Keys that are not arguments are only data.
    """
    max_runs: int = Field(default=4096, ge=1)
    """Maximum number of runs of one external task."""
    reply_queues: Keys = ()
    """Additional prefixes of names of queues to which the outcomes of submitted tasks may be sent."""
