"""Runs the workflow of a task or a slice and returns the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from trinity_mq.config import Config
from trinity_mq.config.agents import ConcurrentMode
from trinity_mq.experience import Experience
from trinity_mq.messages import TaskSlice, Version
from trinity_mq.models import EngineClients, InferenceModel, ModelWrapper
from trinity_mq.models.engine_selection import auxiliary_models
from trinity_mq.rewards import UnknownNameError
from trinity_mq.rollout.attempts import AttemptLimits, Instance, Instances, RunGroup, SliceJob
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.seeds import stable_seed
from trinity_mq.rollout.status import RunFailure, SliceOutcome, Status
from trinity_mq.telemetry import aggregate_runs
from trinity_mq.workflows import Task, TaskError, load_workflow
from trinity_mq.workflows.sessions.children import close_persistent_programs

__all__ = ["SliceOutcome", "Status", "WorkflowRunner"]

WAITING_SHARE = 0.25
"""Share of an attempt's time that a workflow waits for weights while it keeps its earlier steps. After that time the
workflow restarts with any engine that then serves. The restart does not count as a further attempt.
"""


class WorkflowRunner:
    """Runs workflows against rollout engines.

    A workflow that can repeat executes all runs in one call. Any other workflow is called once per run, in one of three
    ways (``runner.concurrent_mode``). Each run has its own history and seeds. Only failed runs are retried.

    Args:
        config: The run's configuration.
        model: The rollout model of :meth:`run_task`; :meth:`run_slice` receives its models as an argument.
        auxiliary_models: Further models that workflows may use.
        runner_id: Id of the runner, for logs.
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
        self._idle: list[Instance] = []

    def run_task(self, task: Task, repeat_times: int = 1, run_id_base: int = 0) -> tuple[Status, list[Experience]]:
        """Execute ``repeat_times`` runs of ``task``; return the outcome, and the experiences of the finished runs.
        Unlike a Scheduler, it also returns the experiences of an evaluation.

        Raises:
            RuntimeError: The call is on an event loop, which it would block, or no model was given.
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
        """Execute runs and return the outcome as :meth:`run_task` does, on the running event loop."""
        model = self.model
        if model is None:
            raise RuntimeError("this WorkflowRunner was made without a model: give one, or use run_slice()")
        explorer = self.config.explorer
        outcome = await self._run(
            task,
            range(run_id_base, run_id_base + repeat_times),
            AttemptLimits(explorer.max_timeout, explorer.max_retry_times, explorer.slice_timeout),
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

    async def run_slice(
        self, task_slice: TaskSlice, models: Callable[[], InferenceModel], results: RunResults | None = None
    ) -> SliceOutcome:
        """Execute the runs of a slice within its time limit, and return the outcome.

        Args:
            task_slice: The slice.
            models: Returns the engine to use, called before each attempt. Raises EngineNotReady or EngineLost if no
                engine is available at present; this costs time but does not count as an attempt. An ``Engines`` object
                is notified of lost engines.
            results: Filled as runs finish, for callers that may have to end the slice early.
        """
        try:
            task = Task.from_body(task_slice.task, task_slice.batch, task_slice.task_id)
        except (TaskError, UnknownNameError) as error:
            return SliceOutcome(message=str(error), failure_kind="task", retryable=False)
        lacks_operators = not self.config.operator.operators  # an operator could add a reward
        return await self._run(
            task,
            range(task_slice.run_base, task_slice.run_base + task_slice.repeat_times),
            AttemptLimits(task_slice.max_timeout, task_slice.max_retry_times, task_slice.slice_timeout),
            seed=task_slice.seed,
            models=models,
            pinned=task_slice.pinned,
            results=results,
            needs_reward=(
                task_slice.deliver == "pipeline" and self.config.algorithm.estimator.needs_reward and lacks_operators
            ),
        )

    @staticmethod
    def blocks(task_slice: TaskSlice) -> bool:
        """Return whether the workflow of a slice is synchronous. Return False for an unknown workflow name."""
        try:
            return not load_workflow(task_slice.task.workflow).is_async
        except UnknownNameError:
            return False

    async def close(self) -> None:
        """Close the connections to engines, end the programs that were kept running, and discard idle instances. A
        further task opens new connections.
        """
        idle, self._idle[:] = list(self._idle), []
        for instance in idle:
            await instance.aclose()
        await close_persistent_programs()
        await self._clients.aclose()

    async def _run(
        self,
        task: Task,
        runs: Sequence[int],
        limits: AttemptLimits,
        *,
        seed: int,
        models: Callable[[], InferenceModel],
        pinned: Version | None = None,
        results: RunResults | None = None,
        needs_reward: bool = False,
    ) -> SliceOutcome:
        if task.workflow is None:
            why = "the task has no workflow; set Task.workflow to a Workflow class"
            return SliceOutcome(message=why, failure_kind="task", retryable=False)
        mode = self.config.runner.concurrent_mode
        results = RunResults() if results is None else results
        loop = asyncio.get_running_loop()
        start = loop.time()
        job = SliceJob(
            task=task,
            kind=task.workflow,
            limits=limits,
            seed=seed,
            models=models,
            results=results,
            own_loops=mode == "multi-threading",
            runner=self.runner_id,
            needs_reward=needs_reward,
            truncates_prompts=bool(self.config.model.enable_prompt_truncation),
        )
        shared = None if job.own_loops and job.kind.is_async else self._clients
        instances = Instances(
            task,
            job.kind,
            lambda engine, run_seed: self._wrap(job, engine, run_seed, pinned, shared),
            idle=self._idle if mode == "sequential" and job.kind.can_reset else None,
        )
        groups = [
            RunGroup(job, group_runs, instances)
            for group_runs in ([runs] if job.kind.can_repeat else [[n] for n in runs])
        ]
        try:
            async with asyncio.timeout(limits.total) as limit:
                await _finish(groups, mode)
        except TimeoutError:
            if not limit.expired():
                raise
            trouble = next((group.engine_trouble for group in groups if group.engine_trouble), "")
            why = f", waiting for an engine: {trouble}" if trouble else ""
            late = f"not done within the {limits.total:g} s of the slice{why}"
            results.add_failure(RunFailure(late, "engine" if trouble else "timeout"))
        finally:
            await instances.aclose()
        return results.outcome(loop.time() - start)

    def _wrap(
        self, job: SliceJob, engine: InferenceModel, seed: int, pinned: Version | None, clients: EngineClients | None
    ) -> list[ModelWrapper]:
        """Return model wrappers of ``engine`` and of the auxiliary models."""
        rollout, model = self.config.explorer.rollout_model, self.config.model
        names = [auxiliary.name for auxiliary in self.config.explorer.auxiliary_models]
        policy = ModelWrapper(
            engine,
            rollout_args={**(rollout.ending if engine.role == "rollout" else {}), **job.task.rollout_args},
            seed=seed,
            pinned=pinned,
            enable_history=rollout.enable_history,
            max_prompt_tokens=None if model.enable_prompt_truncation is False else model.max_prompt_tokens,
            enable_prompt_truncation=bool(model.enable_prompt_truncation),
            max_response_tokens=model.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            clients=clients,
            not_ready_timeout=job.limits.attempt * WAITING_SHARE,
            request_timeout=job.limits.attempt,
        )
        auxiliaries = auxiliary_models(names, job.models, self.auxiliary_models)
        return [policy, *(ModelWrapper(auxiliary, clients=clients) for auxiliary in auxiliaries)]


async def _finish(groups: Sequence[RunGroup], mode: ConcurrentMode) -> None:
    if len(groups) == 1 or mode == "sequential":
        for group in groups:
            await group.finish()
        return
    async with asyncio.TaskGroup() as tasks:
        for group in groups:
            tasks.create_task(group.finish())
