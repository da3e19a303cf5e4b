"""The critic section: the value function of algorithms whose estimator is ``gae``."""

from __future__ import annotations

from pydantic import Field

from trinity_mq.config.base import Section


class CriticConfig(Section):
    """A copy of the first model with a scalar head, trained beside the policy; without effect on other estimators."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of its AdamW, constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """Train steps, counted from the first one of the run, in which only the critic learns; the policy stays."""
    value_clip: float = Field(default=0.5, gt=0)
    """Largest change of a token's value in a train step that has a gradient."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest norm of its gradient; a larger gradient is scaled down to it."""
