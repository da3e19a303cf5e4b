"""Selectors: methods that choose the next task of a taskset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from trinity_mq.config.base import Section

LEARNING = frozenset({"difficulty_based", "difficulty_pools"})
"""Built-in selectors that receive the rewards of finished tasks."""


class SelectorBase(Section):
    """The common settings of all selectors."""

    model_config = ConfigDict(allow_inf_nan=False)

    seed: int | None = Field(default=None, ge=0)
    """Seed of the order. None: the run's ``seed``."""

    @model_validator(mode="before")
    @classmethod
    def _kwargs(cls, data: Any) -> Any:
        """Accept Trinity-RFT's ``kwargs`` as settings of the section."""
        if not isinstance(data, Mapping) or "kwargs" in cls.model_fields or "kwargs" not in data:
            return data
        kwargs = data["kwargs"] or {}
        if not isinstance(kwargs, Mapping):
            raise ValueError(f"data_selector.kwargs is a {type(kwargs).__name__}, wanted names with values")
        if duplicates := sorted(set(kwargs) & set(data)):
            raise ValueError(f"data_selector: {', '.join(duplicates)} given twice, in kwargs too; remove one of them")
        return {**{key: value for key, value in data.items() if key != "kwargs"}, **kwargs}


class SequentialSelector(SelectorBase):
    """Every task once an epoch, in the stored order."""

    selector_type: Literal["sequential"] = "sequential"
    """Name of the selector."""


class ShuffleSelector(SelectorBase):
    """Every task once an epoch, in an order that follows from seed + epoch and differs between epochs."""

    selector_type: Literal["shuffle"] = "shuffle"
    """Name of the selector."""


class RandomSelector(SelectorBase):
    """Uniformly random tasks. No task occurs twice in a batch unless the batch is larger than the taskset."""

    selector_type: Literal["random"] = "random"
    """Name of the selector."""


class EasyToHardSelector(SelectorBase):
    """Every task once an epoch, sorted by numbers in the records, largest first."""

    selector_type: Literal["offline_easy2hard"] = "offline_easy2hard"
    """Name of the selector."""
    feature_keys: tuple[str, ...] = Field(min_length=1)
    """Keys of numbers in each record, such as pass rates. Later keys decide ties."""


class DifficultyBasedSelector(SelectorBase):
    """Tasks whose estimated pass rate is near a target, from a Beta posterior for each task.

    A batch of pass rates updates every posterior: ``alpha`` and ``beta`` are moved towards the prior of 1 by ``lamb``.
    A task that was run gains ``m`` runs at its pass rate. Every other task gains ``rho m`` runs at an interpolated
    rate: the policy's capability sets the point between the pass rates of a weak and a strong model.
    """

    selector_type: Literal["difficulty_based"] = "difficulty_based"
    """Name of the selector."""
    feature_keys: tuple[str, str]
    """Keys in each record of the pass rates (0 to 1) of a weak and of a strong model."""
    m: float = Field(default=16.0, gt=0.0)
    """Number of runs that an observed pass rate counts as."""
    lamb: float = Field(default=0.2, ge=0.0, le=1.0)
    """Share of the posterior that each update forgets."""
    rho: float = Field(default=0.2, ge=0.0, le=1.0)
    """Weight of the interpolated pass rate of tasks that were not run, as a share of ``m``."""
    target_reward: float = Field(default=0.5, ge=0.0, le=1.0)
    """Target pass rate."""
    tau: float = Field(default=0.1, ge=0.0)
    """Temperature of the choice by distance from the target. 0: always the closest tasks."""
    do_sample: bool = False
    """Judge each task by a sample from its posterior (Thompson sampling) instead of its mean."""
    adaptive_rho: bool = False
    """Halve ``rho`` at each batch whose interpolated pass rates are wrong by a quarter or more on average, before it
    updates the posteriors: the two models then say little about the policy."""


class DifficultyPool(Section):
    """A pool of tasks with similar rewards."""

    model_config = ConfigDict(allow_inf_nan=False)

    threshold: float
    """Minimum mean reward of a task in the pool. The pool with the lowest threshold also contains all tasks below it.
    """
    weight: float = Field(ge=0.0)
    """Frequency at which each task of the pool is drawn, relative to tasks of other pools. 0: never."""


class DifficultyPoolsSelector(SelectorBase):
    """Tasks drawn with replacement, weighted by pool. A task's latest mean reward determines its pool."""

    selector_type: Literal["difficulty_pools"] = "difficulty_pools"
    """Name of the selector."""
    pools: tuple[DifficultyPool, ...] = Field(min_length=1)
    """Pools, in any order. A task is in the pool with the highest threshold that its latest mean reward reaches."""
    unseen_weight: float = Field(default=1.0, ge=0.0)
    """Weight of a task that has not been run yet."""

    @field_validator("pools")
    @classmethod
    def _pools(cls, pools: tuple[DifficultyPool, ...]) -> tuple[DifficultyPool, ...]:
        thresholds = [pool.threshold for pool in pools]
        if len(set(thresholds)) != len(thresholds):
            raise ValueError(f"data_selector.pools: the thresholds are {thresholds}, wanted each once")
        return tuple(sorted(pools, key=lambda pool: pool.threshold))

    @model_validator(mode="after")
    def _check_unseen_weight(self) -> DifficultyPoolsSelector:
        if not self.unseen_weight:
            raise ValueError(
                "data_selector.unseen_weight is 0, so no task would ever be chosen first; give a number above 0"
            )
        return self


class SelectorPlugin(SelectorBase):
    """A user-defined selector, also in Trinity-RFT's form (``BaseSelector``)."""

    selector_type: str = Field(pattern=r"^\w+(\.\w+)+$")
    """Dotted path of the class, or the name under which a module in ``plugin_dirs`` registers it with ``SELECTORS``."""
    feature_keys: tuple[str, ...] = ()
    """Keys in each record, passed to the class if not empty."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the class."""


def _tag(value: Any) -> str:
    kind = value.get("selector_type") if isinstance(value, Mapping) else getattr(value, "selector_type", None)
    return "plugin" if isinstance(kind, str) and "." in kind else str(kind)


SelectorConfig = Annotated[
    Annotated[SequentialSelector, Tag("sequential")]
    | Annotated[ShuffleSelector, Tag("shuffle")]
    | Annotated[RandomSelector, Tag("random")]
    | Annotated[EasyToHardSelector, Tag("offline_easy2hard")]
    | Annotated[DifficultyBasedSelector, Tag("difficulty_based")]
    | Annotated[DifficultyPoolsSelector, Tag("difficulty_pools")]
    | Annotated[SelectorPlugin, Tag("plugin")],
    Discriminator(
        _tag,
        custom_error_type="unknown_selector",
        custom_error_message=(
            "selector_type is not one of sequential, shuffle, random, offline_easy2hard, difficulty_based, "
            "difficulty_pools, and neither the dotted path of a class nor a name that a module in plugin_dirs registers"
        ),
    ),
]
SIMPLE: Mapping[str, type[SequentialSelector | ShuffleSelector | RandomSelector]] = {
    "sequential": SequentialSelector,
    "shuffle": ShuffleSelector,
    "random": RandomSelector,
}
"""Selectors without settings, by the value of ``selector``."""
