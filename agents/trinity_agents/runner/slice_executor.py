"""The turn of a workflow on its slice: where it runs, and how it ends, whatever it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from trinity_agents.runner.in_flight_slice import OVERDUE, InFlightSlice
from trinity_agents.runner.process_pool import GRACE, START_LIMIT, ChildDied, ProcessPool
from trinity_mq.config import Config
from trinity_mq.messages import TaskSlice
from trinity_mq.models import InferenceModel
from trinity_mq.models.engine_selection import Answering, AuxiliaryEngines
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.rollout.workflow_runner import WorkflowRunner

log = structlog.get_logger(__name__)

ISOLATED_MARGIN = START_LIMIT + 2 * GRACE
"""Seconds over a slice's own time that a process of its own may take."""
STOP_PATIENCE = 0.5
"""Seconds from telling a workflow to end until we go on without it."""


class SliceExecutor:
    """Gives workflows their turn.

    Args:
        config: The run's configuration.
        models: Says which engine to use now.
        workflows: Runs what runs in this process.
        isolated: Runs what has come back before, or blocks, in processes. None: its own.
        go_on_without: Called with a slice whose workflow did not end when it was told to: it runs on in its task, and
            somebody else has to answer for the slice.
    """

    def __init__(
        self,
        config: Config,
        models: Callable[[], InferenceModel],
        *,
        workflows: WorkflowRunner,
        isolated: ProcessPool | None,
        go_on_without: Callable[[InFlightSlice], None],
    ) -> None:
        self._config, self._models, self._go_on_without = config, models, go_on_without
        runner = config.runner
        self._workflows = workflows
        self._isolated = isolated or ProcessPool(runner.max_isolated)
        # as many as there can be: a synchronous workflow waits for no other's process
        self._processes = isolated or ProcessPool(runner.concurrency + runner.eval_slots)

    async def take(self, work: InFlightSlice) -> SliceOutcome | None:
        """Return what the workflow made of its turn; None if somebody else answers for it by now.

        Raises:
            ChildDied: It ended its process.
        """
        loop = asyncio.get_running_loop()
        again = work.delivery.deliveries_before > 0
        in_process = again or (self._config.runner.blocking == "process" and self._workflows.blocks(work.task_slice))
        margin = STOP_PATIENCE + (ISOLATED_MARGIN if in_process else 0.0)
        overdue = loop.call_later(work.task_slice.slice_timeout + margin, self.stop, work, OVERDUE)
        work.running = True
        try:
            if in_process:
                outcome = await self._in_process(work, self._isolated if again else self._processes)
            else:
                task_slice, models = self._asking(work.task_slice)
                outcome = await self._workflows.run_slice(task_slice, models, work.tally)
        except asyncio.CancelledError:
            if not work.given_up and not work.was_ended():
                raise
            outcome = work.tally.outcome(work.seconds)
        else:
            work.was_ended()
        finally:
            work.running = False
            overdue.cancel()
        return None if work.given_up else outcome

    def stop(self, work: InFlightSlice, why: str) -> None:
        """End a workflow from outside; one that does not end is left behind."""
        if work.end(why):
            work.tally.trouble(why)
            asyncio.get_running_loop().call_later(STOP_PATIENCE, self._leave_behind, work)

    async def close(self) -> None:
        """End all processes and connections."""
        for pool in {self._isolated, self._processes}:
            await pool.close()
        await self._workflows.close()

    async def _in_process(self, work: InFlightSlice, pool: ProcessPool) -> SliceOutcome:
        tally = work.tally
        task_slice, models = self._asking(work.task_slice)
        if work.delivery.deliveries_before:
            log.info(
                "isolated",
                ticket=task_slice.ticket,
                task=task_slice.task_id,
                deliveries=work.delivery.deliveries_before,
            )
        try:
            # the wait for a free process is the slice's time too: the broker takes back what is held for too long
            async with asyncio.timeout(task_slice.slice_timeout + ISOLATED_MARGIN):
                return await pool.run(task_slice, self._config, models, tally)
        except TimeoutError:
            tally.trouble(
                f"not done within the {task_slice.slice_timeout:g} s of the slice, the wait for one of "
                f"{self._config.runner.max_isolated} isolated processes (runner.max_isolated) included"
            )
        except ChildDied as error:
            if not error.overdue:
                raise
            tally.trouble(str(error))
        return tally.outcome(work.seconds)

    def _asking(self, task_slice: TaskSlice) -> tuple[TaskSlice, Callable[[], InferenceModel]]:
        """Return who answers a slice: the policy, or for an evaluation the auxiliary model that its task names, which
        has no versions to be pinned to.
        """
        name = task_slice.task.rollout_args.get("model")
        if task_slice.lane != "eval" or name is None or not isinstance(self._models, AuxiliaryEngines):
            return task_slice, self._models
        return task_slice.model_copy(update={"pinned": None}), Answering(str(name), self._models)

    def _leave_behind(self, work: InFlightSlice) -> None:
        if work.running:
            log.warning(
                "workflow_ignores_its_end", ticket=work.task_slice.ticket, task=work.task_slice.task_id, why=work.why
            )
            work.given_up = True
            self._go_on_without(work)
