"""Selectors: which task of a taskset comes next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from trinity_mq.config.base import Section

LEARNING = frozenset({"difficulty_based", "difficulty_pools"})
"""Built-in selectors that are told the rewards of finished tasks."""


class SelectorBase(Section):
    """The settings that all selectors have in common."""

    model_config = ConfigDict(allow_inf_nan=False)

    seed: int | None = Field(default=None, ge=0)
    """Seed of the order. None: the run's ``seed``."""

    @model_validator(mode="before")
    @classmethod
    def _kwargs(cls, given: Any) -> Any:
        """Take Trinity-RFT's ``kwargs`` for settings of the section."""
        if not isinstance(given, Mapping) or "kwargs" in cls.model_fields or "kwargs" not in given:
            return given
        kwargs = given["kwargs"] or {}
        if not isinstance(kwargs, Mapping):
            raise ValueError(f"data_selector.kwargs is a {type(kwargs).__name__}, wanted names with values")
        if twice := sorted(set(kwargs) & set(given)):
            raise ValueError(f"data_selector: {', '.join(twice)} given twice, in kwargs too; remove one of them")
        return {**{key: value for key, value in given.items() if key != "kwargs"}, **kwargs}


class SequentialSelector(SelectorBase):
    """Every task once an epoch, as they are stored."""

    selector_type: Literal["sequential"] = "sequential"
    """Name of the selector."""


class ShuffleSelector(SelectorBase):
    """Every task once an epoch, each epoch in an order of its own that follows from seed + epoch."""

    selector_type: Literal["shuffle"] = "shuffle"
    """Name of the selector."""


class RandomSelector(SelectorBase):
    """Uniformly random tasks, none twice in a batch of at most the taskset's size."""

    selector_type: Literal["random"] = "random"
    """Name of the selector."""


class EasyToHardSelector(SelectorBase):
    """Every task once an epoch, sorted by numbers in the records, the largest first."""

    selector_type: Literal["offline_easy2hard"] = "offline_easy2hard"
    """Name of the selector."""
    feature_keys: tuple[str, ...] = Field(min_length=1)
    """Keys of numbers in each record, such as pass rates; the later ones decide between equals."""


class DifficultyBasedSelector(SelectorBase):
    """Tasks whose estimated pass rate is near a target, from a Beta posterior for each task.

    A batch of pass rates updates every posterior: ``alpha`` and ``beta`` are drawn towards the prior of 1 by ``lamb``;
    a task that was run gains ``m`` runs at its pass rate, every other ``rho m`` runs at the rate between those of a
    weak and a strong model that the policy's capability implies.
    """

    selector_type: Literal["difficulty_based"] = "difficulty_based"
    """Name of the selector."""
    feature_keys: tuple[str, str]
    """Keys of the pass rates (0 to 1) of a weak and of a strong model in each record."""
    m: float = Field(default=16.0, gt=0.0)
    """Runs that an observed pass rate counts as."""
    lamb: float = Field(default=0.2, ge=0.0, le=1.0)
    """Part of the posterior that each update forgets."""
    rho: float = Field(default=0.2, ge=0.0, le=1.0)
    """Weight of the interpolated pass rate of tasks that were not run, as a part of ``m``."""
    target_reward: float = Field(default=0.5, ge=0.0, le=1.0)
    """Pass rate that is looked for."""
    tau: float = Field(default=0.1, ge=0.0)
    """Temperature of the choice by closeness to the target. 0: the closest tasks."""
    do_sample: bool = False
    """Judge each task by a draw from its posterior (Thompson sampling), not by its mean."""
    adaptive_rho: bool = False
    """Halve ``rho`` after each batch whose interpolated pass rates were a quarter and more off on average: the two
    models then say little about the policy."""


class DifficultyPool(Section):
    """Tasks with about the same reward."""

    model_config = ConfigDict(allow_inf_nan=False)

    threshold: float
    """Least mean reward of a task in the pool; the pool with the lowest threshold also has what is below."""
    weight: float = Field(ge=0.0)
    """Frequency at which each of its tasks is drawn, relative to those of other pools. 0: never."""


class DifficultyPoolsSelector(SelectorBase):
    """Tasks drawn with replacement, by the weight of the pool that a task's latest mean reward puts it into."""

    selector_type: Literal["difficulty_pools"] = "difficulty_pools"
    """Name of the selector."""
    pools: tuple[DifficultyPool, ...] = Field(min_length=1)
    """Pools, in any order. A task is in the one with the highest threshold that its latest mean reward reaches."""
    unseen_weight: float = Field(default=1.0, ge=0.0)
    """Weight of a task that has not been run."""

    @field_validator("pools")
    @classmethod
    def _pools(cls, pools: tuple[DifficultyPool, ...]) -> tuple[DifficultyPool, ...]:
        thresholds = [pool.threshold for pool in pools]
        if len(set(thresholds)) != len(thresholds):
            raise ValueError(f"data_selector.pools: the thresholds are {thresholds}, wanted each once")
        return tuple(sorted(pools, key=lambda pool: pool.threshold))

    @model_validator(mode="after")
    def _any(self) -> DifficultyPoolsSelector:
        if not self.unseen_weight:
            raise ValueError("data_selector.unseen_weight is 0, so that no task would ever be the first; give more")
        return self


class SelectorPlugin(SelectorBase):
    """A selector of your own."""

    selector_type: str = Field(pattern=r"^\w+(\.\w+)+$")
    """Dotted path of the class."""
    feature_keys: tuple[str, ...] = ()
    """Handed to the class if there are any."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the class."""


def _tag(given: Any) -> str:
    kind = given.get("selector_type") if isinstance(given, Mapping) else getattr(given, "selector_type", None)
    return "plugin" if isinstance(kind, str) and "." in kind else str(kind)


SelectorConfig = Annotated[
    Annotated[SequentialSelector, Tag("sequential")]
    | Annotated[ShuffleSelector, Tag("shuffle")]
    | Annotated[RandomSelector, Tag("random")]
    | Annotated[EasyToHardSelector, Tag("offline_easy2hard")]
    | Annotated[DifficultyBasedSelector, Tag("difficulty_based")]
    | Annotated[DifficultyPoolsSelector, Tag("difficulty_pools")]
    | Annotated[SelectorPlugin, Tag("plugin")],
    Discriminator(_tag),
]
SIMPLE: Mapping[str, type[SequentialSelector | ShuffleSelector | RandomSelector]] = {
    "sequential": SequentialSelector,
    "shuffle": ShuffleSelector,
    "random": RandomSelector,
}
"""Selectors without settings, by the names that ``selector`` takes."""
