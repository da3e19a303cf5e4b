"""The attempts at the runs of a slice: which errors are retried, for how long, and the results of finished runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from trinity_mq.bus.retry import backoff, exponential_pause
from trinity_mq.experience import Experience
from trinity_mq.models import InferenceModel, ModelWrapper
from trinity_mq.models.engine_selection import Engines
from trinity_mq.models.errors import EngineLost, EngineNotReady, VersionMismatch
from trinity_mq.models.recording.responses import check_asked, is_asked
from trinity_mq.models.retried import call_with_retries
from trinity_mq.rollout.failures import describe, failure_of, is_retryable, reward_fault
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.seeds import stable_seed
from trinity_mq.rollout.status import RunFailure
from trinity_mq.telemetry import get_logger
from trinity_mq.telemetry.trace import span
from trinity_mq.workflows import RunFailedError, Task, Workflow, execute
from trinity_mq.workflows.auxiliary import AuxiliaryError
from trinity_mq.workflows.errors import causes

MAX_IDLE = 64
"""Maximum number of idle workflow instances kept for later slices."""

log = get_logger(__name__)
FIRST_PAUSE = 0.2
"""Bound of the first random pause before a retry, in seconds. The bound doubles with each further retry."""
LONGEST_PAUSE = 5.0


class Instances:
    """Provides an instance for each workflow call of a slice: a new instance, or an idle instance of an earlier call.

    Args:
        task: The task to run.
        kind: The class of the workflow.
        wrap: Returns new model wrappers for one instance: first a wrapper of the given engine, which has its own
            history and samples with the given seed, then wrappers of the auxiliary models.
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
        """Instances that :meth:`aclose` closes: instances in use, instances whose runs failed, and instances beyond
        :data:`MAX_IDLE`.
        """

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
        """Make an instance reusable after its runs succeeded, if instances are kept and fewer than :data:`MAX_IDLE` are
        idle.
        """
        if self._idle is not None and len(self._idle) < MAX_IDLE:
            self._taken.remove(instance)
            self._idle.append(instance)

    async def aclose(self) -> None:
        """Close the instances that were taken and not made reusable."""
        for instance in self._taken:
            await instance.aclose()


class Instance:
    """A workflow object with its model wrappers. The first :meth:`ready` creates the workflow object."""

    def __init__(self, of: Instances, models: Sequence[ModelWrapper]) -> None:
        self._of = of
        self.model, *self._auxiliary = models
        self._workflow: Workflow | None = None

    def fits(self, kind: type[Workflow], models: Sequence[ModelWrapper]) -> bool:
        """Return whether this instance's workflow has class ``kind`` and uses engines with the same URLs as
        ``models``.
        """
        urls = [wrapper.model.url for wrapper in (self.model, *self._auxiliary)]
        return self._of.kind is kind and urls == [wrapper.model.url for wrapper in models]

    def reassign(self, of: Instances, models: Sequence[ModelWrapper]) -> None:
        """Use this instance for the task of ``of`` from now on, with the settings of the model wrappers ``models``."""
        self._of = of
        for current, fresh in zip((self.model, *self._auxiliary), models, strict=True):
            current.adopt_settings(fresh)

    def ready(self, block: Sequence[int]) -> Workflow:
        """Return the workflow, prepared for the runs with numbers ``block``. It may take long, because it calls user
        code, such as the workflow's constructor.
        """
        task = self._of.task.copy_for_run()
        if self._workflow is None:
            self._workflow = task.to_workflow(self.model, self._auxiliary)
        else:
            task.inherit_sampling(self.model)
            self._workflow.reset(task)
            self._workflow.task = task  # not every reset() keeps the task
        if self._of.kind.can_repeat:
            self._workflow.set_repeat_times(len(block), block[0])
        return self._workflow

    async def aclose(self) -> None:
        """Close the resources that the model wrappers of this instance have opened."""
        for wrapper in (self.model, *self._auxiliary):
            await wrapper.aclose()


@dataclass(frozen=True)
class AttemptLimits:
    """Limits on the time and the number of attempts."""

    attempt: float
    """Seconds for one workflow call: for one run, or for all runs that a workflow with ``can_repeat`` executes at once.
    """
    retries: int
    """Number of further attempts at failed runs."""
    total: float
    """Seconds for the whole slice, retries and waiting for engines included."""


@dataclass(frozen=True, kw_only=True)
class SliceJob:
    """A task whose runs :class:`RunGroup` executes, with its engines, limits and results."""

    task: Task
    kind: type[Workflow]
    limits: AttemptLimits
    seed: int
    models: Callable[[], InferenceModel]
    """Returns the engine to use now. Raises EngineNotReady or EngineLost if no engine is available at present."""
    results: RunResults
    own_loops: bool = False
    """Whether each call of an asynchronous workflow executes in a thread, on its own event loop."""
    runner: int | str | None = None
    """Id of the runner, for logs."""
    needs_reward: bool = False
    """Whether the workflow must set the reward of each run, because no later step adds a reward."""
    truncates_prompts: bool = False
    """Whether a run may consist of masked experiences, because its prompt is too long
    (``model.enable_prompt_truncation``)."""


class RunGroup:
    """Runs that one workflow call executes: all runs of a slice if its workflow can repeat, else one run."""

    def __init__(self, job: SliceJob, runs: Sequence[int], instances: Instances) -> None:
        self.job = job
        self.missing = list(runs)
        self._instances = instances
        self._attempts = 0
        self.engine_trouble = ""
        """Reason why no engine is available, while the group waits for an engine."""

    async def finish(self) -> None:
        """Execute the runs and retry failed runs. Errors of the workflow are not raised here; the job's results hold
        the first failure.
        """
        try:
            await call_with_retries(self._retrying, self._attempt)
        except Exception as error:
            what = describe(error, self.job.kind)
            log.info("runs_failed", runner=self.job.runner, runs=self.missing, attempts=self._attempts, error=what)

    def _retrying(self) -> AsyncRetrying:
        return AsyncRetrying(
            stop=stop_after_attempt(self.job.limits.retries + 1),
            wait=backoff(FIRST_PAUSE, LONGEST_PAUSE),
            retry=retry_if_exception(is_retryable),
            sleep=asyncio.sleep,
            reraise=True,
        )

    def _engine_retrying(self) -> AsyncRetrying:
        return AsyncRetrying(
            wait=self._engine_delay,
            retry=retry_if_exception(lambda error: engine_unavailable_error(error) is not None),
            sleep=asyncio.sleep,
            reraise=True,
        )

    async def _attempt(self) -> None:
        """Try all missing runs once, then raise the first failure."""
        self._attempts += 1
        failure: Exception | None = None
        for block in consecutive_blocks(self.missing):
            try:
                await self._run_block(block)
            except Exception as error:
                self.job.results.add_failure(failure_of(error, self.job.kind))
                log.debug("attempt_failed", runner=self.job.runner, runs=block, attempt=self._attempts, exc_info=error)
                failure = failure or error
        if failure is not None:
            raise failure

    async def _run_block(self, block: Sequence[int]) -> None:
        """Execute consecutive runs in one workflow call. The call is repeated while no engine serves; such a repetition
        does not count as an attempt.

        Raises:
            Exception: The call failed, a prompt was too long, or the workflow returned no experience for a run. Runs
                that finished are stored before.
        """
        experiences, seconds = await call_with_retries(self._engine_retrying, self._call_workflow, block)
        with span("finish runs", count=len(experiences)):
            by_run = self._by_run(block, experiences)
            unasked = [run for run, listed in by_run.items() if not (self.job.truncates_prompts or is_asked(listed))]
            for run, listed in by_run.items():
                if run in unasked:
                    continue
                if (fault := reward_fault(self.job.kind, listed, needed=self.job.needs_reward)) is not None:
                    self.job.results.add_failure(RunFailure(fault))
                self.job.results.finished(self.job.task, run, listed, seconds)
                self.missing.remove(run)
        for run in unasked:
            check_asked(by_run[run])
        lacking = [run for run in block if run not in by_run]
        if lacking:
            raise RunFailedError(
                f"{self.job.kind.__name__} returned no experience for runs {lacking} of {list(block)}; a workflow with "
                "can_repeat = True returns some for each, with eid.run = run_id_base + i"
            )

    async def _call_workflow(self, block: Sequence[int]) -> tuple[list[Experience], float]:
        """Return the experiences of one workflow call, and its duration in seconds."""
        job = self.job
        engine = job.models()
        self.engine_trouble = ""
        # A retry uses another seed, because the same samples would fail again.
        seed = stable_seed(job.seed, block[0], *([self._attempts] if self._attempts > 1 else []))

        def ready() -> Workflow:
            with span("make workflow"):
                return instance.ready(block)

        instance = self._instances.take(engine, seed)
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout(job.limits.attempt) as limit:
                experiences = await execute(
                    ready,
                    job.kind,
                    close=self._instances.closing(instance),
                    own_loop=job.own_loops,
                )
        except TimeoutError:
            if limit.expired():
                raise RunFailedError(
                    f"{job.kind.__name__} took longer than max_timeout, {job.limits.attempt:g} s", kind="timeout"
                ) from None
            raise
        except Exception as error:
            if isinstance(job.models, Engines) and (lost := lost_engine(error, engine)) is not None:
                job.models.lost(lost)
            raise
        self._instances.give_back(instance)
        return experiences, loop.time() - start

    def _by_run(self, block: Sequence[int], experiences: list[Experience]) -> dict[int, list[Experience]]:
        if not self.job.kind.can_repeat:
            return {block[0]: experiences}
        number_runs(block, experiences)
        by_run: dict[int, list[Experience]] = {}
        for experience in experiences:
            by_run.setdefault(experience.eid.run, []).append(experience)
        strange = sorted(by_run.keys() - set(block))
        if strange:
            raise RunFailedError(
                f"{self.job.kind.__name__} returned experiences with eid.run {strange}, was asked for {list(block)}"
            )
        return by_run

    def _engine_delay(self, state: RetryCallState) -> float:
        """Return the jittered seconds until the next engine lookup."""
        error = state.outcome and state.outcome.exception()
        trouble = error and engine_unavailable_error(error)
        self.engine_trouble = str(trouble)
        if isinstance(trouble, EngineNotReady):
            return trouble.retry_after * random.uniform(1.0, 1.5)
        return exponential_pause(FIRST_PAUSE, LONGEST_PAUSE, state.attempt_number + 1) * random.uniform(0.5, 1.0)


def number_runs(block: Sequence[int], experiences: Sequence[Experience]) -> None:
    """Set ``eid.run`` of experiences if their workflow did not set it: divide them, in their order, into equal parts
    for the runs of ``block``. If there are fewer experiences than runs, each of the first runs gets one experience.

    Change nothing if the experiences cannot be divided equally, or if the workflow may have set run 0 for all of them:
    the block begins with run 0, and there is a single experience or the experiences have different steps.
    """
    steps = {experience.eid.step for experience in experiences}
    is_numbered = any(experience.eid.run != 0 for experience in experiences) or (
        block[0] == 0 and (len(experiences) == 1 or len(steps) > 1)
    )
    size, rest = divmod(len(experiences), len(block))
    if is_numbered or (size and rest):
        return
    for place, experience in enumerate(experiences):
        experience.eid.run = block[place // max(size, 1)]


def engine_unavailable_error(error: BaseException) -> BaseException | None:
    """Return ``error``, or the cause of it, that shows that no engine serves at present: EngineNotReady, EngineLost, or
    a VersionMismatch of an engine that does not hold the wanted weights yet. Return None for other errors.
    """
    for cause in causes(error):
        if isinstance(cause, EngineNotReady | EngineLost):
            return cause
        if isinstance(cause, VersionMismatch) and cause.wanted is not None:
            return cause if cause.held is None or cause.held < cause.wanted else None
    return None


def lost_engine(error: BaseException, asked: InferenceModel) -> InferenceModel | None:
    """Return the engine that did not answer: the engine named by ``error`` or one of its causes, else the rollout
    engine ``asked``. Return None if the error has another reason.
    """
    for cause in causes(error):
        if isinstance(cause, EngineLost):
            return cause.engine or asked
        if isinstance(cause, AuxiliaryError):
            return cause.lost
    return None


def consecutive_blocks(runs: Sequence[int]) -> list[list[int]]:
    """Split ``runs``, which must be in ascending order, into lists without gaps.

    >>> consecutive_blocks([0, 1, 4, 5, 7])
    [[0, 1], [4, 5], [7]]
    """
    blocks: list[list[int]] = []
    for run in runs:
        if blocks and run == blocks[-1][-1] + 1:
            blocks[-1].append(run)
        else:
            blocks.append([run])
    return blocks
