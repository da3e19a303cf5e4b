"""Replay: groups of rollouts that are trained on again."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from trinity_mq.config.base import Section


class ReplayConfig(Section):
    """Groups of rollouts from earlier train steps, trained on next to the fresh groups of each step.

    A group contains all runs of one task, with their original logprobs and advantages. Only groups with an advantage
    other than 0 are kept. The groups with the highest priority are chosen. The priority is ``step - decay x uses``,
    where ``step`` is the train step at which the group was fresh: new and rarely used groups come first. Choices follow
    from ``seed`` and the step, so that a trainer that was killed repeats them.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the replayed groups among all groups of a train step without missing fresh groups. Their number is the
    same in every step and is added to the fresh groups; it is smaller if fewer groups are available. 0: no replay."""
    decay: float = Field(default=2.0, ge=0)
    """Number of train steps by which each use ages a group in the order of priority."""
    sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of a normal random number that is added to each priority, drawn again in each step. 0: no
    noise."""
    max_uses: int = Field(default=3, ge=1)
    """Maximum number of times that a group is replayed."""
    cooldown: int = Field(default=1, ge=1)
    """Minimum number of train steps from one use of a group to the next. The first use is as a fresh group."""
    max_age: int = Field(default=16, ge=1)
    """Maximum number of train steps since a group was fresh. ``synchronizer.max_staleness`` applies only to fresh
    groups."""
    priority_fn: str | None = None
    """Priority of your own: the dotted path of a class in Trinity-RFT's form (``PriorityFunction``), or the name under
    which a module in ``plugin_dirs`` registers it with ``PRIORITY_FUNC``. It replaces ``decay``; ``sigma`` and the
    limits apply to it too. None: the priority above."""
    priority_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the constructor of ``priority_fn``, which override its ``default_config``."""
    capacity: int = Field(default=10_000, ge=1)
    """Maximum number of groups to choose from. The groups with the lowest priority are removed. At most 256 MiB of
    groups are kept in memory; the others are read again from the broker's stream, whose retention
    (``broker.ready_max_bytes``) limits their age."""

    @field_validator("priority_fn")
    @classmethod
    def _path(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\w+(\.\w+)+", value):
            raise ValueError(
                f"priority_fn is {value!r}, wanted the dotted path of a class, or a name that a module in plugin_dirs "
                "registers"
            )
        return value
