"""Instances of a workflow, each with its own view of the models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from trinity_mq.models import InferenceModel, ModelWrapper
from trinity_mq.workflows import Task, Workflow

MAX_IDLE = 64
"""Maximum number of instances kept for later slices."""


class Instances:
    """Provides an instance for each workflow call of a slice: a new instance, or an idle instance of an earlier call.

    Args:
        task: The task to run.
        kind: The class of the workflow.
        wrap: Creates views of the models for one instance: first of an engine, with a separate history and with
            sampling by a seed, then of the auxiliary models.
        idle: Instances that are reset and reused, also by later slices. An instance returns to this list after its runs
            succeeded. None: each call gets a new instance.
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
        """Instances in use, and instances whose runs failed."""

    def take(self, engine: InferenceModel, seed: int) -> Instance:
        """Return an instance that uses ``engine`` and samples with ``seed``."""
        if self._idle is None:
            return Instance(self, self.wrap(engine, seed))
        models = self.wrap(engine, seed)
        instance = next((idle for idle in self._idle if idle.fits(self.kind, models)), None)
        if instance is None:
            instance = Instance(self, models)
        else:
            self._idle.remove(instance)
            instance.reassign(self, models)
        self._taken.append(instance)
        return instance

    def closing(self, instance: Instance) -> Callable[[], Awaitable[None]] | None:
        """Return the function that closes an instance after its call, or None if the instance may be reused."""
        return instance.aclose if self._idle is None else None

    def give_back(self, instance: Instance) -> None:
        """Make an instance reusable after its runs succeeded, if instances are kept."""
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
        """Return whether this instance has class ``kind`` and uses the same models."""
        urls = [wrapper.model.url for wrapper in (self.model, *self._auxiliary)]
        return self._of.kind is kind and urls == [wrapper.model.url for wrapper in models]

    def reassign(self, of: Instances, models: Sequence[ModelWrapper]) -> None:
        """Use this instance for the task of ``of`` from now on, with the settings of the views ``models``."""
        self._of = of
        for current, fresh in zip((self.model, *self._auxiliary), models, strict=True):
            current.adopt_settings(fresh)

    def ready(self, block: Sequence[int]) -> Workflow:
        """Return the workflow, prepared for the runs of ``block``. May block, because a workflow's constructor may
        block.
        """
        task = self._of.task.copy_for_run()
        if self._workflow is None:
            self._workflow = task.to_workflow(self.model, self._auxiliary)
        else:
            task.inherit_sampling(self.model)
            self._workflow.reset(task)
        if self._of.kind.can_repeat:
            self._workflow.set_repeat_times(len(block), block[0])
        return self._workflow

    async def aclose(self) -> None:
        """Close the resources that its views of the models have opened."""
        for wrapper in (self.model, *self._auxiliary):
            await wrapper.aclose()
