"""The documented handles: a task with its place in a batch, and a remote runner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.config import Config
from trinity_mq.messages import BatchId, ControlEvent, Heartbeat
from trinity_mq.rollout.status import Status
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.peers import Peers
from trinity_mq.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from trinity_mq.experience import Experience
    from trinity_mq.models import InferenceModel
    from trinity_mq.workflows import Task

log = structlog.get_logger(__name__)


@dataclass
class TaskWrapper:
    """A task, or the part of a task with the runs ``run_id_base`` to ``run_id_base + repeat_times - 1``."""

    task: Task
    batch_id: BatchId
    run_id_base: int = 0
    repeat_times: int = 1


class RunnerWrapper:
    """A handle on a remote runner: gives its state, restarts it, and has tasks executed by any runner of the run.

    Args:
        runner_id: The runner's agent id; a number ``n`` stands for the id ``runner-<n>`` of ``trinity-mq run``.
        rollout_model: Accepted for the documented signature and ignored; runners find engines by their heartbeats.
        auxiliary_models: Accepted for the documented signature and ignored.
        config: The run's configuration.
        scheduler: Schedules the tasks; its creator starts and stops it. None: the handle creates a scheduler on the
            configured broker, starts it when needed, and stops it in :meth:`close`.
        peers: Received heartbeats, from which :attr:`state` is read; by default the scheduler's peers.

    Raises:
        AddressError: No scheduler is given, and the configuration has no usable address of a broker.
    """

    def __init__(
        self,
        runner_id: int | str,
        rollout_model: InferenceModel | None,
        auxiliary_models: Sequence[InferenceModel],
        config: Config,
        *,
        scheduler: Scheduler | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.runner_id = runner_id
        self.agent_id = runner_id if isinstance(runner_id, str) else f"runner-{runner_id}"
        self.rollout_model, self.auxiliary_models, self.config = rollout_model, list(auxiliary_models), config
        self._owns_scheduler = scheduler is None
        self._scheduler = Scheduler(config) if scheduler is None else scheduler
        self._peers = peers or self._scheduler.peers
        self._restarts: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> dict[str, Any]:
        """State and details in the runner's last heartbeat, even if the runner is dead since; empty if no heartbeat was
        received.
        """
        heartbeat: Heartbeat | None = self._peers.latest(self.agent_id)
        return {} if heartbeat is None else {"state": heartbeat.state, **heartbeat.detail.as_map()}

    async def run_with_retry(self, task: TaskWrapper) -> tuple[Status, list[Experience], int | str]:
        """Run the task, including attempts and backoff, and return its status, its experiences and the id of the runner
        of its last runs. The id is a number for the runners of ``trinity-mq run`` if this handle was created with a
        number. If no runner worked on the task, it is this handle's id. A task that was not done within
        ``explorer.batch_timeout`` seconds has a failed status.

        Any free runner takes the task, because all runners share one queue. If other runners worked on the task, a
        warning names them and this handle's runner. The same text is the status' message if the status lacks a message.
        """
        await self._start()
        body = replace(task.task, repeat_times=task.repeat_times)  # the caller's task stays unchanged
        statuses, experiences = await self._scheduler.run_one(
            body, task.batch_id, run_id_base=task.run_id_base, part_of=task.task
        )
        if not statuses:
            message = f"the task was not done within {self.config.explorer.batch_timeout:g} s"
            return Status(ok=False, metric={}, message=message, total_runs=task.repeat_times), [], self.runner_id
        status = statuses[0]
        if others := [runner for runner in status.runners if runner != self.agent_id]:
            message = (
                f"run by {', '.join(others)} instead of {self.agent_id}: all runners share one queue, so a task cannot "
                "be sent to one of them"
            )
            log.warning("run_by_another_runner", batch=task.batch_id, runner=self.agent_id, reason=message)
            status = replace(status, message=status.message or message)
        return status, experiences, self._shown(status.runners[-1:])

    def restart_runner(self, reason: str = "asked by the explorer") -> asyncio.Task[None]:
        """Ask the runner to end, so that its supervisor starts a new runner. The returned task is done when the broker
        has confirmed the request; awaiting it is optional.
        """
        task = asyncio.get_running_loop().create_task(self._restart(reason), name=f"restart {self.agent_id}")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        return task

    async def close(self) -> None:
        """Wait for pending restart requests, and stop the scheduler if this handle created it."""
        try:
            await asyncio.gather(*self._restarts)
        finally:
            if self._owns_scheduler:
                await self._scheduler.stop()

    async def _start(self) -> None:
        if self._owns_scheduler:
            await self._scheduler.start()

    async def _restart(self, reason: str) -> None:
        await self._start()
        event = ControlEvent(verb="restart", target=self.agent_id, reason=reason)
        exchange = self._scheduler.topology.exchange("control")
        await self._scheduler.bus.publish(exchange, f"restart.{self.agent_id}", envelope(event))

    def _shown(self, runners: Sequence[str]) -> int | str:
        """Return the id of the first runner in ``runners``, as a number if this handle's id is a number. Return this
        handle's id if the list is empty.
        """
        if not runners:
            return self.runner_id
        prefix, _, number = runners[0].rpartition("-")
        numbered = isinstance(self.runner_id, int) and prefix == "runner" and number.isdecimal()
        return int(number) if numbered else runners[0]
