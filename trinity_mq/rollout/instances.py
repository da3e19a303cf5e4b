"""Instances of a workflow, and the view of the models that each one has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from trinity_mq.models import InferenceModel, ModelWrapper
from trinity_mq.workflows import Task, Workflow

MAX_IDLE = 64
"""Instances kept for later slices."""


class Instances:
    """Makes an instance for each go at the runs of a slice, or takes one that an earlier go has left.

    Args:
        task: What is to be done.
        kind: The class of the workflow.
        wrap: Makes views of the models for one instance: of an engine, with a history of its own and sampling with a
            seed, then of the auxiliary models.
        idle: Instances that are reset and used again, also by later slices; one goes back here after its runs went
            well. None: each go has a new one.
    """

    def __init__(
        self,
        task: Task,
        kind: type[Workflow],
        wrap: Callable[[InferenceModel, int], list[ModelWrapper]],
        *,
        idle: list[Instance] | None = None,
    ) -> None:
        self.task, self.kind, self.wrap, self._idle = task, kind, wrap, idle
        self._taken: list[Instance] = []
        """Those in use, and those whose runs failed."""

    def take(self, engine: InferenceModel, seed: int) -> Instance:
        """Return an instance that asks ``engine`` and samples with ``seed``."""
        if self._idle is None:
            return Instance(self, self.wrap(engine, seed))
        models = self.wrap(engine, seed)
        found = next((one for one in self._idle if one.fits(self.kind, models)), None)
        if found is None:
            found = Instance(self, models)
        else:
            self._idle.remove(found)
            found.take_over(self, models)
        self._taken.append(found)
        return found

    def closing(self, instance: Instance) -> Callable[[], Awaitable[None]] | None:
        """Return what closes an instance after its go; None for one that may be used again."""
        return instance.aclose if self._idle is None else None

    def give_back(self, instance: Instance) -> None:
        """Keep an instance whose runs went well, where instances are kept."""
        if self._idle is not None and len(self._idle) < MAX_IDLE:
            self._taken.remove(instance)
            self._idle.append(instance)

    async def aclose(self) -> None:
        """Close the instances that are not kept."""
        for instance in self._taken:
            await instance.aclose()


class Instance:
    """One instance of a workflow."""

    def __init__(self, of: Instances, models: Sequence[ModelWrapper]) -> None:
        self._of = of
        self.model, *self._auxiliary = models
        self._workflow: Workflow | None = None

    def fits(self, kind: type[Workflow], models: Sequence[ModelWrapper]) -> bool:
        """Return whether this is a ``kind`` that asks the same models."""
        own = [one.model.url for one in (self.model, *self._auxiliary)]
        return self._of.kind is kind and own == [one.model.url for one in models]

    def take_over(self, of: Instances, models: Sequence[ModelWrapper]) -> None:
        """Do what ``of`` is for from now on, with models that are as ``models``."""
        self._of = of
        for own, fresh in zip((self.model, *self._auxiliary), models, strict=True):
            own.become(fresh)

    def ready(self, block: Sequence[int]) -> Workflow:
        """Return the workflow, ready to do the runs of ``block``. May block: whatever a workflow does in its
        constructor.
        """
        task = self._of.task.own_copy()
        if self._workflow is None:
            self._workflow = task.to_workflow(self.model, self._auxiliary)
        else:
            task.sample_from(self.model)
            self._workflow.reset(task)
        if self._of.kind.can_repeat:
            self._workflow.set_repeat_times(len(block), block[0])
        return self._workflow

    async def aclose(self) -> None:
        """Close what its views of the models have opened by themselves."""
        for one in (self.model, *self._auxiliary):
            await one.aclose()
