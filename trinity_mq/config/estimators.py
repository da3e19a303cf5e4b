"""Estimators: how rewards, or a teacher's logprobs, become an advantage per response token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from trinity_mq.config.base import Section

Place = Literal["operator", "trainer"]
"""The agent that computes advantages."""

ACROSS_RUNS = frozenset({"mean", "leave_one_out", "logavgexp", "length_weighted", "second_best", "greedy"})
"""Baselines made of the rewards of a task's other runs."""


class EstimatorBase(Section):
    """The properties that every estimator declares."""

    model_config = ConfigDict(allow_inf_nan=False)

    @property
    def needs_reward(self) -> bool:
        """Whether a run without a finite reward is dropped."""
        return True

    @property
    def compares_runs(self) -> bool:
        """Whether the runs of a task are compared, so that a task needs at least two."""
        return False

    @property
    def where(self) -> Place:
        """``operator`` where the batch alone is enough, ``trainer`` where a state or a critic is needed."""
        return "operator"

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs that are needed besides rewards: ``teacher``, ``critic``, ``roles``."""
        return ()


class LengthPenaltyWeights(Section):
    """Weights of a run's size, each relative to the largest of its task, in the penalty of its reward."""

    output: float = Field(default=0.25, ge=0)
    """Weight of the trained tokens."""
    input: float = Field(default=0.1, ge=0)
    """Weight of the tokens that are not trained: prompts and tool results."""
    turns: float = Field(default=0.1, ge=0)
    """Weight of the turns: stretches of trained tokens."""


class GroupEstimator(EstimatorBase):
    """The reward of a run minus a baseline, divided by a scale; every trained token of the run gets it."""

    kind: Literal["group"] = "group"
    baseline: Literal[
        "mean", "leave_one_out", "logavgexp", "none", "greedy", "length_weighted", "second_best", "role_mean"
    ] = "mean"
    """The baseline, which is subtracted: the mean reward of the task's runs; of the other runs (``leave_one_out``);
    ``tau * log(mean(exp(reward / tau)))``; nothing; the reward of the run with ``info["greedy"]``, which is not
    trained on; the mean weighted with trained tokens; for the best run the second best reward, while all others get 0;
    or the moving average of the rewards of its role (``info["role"]``), which the trainer keeps."""
    tau: float = Field(default=1.0, gt=0)
    """logavgexp: temperature; towards 0 the baseline is the largest reward, towards infinity the mean."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """role_mean: how much of the moving average stays at each reward."""
    shift: float = 0.0
    """Added to the baseline; below 0 good runs weigh more than bad ones."""
    scale: Literal["none", "group", "population", "batch", "batch_raw", "mean"] = "group"
    """Divisor: 1; the standard deviation of the task's rewards, unbiased (``group``) or not (``population``); that of
    all rewards of the batch minus their baselines (``batch``) or as they are (``batch_raw``), both unbiased; or the
    task's mean reward (``mean``), where one that is not above 0 gives advantage 0."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to a standard deviation that divides. Where that is 0, the advantage is 0."""
    std_threshold: float | None = Field(default=None, ge=0)
    """Drop tasks whose rewards have an unbiased standard deviation up to this. None: keep all."""
    rank_penalty: float | None = Field(default=None, gt=0, le=1)
    """Take up to this share from the reward of a run, the more the likelier the policy found it among the task's."""
    length_penalty: LengthPenaltyWeights | None = None
    """Take from the reward of a run its size times the task's mean reward."""
    whiten: bool = False
    """Give the advantages of all trained tokens of the batch mean 0 and variance 1."""
    drop: Literal["none", "balance"] = "none"
    """``balance`` drops runs below their task's mean, chosen by a hash of their id, until these are no more than those
    above it."""
    nonzero_scale: bool = False
    """Multiply by the number of runs over the number of runs whose reward is not 0."""
    step_norm: bool = False
    """Divide by the number of the run's experiences, so that a run of many steps weighs as much as one of few."""
    min_group_runs: int | None = Field(default=None, ge=1)
    """Least finished runs of a task; tasks with fewer are dropped. None: as the caller says."""

    @property
    def compares_runs(self) -> bool:
        return self.baseline in ACROSS_RUNS

    @property
    def where(self) -> Place:
        return "trainer" if self.baseline == "role_mean" else "operator"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("roles",) if self.baseline == "role_mean" else ()

    @model_validator(mode="after")
    def _fitting(self) -> GroupEstimator:
        if not self.compares_runs and self.scale in {"group", "population", "mean"}:
            raise ValueError(
                f"scale is {self.scale!r} with baseline {self.baseline!r}, wanted none, batch or batch_raw: a task's "
                "own rewards scale only what was compared with them"
            )
        if self.baseline == "second_best" and self.shift:
            raise ValueError(
                f"shift is {self.shift} with baseline 'second_best', wanted 0: all runs but the best get exactly 0"
            )
        return self


class DiscountedEstimator(EstimatorBase):
    """The discounted sum of the rewards from each token on (REINFORCE++, arXiv 2501.03262)."""

    kind: Literal["discounted"] = "discounted"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per trained token; tokens that are not trained are skipped."""
    whiten: bool = True
    """Give the advantages of all trained tokens of the batch mean 0 and variance 1."""


class GigpoEstimator(EstimatorBase):
    """Runs compared with runs, and steps with steps from the same state (GiGPO, arXiv 2505.10978)."""

    kind: Literal["gigpo"] = "gigpo"
    omega: float = Field(default=1.0, ge=0)
    """Weight of the comparison of steps."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per step of the rewards that follow a step."""
    scale: Literal["none", "group"] = "none"
    """Divisor of each comparison: 1, or the unbiased standard deviation of what is compared."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the divisor."""
    min_group_runs: int | None = Field(default=None, ge=1)
    """Least finished runs of a task; tasks with fewer are dropped. None: as the caller says."""

    @property
    def compares_runs(self) -> bool:
        return True


class TeacherEstimator(EstimatorBase):
    """Base of the estimators that follow a teacher's logprobs and look at no reward."""

    @property
    def needs_reward(self) -> bool:
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("teacher",)


class DistillEstimator(TeacherEstimator):
    """The teacher's minus the student's logprob of each token (on-policy distillation, arXiv 2306.13649)."""

    kind: Literal["distill"] = "distill"
    kl_coef: float = Field(default=1.0, gt=0)
    """Factor of the advantage."""


class JsdEstimator(TeacherEstimator):
    """The policy gradient of the generalised Jensen-Shannon divergence from a teacher (arXiv 2306.13649)."""

    kind: Literal["jsd"] = "jsd"
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture both are compared with."""
    kl_coef: float = Field(default=1.0, gt=0)
    """Factor of the advantage."""


class GaeEstimator(EstimatorBase):
    """Generalised advantage estimation with the values of a critic (arXiv 1506.02438)."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per trained token; tokens that are not trained are skipped."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Weight of longer looks ahead: 0 trusts the critic's next value, 1 the rewards alone."""
    whiten: bool = True
    """Give the advantages of all trained tokens of the batch mean 0 and variance 1."""

    @property
    def where(self) -> Place:
        return "trainer"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("critic",)


class NoEstimator(EstimatorBase):
    """No advantages: for losses of likelihood or preference alone (sft, dpo, raft)."""

    kind: Literal["none"] = "none"

    @property
    def needs_reward(self) -> bool:
        return False


class EstimatorPlugin(EstimatorBase):
    """A function of your own: ``def advantages(rewards: list[float], **args) -> list[float]``.

    It is called for each task with the rewards of its runs, ordered by run, and returns a number for each of them.
    """

    kind: str = Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)+$")
    """Dotted path of the function, ``package.module.function``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments, checked against its signature when it is first used."""
    min_group_runs: int | None = Field(default=None, ge=1)
    """Least finished runs of a task; tasks with fewer are dropped. None: as the caller says."""

    @property
    def compares_runs(self) -> bool:
        return True

    @field_validator("args")
    @classmethod
    def _finite(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, each in value.items():
            if isinstance(each, float) and not math.isfinite(each):
                raise ValueError(f"{key} is {each}, wanted a finite number")
        return value


FIELDS = {
    one.model_fields["kind"].default: frozenset(one.model_fields)
    for one in (
        GroupEstimator,
        DiscountedEstimator,
        GigpoEstimator,
        DistillEstimator,
        JsdEstimator,
        GaeEstimator,
        NoEstimator,
    )
}
"""The fields of each estimator that is no plug-in, by its ``kind``."""
KINDS = tuple(FIELDS)


def _tag(value: Any) -> Any:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return kind if kind in KINDS else "plugin"


def _known(value: Any) -> Any:
    """Accept the kind alone for the whole section, and refuse what names none."""
    given: Any = {"kind": value} if isinstance(value, str) else value
    if isinstance(given, Mapping):
        kind = given.get("kind")
        if kind not in KINDS and not (isinstance(kind, str) and "." in kind):
            raise ValueError(
                f"kind is {kind!r}, wanted one of {', '.join(KINDS)}, or the dotted path of a function of your own, "
                "package.module.function"
            )
    return given


Estimator = Annotated[
    Annotated[GroupEstimator, Tag("group")]
    | Annotated[DiscountedEstimator, Tag("discounted")]
    | Annotated[GigpoEstimator, Tag("gigpo")]
    | Annotated[DistillEstimator, Tag("distill")]
    | Annotated[JsdEstimator, Tag("jsd")]
    | Annotated[GaeEstimator, Tag("gae")]
    | Annotated[NoEstimator, Tag("none")]
    | Annotated[EstimatorPlugin, Tag("plugin")],
    Discriminator(_tag),
    BeforeValidator(_known),
]
"""The section ``algorithm.estimator``; its ``kind`` decides which fields it has."""
