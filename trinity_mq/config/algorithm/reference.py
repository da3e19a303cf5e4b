"""The sections of the reference model and of the KL to it in the rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trinity_mq.config.base import Section


class RewardKL(Section):
    """A KL to the reference model that is subtracted from the reward of each trained token: ``r_t - coef kl_t`` (arXiv
    1909.08593; estimators of http://joschu.net/blog/kl-approx.html).

    It uses the logprobs of the policy that sampled the answer, since the reward also belongs to that answer.
    """

    kind: Literal["k1", "k2", "k3", "k3_clamped", "abs"] = "k1"
    """Estimate of the KL, as in ``kl``. ``k1``, the difference of the logprobs, is usual: in a reward it has no bias.
    """
    coef: float = Field(default=0.001, gt=0)
    """Weight of the KL. With ``target`` it is the weight in the first train step."""
    target: float | None = Field(default=None, gt=0)
    """Target KL in nats per token. After each train step the weight becomes ``coef (1 + clip(kl / target - 1, -.2, .2)
    samples / horizon)``. Null: the weight is constant."""
    horizon: int = Field(default=10000, ge=1)
    """With ``target``: number of samples over which the weight changes by at most a fifth. One train step never changes
    it by more."""


class ReferenceConfig(Section):
    """The reference model. It starts as the first model of the run, and is only used if a piece needs a reference."""

    update: Literal["never", "copy", "ema"] = "never"
    """Change of the reference every ``every_steps`` train steps. ``never``: it does not change. ``copy``: it becomes a
    copy of the policy. ``ema``: it becomes ``decay reference + (1 - decay) policy``, a moving average (arXiv
    2404.09656)."""
    every_steps: int = Field(default=100, ge=1)
    """Number of train steps between updates."""
    decay: float = Field(default=0.4, gt=0, lt=1)
    """ema: share of the old reference that is kept at an update."""
    offload: bool = False
    """If the policy is on a CUDA device, keep the reference in host memory between passes. Each pass then copies it to
    the device and back."""
