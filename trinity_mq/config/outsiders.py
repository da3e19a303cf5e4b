"""The allow list of a run: the code that a task from outside may name, and the arguments that it may set."""

from __future__ import annotations

from pydantic import Field

from trinity_mq.config.base import Section

Keys = tuple[str, ...]


class OutsidersConfig(Section):
    """Permissions of outsiders: programs that submit tasks, and agents whose sessions end with a replay.

    An outsider may name the workflows and reward functions of the run's own tasksets, training and evaluation, and
    those listed here. It sets no argument of them: the arguments of the taskset apply. Each key listed here is open: an
    outsider may give it any value. List no key that names a command, path, URL, module or model unless every outsider
    may choose that.
    """

    workflows: dict[str, Keys] = Field(default_factory=dict)
    """Further workflows that outsiders may name, each with the keys of ``workflow_args`` that they may set, such as
    ``{my.module.Workflow: [max_turns]}``. The name of a taskset's workflow opens keys of that."""
    rewards: dict[str, Keys] = Field(default_factory=dict)
    """Further reward functions that outsiders may name, each with the keys of ``reward_fn_args`` that they may set."""
    rollout_args: Keys = ()
    """Keys of ``rollout_args`` that outsiders may set, such as ``temperature``."""
    format_args: Keys = ()
    """Keys of ``format_args`` that outsiders may set, such as ``system_prompt``."""
    record_args: Keys = ()
    """Keys of ``raw_task`` that a workflow may take as arguments, such as ``seed`` of a game. Other keys are data."""
    max_runs: int = Field(default=4096, ge=1)
    """Maximum runs of one task from outside."""
    reply_queues: Keys = ()
    """Prefixes of queue names, in addition to the usual ones, to which the outcomes of submitted tasks may be sent."""
