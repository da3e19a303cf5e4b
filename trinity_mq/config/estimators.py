"""Estimators: methods that turn rewards, or a teacher's logprobs, into an advantage for each response token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from trinity_mq.config.base import FiniteArgs, Section

Place = Literal["operator", "trainer"]
"""The agent that computes advantages."""

ACROSS_RUNS = frozenset({"mean", "leave_one_out", "logavgexp", "length_weighted", "second_best", "greedy"})
"""Baselines that use the rewards of the task's other runs."""


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
        """``operator`` if the batch alone is enough, ``trainer`` if a state or a critic is needed."""
        return "operator"

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs besides rewards: ``teacher``, ``critic``, ``roles``."""
        return ()


class LengthPenaltyWeights(Section):
    """Weights for the parts of a run's size in its reward penalty. Each part is relative to its maximum among the runs
    of the task.
    """

    output: float = Field(default=0.25, ge=0)
    """Weight of the trained tokens."""
    input: float = Field(default=0.1, ge=0)
    """Weight of the tokens that are not trained: prompts and tool results."""
    turns: float = Field(default=0.1, ge=0)
    """Weight of the turns: contiguous stretches of trained tokens."""


class GroupEstimator(EstimatorBase):
    """The reward of a run minus a baseline, divided by a scale. Every trained token of the run gets this value."""

    kind: Literal["group"] = "group"
    baseline: Literal[
        "mean", "leave_one_out", "logavgexp", "none", "greedy", "length_weighted", "second_best", "role_mean"
    ] = "mean"
    """The baseline that is subtracted. ``mean``: the mean reward of the task's runs. ``leave_one_out``: the mean reward
    of the other runs. ``logavgexp``: ``tau * log(mean(exp(reward / tau)))``. ``none``: 0. ``greedy``: the reward of the
    run with ``info["greedy"]``, which is not trained on. ``length_weighted``: the mean reward weighted by trained
    tokens. ``second_best``: for the best run the second best reward, while all other runs get advantage 0.
    ``role_mean``: the moving average of the rewards of the run's role (``info["role"]``), which the trainer keeps."""
    tau: float = Field(default=1.0, gt=0)
    """logavgexp: temperature. Towards 0 the baseline approaches the largest reward, towards infinity the mean."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """role_mean: share of the moving average that is kept at each reward."""
    shift: float = 0.0
    """Added to the baseline. With a value below 0, good runs weigh more than bad runs."""
    scale: Literal["none", "group", "population", "batch", "batch_raw", "mean"] = "group"
    """Divisor. ``none``: 1. ``group``: the unbiased standard deviation of the task's rewards. ``population``: their
    biased standard deviation. ``batch``: the unbiased standard deviation of all rewards of the batch after their
    baselines are subtracted. ``batch_raw``: the unbiased standard deviation of all rewards of the batch. ``mean``: the
    task's mean reward; if it is not above 0, the advantage is 0."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to a standard deviation used as divisor. If the standard deviation is 0, the advantage is 0."""
    std_threshold: float | None = Field(default=None, ge=0)
    """Drop tasks whose rewards, after ``length_penalty`` and ``rank_penalty``, have an unbiased standard deviation of
    at most this. None: keep all tasks.
    """
    rank_penalty: float | None = Field(default=None, gt=0, le=1)
    """Reduce the reward of a run by up to this share. The reduction is larger the more likely the run is under the
    policy, compared with the other runs of the task."""
    length_penalty: LengthPenaltyWeights | None = None
    """Reduce the reward of a run by its size times the task's mean reward."""
    whiten: bool = False
    """Normalize the advantages of all trained tokens of the batch to mean 0 and variance 1."""
    drop: Literal["none", "balance"] = "none"
    """``balance``: drop runs below their task's mean, chosen by a hash of their id, until they are at most as many as
    the runs above it."""
    nonzero_scale: bool = False
    """Multiply the advantages by the number of the batch's runs divided by the number of its runs with a nonzero
    reward."""
    step_norm: bool = False
    """Divide the advantages of a run by the number of its experiences, so that a run of many steps weighs as much as a
    run of few steps."""
    min_group_runs: int | None = Field(default=None, ge=1)
    """Minimum number of finished runs of a task; tasks with fewer are dropped. None: ``algorithm.min_group_runs`` for a
    baseline that uses the task's other runs, otherwise 1."""

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
    def _check_scale(self) -> GroupEstimator:
        if not self.compares_runs and self.scale in {"group", "population", "mean"}:
            raise ValueError(
                f"scale is {self.scale!r} with baseline {self.baseline!r}, wanted none, batch or batch_raw: the "
                "rewards of a task can only scale values that were compared with them"
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
    """Normalize the advantages of all trained tokens of the batch to mean 0 and variance 1."""


class GigpoEstimator(EstimatorBase):
    """Comparison of runs with runs, and of steps with steps from the same state (GiGPO, arXiv 2505.10978)."""

    kind: Literal["gigpo"] = "gigpo"
    omega: float = Field(default=1.0, ge=0)
    """Weight of the comparison of steps."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount for each step, applied to the rewards after a step."""
    scale: Literal["none", "group"] = "none"
    """Divisor of each comparison: 1 (``none``), or the unbiased standard deviation of the compared values (``group``).
    """
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the divisor."""
    min_group_runs: int | None = Field(default=None, ge=1)
    """Minimum number of finished runs of a task; tasks with fewer are dropped. None: ``algorithm.min_group_runs``."""

    @property
    def compares_runs(self) -> bool:
        return True


class DotsEstimator(EstimatorBase):
    """Comparison of the returns of each task and each hint of a pack over the runs of the pack (Connect the Dots)."""

    kind: Literal["cod"] = "cod"
    returns: Literal["mean", "sliding_window_mean", "discounted"] = "mean"
    """Return of a task or a hint, from its own reward and the rewards of the later tasks of its pack: their mean, the
    mean of the first ``window``, or their discounted sum."""
    window: int = Field(default=1, ge=1)
    """sliding_window_mean: number of rewards."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """discounted: discount for each task."""
    temperature: float | None = Field(default=None, gt=0)
    """Temperature of the weight exp(d / temperature) of a value at the distance d from the mean. None: no weights."""
    adaptive: bool = False
    """Ignore ``temperature``. If the mean advantage of all tokens would be below 0, use the temperature from 0.8 to 100
    that brings the weighted mean closest to 0. Otherwise use no weights."""
    center: bool = False
    """If the mean advantage of all tokens, before weights, is below 0, raise all weighted values by its amount. Without
    weights the mean is then 0. With weights, also with ``adaptive``, it is above 0."""
    level: Literal["batch", "task"] = "batch"
    """Set of experiences that share a temperature and a mean: the whole ``batch``, or the runs of each ``task``."""
    min_group_runs: int | None = Field(default=None, ge=1)
    """Minimum number of finished runs of a pack; packs with fewer are dropped. None: ``algorithm.min_group_runs``."""

    @property
    def compares_runs(self) -> bool:
        return True


class TeacherEstimator(EstimatorBase):
    """Base of the estimators that use a teacher's logprobs and no rewards."""

    @property
    def needs_reward(self) -> bool:
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("teacher",)


class DistillEstimator(TeacherEstimator):
    """The teacher's logprob minus the student's logprob of each token (on-policy distillation, arXiv 2306.13649)."""

    kind: Literal["distill"] = "distill"
    kl_coef: float = Field(default=1.0, gt=0)
    """Factor of the advantage."""


class JsdEstimator(TeacherEstimator):
    """The policy gradient of the generalised Jensen-Shannon divergence from a teacher (arXiv 2306.13649)."""

    kind: Literal["jsd"] = "jsd"
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture with which teacher and student are compared."""
    kl_coef: float = Field(default=1.0, gt=0)
    """Factor of the advantage."""


class GaeEstimator(EstimatorBase):
    """Generalised advantage estimation with the values of a critic (arXiv 1506.02438)."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per trained token; tokens that are not trained are skipped."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda: 0 uses the critic's next value alone, 1 the rewards alone."""
    whiten: bool = True
    """Normalize the advantages of all trained tokens of the batch to mean 0 and variance 1."""

    @property
    def where(self) -> Place:
        return "trainer"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("critic",)


class NoEstimator(EstimatorBase):
    """No advantages: for losses that use only likelihood or preferences (sft, dpo, raft)."""

    kind: Literal["none"] = "none"

    @property
    def needs_reward(self) -> bool:
        return False


class EstimatorPlugin(EstimatorBase):
    """A user-defined function: ``def advantages(rewards: list[float], **args) -> list[float]``, or a class in
    Trinity-RFT's form (``AdvantageFn``, ``GroupAdvantage``).

    The function is called for each task with the rewards of its runs, ordered by run, and returns one number for each
    run. The class gets all experiences of a batch.
    """

    kind: str = Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)+$")
    """Dotted path of the function or class, ``package.module.function``."""
    args: FiniteArgs = Field(default_factory=dict)
    """Keyword arguments of the function, checked against its signature at its first use, or of the class's constructor.
    """
    compares: bool = True
    """Whether the runs of a task are compared, so that a task needs at least two. ``advantage_fn`` unsets it for a
    class that a module in ``plugin_dirs`` registers: the class gets groups of any size."""
    min_group_runs: int | None = Field(default=None, ge=1)
    """Function: minimum number of finished runs of a task; tasks with fewer are dropped. None:
    ``algorithm.min_group_runs`` if ``compares`` is set, otherwise 1."""

    @property
    def compares_runs(self) -> bool:
        return self.compares


def _tag(value: Any) -> Any:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return kind if kind in KINDS else "plugin"


def _checked_kind(value: Any) -> Any:
    """Accept a plain ``kind`` instead of the whole section, and refuse an unknown kind."""
    section: Any = {"kind": value} if isinstance(value, str) else value
    if isinstance(section, Mapping):
        kind = section.get("kind")
        if kind not in KINDS and not (isinstance(kind, str) and "." in kind):
            raise ValueError(
                f"kind is {kind!r}, wanted one of {', '.join(KINDS)}, or the dotted path of a function of your own, "
                "package.module.function"
            )
    return section


Estimator = Annotated[
    Annotated[GroupEstimator, Tag("group")]
    | Annotated[DiscountedEstimator, Tag("discounted")]
    | Annotated[GigpoEstimator, Tag("gigpo")]
    | Annotated[DotsEstimator, Tag("cod")]
    | Annotated[DistillEstimator, Tag("distill")]
    | Annotated[JsdEstimator, Tag("jsd")]
    | Annotated[GaeEstimator, Tag("gae")]
    | Annotated[NoEstimator, Tag("none")]
    | Annotated[EstimatorPlugin, Tag("plugin")],
    Discriminator(_tag),
    BeforeValidator(_checked_kind),
]
"""The section ``algorithm.estimator``; its ``kind`` decides which fields it has."""
FIELDS = {
    model.model_fields["kind"].default: frozenset(model.model_fields)
    for model, _ in map(get_args, get_args(get_args(Estimator)[0]))
    if model is not EstimatorPlugin
}
"""Field names of each built-in estimator, by its ``kind``."""
KINDS = tuple(FIELDS)
