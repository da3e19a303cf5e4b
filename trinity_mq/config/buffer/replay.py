"""Replay: groups of rollouts that are trained on again."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from trinity_mq.config.base import Section


class ReplayConfig(Section):
    """Groups of rollouts that earlier train steps had, beside the fresh ones of each step.

    A group is all runs of one task, with the logprobs and advantages that it had; only groups with an advantage other
    than 0 are kept. Those with the highest priority are taken, ``step - decay x uses`` with the train step at which a
    group was fresh: new ones first, and those that were used least. Choices follow from ``seed`` and the step, so that
    a trainer that was killed makes them again.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    share: float = Field(default=0.0, ge=0, lt=1)
    """Share of replayed groups in a train step with all of its rollouts, whose number is the same in every step and
    comes on top; fewer where fewer can be taken. 0: nothing is replayed."""
    decay: float = Field(default=2.0, ge=0)
    """Train steps by which a use makes a group older in the order of priority."""
    sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of a normal number that is added to each priority, anew in each step; 0: none."""
    max_uses: int = Field(default=3, ge=1)
    """Most times that a group is replayed."""
    cooldown: int = Field(default=1, ge=1)
    """Train steps from one use of a group to the next, its first one included."""
    max_age: int = Field(default=16, ge=1)
    """Most train steps since a group was fresh. ``synchronizer.max_staleness`` is for fresh groups alone."""
    capacity: int = Field(default=10_000, ge=1)
    """Most groups to choose from; those of the lowest priority go."""
    cache_bytes: int = Field(default=2**28, ge=0)
    """Memory for groups that may be replayed; the others are read from the broker's stream again, whose retention
    (``broker.ready_max_bytes``) bounds their age."""
