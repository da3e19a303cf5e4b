"""Base classes of operators, which map the experiences of one batch to the remaining experiences and metrics."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.runtime.threads import in_thread

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from trinity_mq.reviews.base import Reviews

AuxiliaryModels = Mapping[str | int, "list[AsyncOpenAI]"]
"""OpenAI clients of each auxiliary model, by its name in ``explorer.auxiliary_models``."""

Processed = tuple[list[Experience], dict[str, Any]]
"""The remaining experiences, and metrics."""


class ExperienceOperator(ABC):
    """The older, synchronous interface, run in a thread. Derive new operators from :class:`ExperienceOperatorV1`."""

    @abstractmethod
    def process(self, exps: list[Experience]) -> Processed:
        """Process all experiences of one batch; return the remaining experiences and metrics."""

    def close(self) -> None:  # noqa: B027  nothing to release is the common case
        """Release the operator's resources."""


class ExperienceOperatorV1(ABC):
    """Processes the experiences of one batch asynchronously, with access to auxiliary models.

    A batch may be processed again after a crash, and only one of the results counts. An operator must not keep state
    that another batch needs.
    """

    auxiliary_models: AuxiliaryModels = MappingProxyType({})
    asks_people: ClassVar[bool] = False
    """Whether the operator needs :attr:`reviews`. The operator agent then follows the run's stream of reviews."""
    reviews: Reviews | None = None
    """Asks people about runs of the current batch. None outside an operator agent, or if ``asks_people`` is False."""

    async def prepare(self) -> None:  # noqa: B027  nothing to prepare is the common case
        """Prepare the operator before its first batch."""

    @abstractmethod
    async def process(self, exps: list[Experience]) -> Processed:
        """Process all experiences of one batch; return the remaining experiences and metrics.

        A metric without ``/`` in its name gets the prefix ``experience_pipeline/{place}_{Class}/``, with the place in
        the chain and the class of this operator. A metric with ``/`` keeps its name.
        """

    async def close(self) -> None:  # noqa: B027  nothing to release is the common case
        """Release the operator's resources."""

    def set_auxiliary_model(self, auxiliary_models: AuxiliaryModels | None = None) -> None:
        """Set the clients of auxiliary models by name; None for no models."""
        self.auxiliary_models = auxiliary_models or {}

    def set_reviews(self, reviews: Reviews | None) -> None:
        """Set the interface for asking people; None if people cannot be asked."""
        self.reviews = reviews


class ThreadedOperator(ExperienceOperatorV1):
    """An operator for computation: its work runs in a thread, so that the event loop is not blocked."""

    @abstractmethod
    def apply(self, exps: list[Experience]) -> Processed:
        """Process all experiences of one batch; return the remaining experiences and metrics."""

    async def process(self, exps: list[Experience]) -> Processed:
        return await in_thread(functools.partial(self.apply, exps), operator_name(self))


class ColumnOperator(ExperienceOperatorV1):
    """A computing operator that works on columns: a chain passes it the batch without creating experience objects. Its
    work runs in a thread.
    """

    @abstractmethod
    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Process all experiences of one batch; return the remaining experiences and metrics."""

    async def process(self, exps: list[Experience]) -> Processed:
        """Run :meth:`apply` in a thread; the returned experiences are new objects."""
        batch, metrics = await self.process_batch(exps)
        return batch.to_list(), metrics

    async def process_batch(self, exps: Sequence[Experience]) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Run :meth:`apply` in a thread."""
        return await in_thread(lambda: self.apply(ExperienceBatch.of(exps)), operator_name(self))


def operator_name(operator: ExperienceOperatorV1) -> str:
    """Return the class name of an operator, or of the operator that it wraps, for metrics and errors."""
    return type(operator.operator if isinstance(operator, WrappedOperator) else operator).__name__


def rows_of_tasks(batch: ExperienceBatch, tids: Collection[str]) -> list[int]:
    """Return the row numbers of the experiences of these tasks."""
    return [number for number, tid in enumerate(batch.ids("tid")) if tid in tids]


class WrappedOperator(ThreadedOperator):
    """Runs an :class:`ExperienceOperator` behind the newer interface."""

    def __init__(self, operator: ExperienceOperator) -> None:
        self.operator = operator

    def apply(self, exps: list[Experience]) -> Processed:
        return self.operator.process(exps)

    async def close(self) -> None:
        """Close the wrapped operator in a thread, because it may block."""
        await in_thread(self.operator.close, operator_name(self))
