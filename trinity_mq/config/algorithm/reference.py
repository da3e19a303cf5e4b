"""The sections of the reference model, and of a KL to it in the rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trinity_mq.config.base import Section


class RewardKL(Section):
    """A KL to the reference model that is taken from the reward of each trained token: ``r_t - coef kl_t`` (arXiv
    1909.08593; estimators of http://joschu.net/blog/kl-approx.html).

    It is that of the policy which sampled, by its own logprobs, since the reward is that of its answer.
    """

    kind: Literal["k1", "k2", "k3", "k3_clamped", "abs"] = "k1"
    """As in ``kl``; ``k1``, the difference of the logprobs, is the usual one: in a reward it has no bias."""
    coef: float = Field(default=0.001, gt=0)
    """Weight of the KL; with ``target`` the one of the first train step."""
    target: float | None = Field(default=None, gt=0)
    """KL in nats a token to hold by moving the weight, ``coef (1 + clip(kl / target - 1, -.2, .2) samples / horizon)``
    after each train step. Null: the weight stays."""
    horizon: int = Field(default=10000, ge=1)
    """With ``target``: samples over which the weight changes by a fifth, which is the most in one train step."""


class ReferenceConfig(Section):
    """The reference model, which begins as the first model of the run; without effect where nothing needs one."""

    update: Literal["never", "copy", "ema"] = "never"
    """The model that it becomes every ``every_steps`` train steps: the one that it was; the policy; or
    ``decay reference + (1 - decay) policy``, a moving average (arXiv 2404.09656)."""
    every_steps: int = Field(default=100, ge=1)
    """Train steps between updates."""
    decay: float = Field(default=0.4, gt=0, lt=1)
    """ema: how much of the reference stays at an update."""
    offload: bool = False
    """Keep it in host memory between passes where the policy is on a CUDA device; each pass then copies it there and
    back."""
