"""Runs the workflow of a task or a slice and says what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from trinity_mq.config import Config
from trinity_mq.experience import Experience
from trinity_mq.messages import TaskSlice, Version
from trinity_mq.models import EngineClients, InferenceModel, ModelWrapper
from trinity_mq.rewards import UnknownNameError
from trinity_mq.scheduling.attempts import Job, Limits, Tally, Unit
from trinity_mq.scheduling.seeds import stable_seed
from trinity_mq.scheduling.status import SliceOutcome, Status
from trinity_mq.telemetry import aggregate_runs
from trinity_mq.workflows import Task, TaskError

__all__ = ["SliceOutcome", "Status", "WorkflowRunner"]

WAITING_SHARE = 0.25
"""Of an attempt's time: so long a workflow waits for weights where it is, keeping its earlier steps. After that it is
begun again, with whatever engine serves by then, which counts as no further attempt."""


class WorkflowRunner:
    """Runs workflows against rollout engines.

    A repeatable workflow does all runs in one go; any other is run once for each, all at the same time, each with an
    instance and a history of its own. Only failed runs are tried again.

    Args:
        config: The run's configuration.
        model: The rollout model of :meth:`run_task`; :meth:`run_slice` is told each time.
        auxiliary_models: Further models that workflows may ask.
        runner_id: Whose work it is, for logs.
    """

    def __init__(
        self,
        config: Config,
        model: InferenceModel | None = None,
        auxiliary_models: Sequence[InferenceModel] | None = None,
        runner_id: int | str | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.auxiliary_models = list(auxiliary_models or ())
        self.runner_id = runner_id
        self._clients = EngineClients()

    def run_task(self, task: Task, repeat_times: int = 1, run_id_base: int = 0) -> tuple[Status, list[Experience]]:
        """Do ``repeat_times`` runs of ``task``; return what became of it, and the experiences of the finished runs.

        Raises:
            RuntimeError: Called on an event loop, which it would block, or no model was given.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._run_task_alone(task, repeat_times, run_id_base))
        raise RuntimeError("run_task() would block the running event loop; await run_task_async() instead")

    async def _run_task_alone(self, task: Task, repeat_times: int, run_id_base: int) -> tuple[Status, list[Experience]]:
        try:
            return await self.run_task_async(task, repeat_times, run_id_base)
        finally:
            await self.close()  # the connections belong to the loop that ends here

    async def run_task_async(
        self, task: Task, repeat_times: int = 1, run_id_base: int = 0
    ) -> tuple[Status, list[Experience]]:
        """:meth:`run_task` on the event loop."""
        model = self.model
        if model is None:
            raise RuntimeError("this WorkflowRunner was made without a model: give one, or use run_slice()")
        explorer = self.config.explorer
        outcome = await self._run(
            task,
            range(run_id_base, run_id_base + repeat_times),
            Limits(explorer.max_timeout, explorer.max_retry_times, explorer.slice_timeout),
            seed=stable_seed(self.config.seed, task.batch_id, task.task_id),
            models=lambda: model,
        )
        status = Status(
            ok=len(outcome.runs) == repeat_times,
            metric=aggregate_runs(outcome.metrics),
            message=outcome.message,
            completed_runs=len(outcome.runs),
            total_runs=repeat_times,
            metrics=outcome.metrics,
        )
        return status, outcome.experiences

    async def run_slice(self, piece: TaskSlice, models: Callable[[], InferenceModel]) -> SliceOutcome:
        """Do the runs of a slice, within its time, and return what became of them.

        Args:
            piece: The slice.
            models: Says which engine to use, asked before each attempt; raises EngineNotReady or EngineLost where there
                is none at present, which costs time but no attempt.
        """
        try:
            task = Task.from_body(piece.task, piece.batch, piece.task_id)
        except (TaskError, UnknownNameError) as error:
            return SliceOutcome.failure(str(error))
        return await self._run(
            task,
            range(piece.run_base, piece.run_base + piece.repeat_times),
            Limits(piece.max_timeout, piece.max_retry_times, piece.slice_timeout),
            seed=piece.seed,
            models=models,
            pinned=piece.pinned,
        )

    async def close(self) -> None:
        """Close the connections to engines; a further task opens new ones."""
        await self._clients.aclose()

    async def _run(
        self,
        task: Task,
        runs: Sequence[int],
        limits: Limits,
        *,
        seed: int,
        models: Callable[[], InferenceModel],
        pinned: Version | None = None,
    ) -> SliceOutcome:
        if task.workflow is None:
            return SliceOutcome.failure("the task has no workflow; set Task.workflow to a Workflow class")
        loop = asyncio.get_running_loop()
        start = loop.time()
        job = Job(
            task=task,
            kind=task.workflow,
            limits=limits,
            seed=seed,
            models=models,
            wrap=lambda engine, run_seed: self._wrap(engine, task, limits, run_seed, pinned),
            wrap_auxiliary=lambda: [ModelWrapper(model, clients=self._clients) for model in self.auxiliary_models],
            runner=self.runner_id,
        )
        tally = Tally()
        async with asyncio.TaskGroup() as group:
            for share in [list(runs)] if task.workflow.can_repeat else [[run] for run in runs]:
                group.create_task(Unit(job, share, tally).finish())
        return _outcome(tally, loop.time() - start)

    def _wrap(
        self, engine: InferenceModel, task: Task, limits: Limits, seed: int, pinned: Version | None
    ) -> ModelWrapper:
        rollout, model = self.config.explorer.rollout_model, self.config.model
        return ModelWrapper(
            engine,
            rollout_args=task.rollout_args,
            seed=seed,
            pinned=pinned,
            enable_history=rollout.enable_history,
            max_prompt_tokens=model.max_prompt_tokens,
            max_response_tokens=model.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            clients=self._clients,
            not_ready_timeout=limits.attempt * WAITING_SHARE,
            request_timeout=limits.attempt,
        )


def _outcome(tally: Tally, seconds: float) -> SliceOutcome:
    runs = sorted(tally.experiences)
    experiences = [experience for run in runs for experience in tally.experiences[run]]
    oldest = [experience.version_min for experience in experiences if experience.version_min is not None]
    newest = [experience.version_max for experience in experiences if experience.version_max is not None]
    return SliceOutcome(
        experiences=experiences,
        runs=runs,
        metrics=[tally.metrics[run] for run in runs],
        message=tally.message,
        version_min=min(oldest, default=None),
        version_max=max(newest, default=None),
        seconds=seconds,
    )
