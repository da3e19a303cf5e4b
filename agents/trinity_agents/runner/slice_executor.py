"""Executes slices, in this process or in a separate process, and cancels them from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from trinity_agents.runner.in_flight_slice import OVERDUE, STOPPED, InFlightSlice
from trinity_agents.runner.process_pool import GRACE, START_LIMIT, ChildDied, ProcessPool
from trinity_mq.config import Config
from trinity_mq.messages import TaskSlice
from trinity_mq.models import InferenceModel
from trinity_mq.models.engine_selection import AuxiliaryAsPolicy, AuxiliaryEngines
from trinity_mq.rollout.status import RunFailure, SliceOutcome
from trinity_mq.rollout.workflow_runner import WorkflowRunner
from trinity_mq.runtime.deliveries import CrashLog

log = structlog.get_logger(__name__)

ISOLATED_MARGIN = START_LIMIT + 2 * GRACE
"""Extra seconds after a slice's time limit for a slice in a separate process: for the start of the process and its
grace time."""
MAX_ISOLATED = 2
"""Maximum number of slices with a suspect earlier delivery that run in child processes at a time. Such slices are rare,
and each process has to import the workflows again.
"""
STOP_PATIENCE = 0.5
"""Seconds from the cancellation of a workflow until it is detached."""


class SliceExecutor:
    """Executes the workflows of slices.

    Args:
        config: The run's configuration.
        models: Returns the engine to use now.
        workflows: Runs slices in this process.
        isolated: Process pool for slices with a suspect earlier delivery and for blocking workflows; None: pools sized
            by the configuration.
        on_detached: Called with a slice whose workflow ignored its cancellation: the workflow keeps running in its
            task, and another task has to report the slice.
        crash_notes: Records a slice with a suspect earlier delivery while it is running.
    """

    def __init__(
        self,
        config: Config,
        models: Callable[[], InferenceModel],
        *,
        workflows: WorkflowRunner,
        isolated: ProcessPool | None,
        on_detached: Callable[[InFlightSlice], None],
        crash_notes: CrashLog,
    ) -> None:
        self._config, self._models, self._take_over = config, models, on_detached
        self._crash_notes = crash_notes
        runner = config.runner
        self._workflows = workflows
        self._isolated = isolated or ProcessPool(MAX_ISOLATED)
        # One process per slot, so that a blocking workflow never waits for another workflow's process.
        self._processes = isolated or ProcessPool(runner.concurrency + runner.eval_slots)

    async def execute(self, in_flight: InFlightSlice) -> SliceOutcome | None:
        """Execute the workflow of a slice and return its outcome. If it was stopped, the outcome has the runs that had
        finished. Return None if the workflow was detached, so that another asyncio task reports the slice.

        Raises:
            ChildDied: The workflow's process ended without an outcome.
        """
        loop = asyncio.get_running_loop()
        again = in_flight.past.suspect > 0
        in_process = again or (
            self._config.runner.blocking == "process" and self._workflows.blocks(in_flight.task_slice)
        )
        margin = STOP_PATIENCE + (ISOLATED_MARGIN if in_process else 0.0)
        overdue = loop.call_later(in_flight.task_slice.slice_timeout + margin, self.stop, in_flight, OVERDUE)
        in_flight.running = True
        try:
            if again:
                with self._crash_notes.at_work(in_flight.name):
                    outcome = await self._in_process(in_flight, self._isolated)
            elif in_process:
                outcome = await self._in_process(in_flight, self._processes)
            else:
                task_slice, models = self._engines_for(in_flight.task_slice)
                outcome = await self._workflows.run_slice(task_slice, models, in_flight.results)
        except asyncio.CancelledError:
            if not in_flight.detached and not in_flight.absorb_cancel():
                raise
            outcome = in_flight.results.outcome(in_flight.seconds)
        else:
            in_flight.absorb_cancel()
        finally:
            in_flight.running = False
            overdue.cancel()
        return None if in_flight.detached else outcome

    def stop(self, in_flight: InFlightSlice, why: str) -> None:
        """Cancel a workflow from outside; a workflow that ignores the cancellation is detached."""
        if in_flight.end(why):
            in_flight.results.add_failure(RunFailure(why, "timeout" if why == OVERDUE else STOPPED))
            asyncio.get_running_loop().call_later(STOP_PATIENCE, self._detach, in_flight)

    async def close(self) -> None:
        """End all processes and connections."""
        for pool in {self._isolated, self._processes}:
            await pool.close()
        await self._workflows.close()

    async def _in_process(self, in_flight: InFlightSlice, pool: ProcessPool) -> SliceOutcome:
        results = in_flight.results
        task_slice, models = self._engines_for(in_flight.task_slice)
        if in_flight.past.suspect:
            log.info(
                "isolated",
                ticket=task_slice.ticket,
                task=task_slice.task_id,
                deliveries=in_flight.past.count,
            )
        try:
            # The limit includes the wait for a free process, because the broker redelivers a message that is held for
            # too long.
            async with asyncio.timeout(task_slice.slice_timeout + ISOLATED_MARGIN):
                return await pool.run(task_slice, self._config, models, results)
        except TimeoutError:
            late = (
                f"not done within the {task_slice.slice_timeout:g} s of the slice, the wait for a free process included"
            )
            results.add_failure(RunFailure(late, "timeout"))
        except ChildDied as error:
            if not error.overdue:
                raise
            results.add_failure(RunFailure(str(error), "timeout"))
        return results.outcome(in_flight.seconds)

    def _engines_for(self, task_slice: TaskSlice) -> tuple[TaskSlice, Callable[[], InferenceModel]]:
        """Return the slice and a function that selects its engine.

        The engine serves the policy, or for an evaluation the auxiliary model that the task names. An auxiliary model
        has no versions, so its slice is not pinned.
        """
        name = task_slice.task.rollout_args.get("model")
        if task_slice.lane != "eval" or name is None or not isinstance(self._models, AuxiliaryEngines):
            return task_slice, self._models
        return task_slice.model_copy(update={"pinned": None}), AuxiliaryAsPolicy(str(name), self._models)

    def _detach(self, in_flight: InFlightSlice) -> None:
        if in_flight.running:
            log.warning(
                "workflow_ignores_cancellation",
                ticket=in_flight.task_slice.ticket,
                task=in_flight.task_slice.task_id,
                why=in_flight.why,
            )
            in_flight.detached = True
            self._take_over(in_flight)
