"""The critic section: the value function of algorithms whose estimator is ``gae``."""

from __future__ import annotations

from pydantic import Field

from trinity_mq.config.base import Section


class CriticConfig(Section):
    """A copy of the first model with a scalar head, trained together with the policy. It is used only by the estimator
    ``gae``.
    """

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of the critic's AdamW; constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of train steps at the start of the run that train only the critic and leave the policy unchanged.
    """
    value_clip: float = Field(default=0.5, gt=0)
    """Change of a token's value towards its return, in one train step, beyond which the value loss has no gradient."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Maximum norm of the critic's gradient. A larger gradient is scaled down to it."""
