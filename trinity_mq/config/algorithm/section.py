"""The algorithm section: advantages, loss and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.algorithm.critic import CriticConfig
from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.reference import ReferenceConfig, RewardKL
from trinity_mq.config.algorithm.resolve import resolve_algorithm
from trinity_mq.config.base import FiniteArgs, Section
from trinity_mq.config.estimators import Estimator, GroupEstimator, Place


class OptimizerConfig(Section):
    """The optimizer of the policy, and the schedule of its learning rate."""

    optimizer_type: Literal["adamw", "adamw_8bit", "muon", "sgd"] = "adamw"
    """``adamw`` (arXiv 1711.05101). ``adamw_8bit``: AdamW with 8-bit moments (arXiv 2110.02861); needs bitsandbytes or
    torchao. ``muon`` (arXiv 2502.16982): Muon for the matrices of the blocks, with steps scaled to the size of AdamW's
    steps, and AdamW for embeddings, head, norms and biases; needs torch 2.9. ``sgd``: steps along the gradient.
    Trinity-RFT's ``adam`` is accepted as a name for ``adamw``."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate. Default by algorithm: 2e-5 for ``sft``, ``cpt``, ``raft``, ``sft_is`` and ``sft_phi``, 5e-6
    for ``dpo`` and ``ipo_pref``, 1e-6 for all others. Adapters (LoRA) need about ten times as much."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Value that AdamW adds to the root of the second moment. Gradients of about this size or less cause smaller steps;
    for such gradients lower the value."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Share of the last direction that Muon and SGD keep. None: 0.95 for ``muon``, 0 for ``sgd``."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of all weights except norms and biases: each step subtracts ``lr x weight_decay`` times
    the weight. SGD adds ``weight_decay`` times the weight to the gradient, which is the same without momentum."""
    offload: bool = False
    """Keep the optimizer's state in host memory; each step copies it to the device part by part. With AdamW it saves 8
    bytes of device memory for each weight and transfers as much in each direction in every step."""
    lr_warmup_steps: int = Field(default=10, ge=0)
    """Number of train steps during the linear rise of the learning rate from 0."""
    lr_scheduler_type: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """``linear`` falls from the first train step on, as ``1 - step / total``, to ``min_lr_ratio``; ``total`` is the
    number of train steps of the run. ``cosine`` falls from the end of the warm-up along half a cosine, to
    ``min_lr_ratio`` at the last train step. ``wsd`` (warm-up, stable, decay) is constant until the last
    ``lr_decay_ratio`` of the train steps. ``constant`` oscillated in our measurements. Without
    ``buffer.total_steps`` the rate falls only in mode ``train`` on records; otherwise it stays constant, and the start
    of the run warns."""
    lr_decay_ratio: float = Field(default=0.1, gt=0, le=1)
    """wsd: last share of the run over which the learning rate falls linearly to ``min_lr_ratio``."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the decay, as a fraction of ``lr``."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient. A larger gradient is scaled down to it."""

    @field_validator("optimizer_type", mode="before")
    @classmethod
    def _adam_is_adamw(cls, value: Any) -> Any:
        return "adamw" if value == "adam" else value

    @model_validator(mode="after")
    def _check_effects(self) -> OptimizerConfig:
        if self.momentum is not None and self.optimizer_type not in {"muon", "sgd"}:
            raise ValueError(
                f"momentum is {self.momentum:g}, which {self.optimizer_type} does not have: its moments follow betas; "
                "remove it, or take optimizer_type muon or sgd"
            )
        if self.offload and self.optimizer_type == "adamw_8bit":
            raise ValueError(
                "offload is true with optimizer_type adamw_8bit, which is not possible: take adamw with offload, or "
                "adamw_8bit without, whose state is a quarter as large"
            )
        return self


class AlgorithmConfig(LossConfig):
    """An algorithm: a preset, changes to its pieces, and the optimizer."""

    algorithm_type: str = "grpo"
    """Preset for all pieces that are not configured; ``trinity-mq algorithms`` lists the presets."""
    estimator: Estimator = Field(default_factory=lambda: GroupEstimator(epsilon=1e-4))
    """Method that turns rewards, or a teacher's logprobs, into an advantage for each response token."""
    reward_kl: RewardKL | None = None
    """Subtracts a KL to the reference model from the rewards of tokens; for the estimators ``discounted`` and ``gae``.
    """
    repeat_times: int = Field(default=8, ge=1)
    """Number of runs of each task: the group size."""
    min_group_runs: int | None = Field(default=None, ge=1)
    """Minimum number of finished runs of a task if runs are compared; smaller groups are dropped. None: half of
    ``repeat_times``, at least 2."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    entropy_decay: bool = False
    """Scale ``entropy_coef`` with the decay of the learning rate."""
    mini_batches: int = Field(default=1, ge=1)
    """Number of optimizer steps into which each pass over the experiences of a train step is divided."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over the experiences of a train step."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer and its schedule."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The value function, used if ``estimator`` is ``gae``."""
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    """The model near which the policy is held, used if a piece needs it."""
    allow_truncated_sampling: bool = False
    """Train on samples drawn with top-p, top-k, min-p or penalties, although their logprobs are not the policy's."""

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, data: Any) -> Any:
        return resolve_algorithm(data) if isinstance(data, Mapping) else data

    @property
    def advantage_agent(self) -> Place:
        """The agent that computes advantages: the trainer if they need a state or a model of their own."""
        return "trainer" if self.reward_kl is not None else self.estimator.where

    @property
    def effective_min_group_runs(self) -> int:
        """``min_group_runs`` with its default filled in."""
        return self.min_group_runs if self.min_group_runs is not None else max(2, self.repeat_times // 2)

    @model_validator(mode="after")
    def _groups(self) -> AlgorithmConfig:
        if not self.estimator.compares_runs:
            return self
        if self.repeat_times < 2:
            raise ValueError(
                f"repeat_times is {self.repeat_times}; {self.algorithm_type} compares the runs of a task and needs at "
                "least 2"
            )
        if self.effective_min_group_runs > self.repeat_times:
            raise ValueError(
                f"min_group_runs is {self.min_group_runs}, more than repeat_times {self.repeat_times}: every group "
                "would be dropped"
            )
        return self


class OperatorConfig(Section):
    """One operator of the chain."""

    name: str
    """Registered name or dotted path."""
    args: FiniteArgs = Field(default_factory=dict)
    """Keyword arguments of its constructor, checked against its annotations when the operator is created."""
