"""Instances of a workflow, and the view of the models that each one has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from trinity_mq.models import InferenceModel, ModelWrapper
from trinity_mq.workflows import Task, Workflow


class Instances:
    """Makes an instance for each go at the runs of a slice, or keeps one for all of them.

    Args:
        task: What is to be done.
        kind: The class of the workflow.
        wrap: Makes views of the models for one instance: of an engine, with a history of its own and sampling with a
            seed, then of the auxiliary models.
        keep: One instance does all runs, one after the other, reset in between; after a failure, or for another engine,
            it is made anew.
    """

    def __init__(
        self,
        task: Task,
        kind: type[Workflow],
        wrap: Callable[[InferenceModel, int], list[ModelWrapper]],
        *,
        keep: bool = False,
    ) -> None:
        self.task, self.kind, self.wrap, self._keep = task, kind, wrap, keep
        self._kept: Instance | None = None
        self._to_close: list[Instance] = []

    def take(self, engine: InferenceModel, seed: int) -> Instance:
        """Return an instance that asks ``engine`` and samples with ``seed``."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.model.model.url == engine.url:
            kept.model.start_over(seed)
            return kept
        made = Instance(self, engine, seed)
        if self._keep:
            self._to_close.append(made)
        return made

    def closing(self, instance: Instance) -> Callable[[], Awaitable[None]] | None:
        """Return what closes an instance after its go; None for one that is kept, until :meth:`aclose`."""
        return None if self._keep else instance.aclose

    def give_back(self, instance: Instance) -> None:
        """Keep an instance whose runs went well, where instances are kept."""
        if self._keep:
            self._kept = instance

    async def aclose(self) -> None:
        """Close the instances that were kept."""
        for instance in self._to_close:
            await instance.aclose()


class Instance:
    """One instance of a workflow."""

    def __init__(self, of: Instances, engine: InferenceModel, seed: int) -> None:
        self._of = of
        self.model, *self._auxiliary = of.wrap(engine, seed)
        self._workflow: Workflow | None = None

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
