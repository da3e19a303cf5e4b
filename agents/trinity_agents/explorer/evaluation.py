"""Evaluations on their own task queue, each done once. With style ``fixed`` and in mode ``bench`` they are pinned to
the weight version that the engines serve when they begin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from trinity_agents.explorer.hosted_engines import HostedEngines
from trinity_agents.explorer.state import ExplorerState
from trinity_mq.config import Config
from trinity_mq.dispatch.batch_metrics import eval_metrics, evaluation_questions
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.tickets import Ticket, sort_batch_id
from trinity_mq.messages import TaskBody, Version
from trinity_mq.runtime.notify import Notifier
from trinity_mq.telemetry.evaluations.log import Evaluation, EvaluationLog

log = structlog.get_logger(__name__)

MAX_TRIES = 3
"""Maximum number of attempts at an evaluation. An attempt is repeated if a slice has no finished run and the engines do
not serve the pinned version any more.
"""


class Evaluations:
    """Executes due evaluations, one label after another. A label is the number of closed batches; in mode ``bench`` it
    is the label of a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        state: ExplorerState,
        dispatcher: Dispatcher,
        hosted: HostedEngines,
        sets: Mapping[str, Sequence[TaskBody]],
        *,
        save: Callable[[], Awaitable[None]],
        report: Callable[[int, dict[str, float]], None],
        woken: Notifier,
        answers: EvaluationLog | None = None,
    ) -> None:
        self._answers = answers
        self._config, self._state, self._dispatcher, self._hosted = config, state, dispatcher, hosted
        self._sets, self._save, self._report, self._woken = sets, save, report, woken
        self._is_pinned = config.synchronizer.sync_style == "fixed" or config.mode == "bench"

    @property
    def running(self) -> int | None:
        """The label of the running or next evaluation, None without a due evaluation.

        With style ``fixed`` the trainer reads the label in the heartbeat and delays a sync until the evaluation ends.
        """
        return self._state.due[0] if self._state.due else None

    def request(self, label: int) -> None:
        """Queue an evaluation of all sets under ``label``, unless it is queued or done, or no set exists. The caller
        saves the state.
        """
        if self._sets and label not in self._state.due and not self.is_done(label):
            self._state.due.append(label)
            self._dispatcher.heartbeat_now()
            self._woken.notify()

    def is_done(self, label: int) -> bool:
        """Return whether all sets were evaluated under this label; True without sets."""
        return all(f"{label}/{name}" in self._state.evaluated for name in self._sets)

    async def run(self) -> None:
        """Execute requested evaluations one by one, until cancelled."""
        await self._dispatcher.resumed()
        while True:
            await self._woken.until(lambda: bool(self._state.due))
            label = self._state.due[0]
            await self._evaluate(label)
            self._state.due.remove(label)
            await self._save()
            self._dispatcher.heartbeat_now()
            self._woken.notify()

    async def _evaluate(self, label: int) -> None:
        names = [name for name in self._sets if f"{label}/{name}" not in self._state.evaluated]
        began = asyncio.get_running_loop().time()
        for attempt in range(1, MAX_TRIES + 1):
            tickets = await self._open(label, names)
            # The default argument binds the tickets of this attempt.
            await self._woken.until(lambda tickets=tickets: all(t.is_complete for t in tickets))  # type: ignore[misc]
            lost = any(
                task_slice.result is not None and not task_slice.result.runs
                for ticket in tickets
                for task_slice in ticket.slices
            )
            served = self._hosted.version
            if not lost or (tickets[0].pinned or served) == served or attempt == MAX_TRIES:
                break
            log.warning("evaluation_retried", label=label, pinned=tickets[0].pinned, served=served)
            for ticket in tickets:
                del self._dispatcher.tickets[ticket.ticket]
        for ticket in tickets:
            self._dispatcher.failures.add_ended(ticket)
        metrics = {"time/eval": asyncio.get_running_loop().time() - began}
        detailed = self._config.monitor.detailed_stats
        for name, ticket in zip(names, tickets, strict=True):
            # On a thread, because resampling a large set takes 0.1 s or more.
            metrics |= await asyncio.to_thread(eval_metrics, ticket, name, detailed=detailed)
        await asyncio.to_thread(self._write_answers, label, names, tickets)
        for ticket in tickets:
            del self._dispatcher.tickets[ticket.ticket]
        self._record_done(label, names)
        await self._save()
        self._report(label, metrics)

    def _write_answers(self, label: int, names: Sequence[str], tickets: Sequence[Ticket]) -> None:
        """Write the answers to the evaluation log. After a write error, such as a full disk, no more answers are
        written, and evaluations continue.
        """
        if self._answers is None:
            return
        try:
            for name, ticket in zip(names, tickets, strict=True):
                questions = evaluation_questions(ticket)
                self._answers.append(Evaluation(set=name, label=label, time=time.time(), questions=questions))
        except OSError as error:
            log.warning("answer_log_disabled", reason=error.strerror or str(error))
            self._answers = None

    def _record_done(self, label: int, names: Sequence[str]) -> None:
        """Record that sets were evaluated under ``label``, and forget earlier labels.

        Earlier labels are not requested again and would enlarge each save. Mode ``bench`` keeps all labels, because it
        requests all checkpoints again at its next start.
        """
        done = self._state.evaluated
        if self._config.mode != "bench":
            done = [batch_id for batch_id in done if sort_batch_id(batch_id)[0] >= label]
        self._state.evaluated = [*done, *(f"{label}/{name}" for name in names)]

    async def _open(self, label: int, names: Sequence[str]) -> list[Ticket]:
        """Return the tickets of an evaluation: after a restart the saved tickets, if all sets have one, otherwise new
        tickets.

        With style ``fixed`` or in mode ``bench``, new tickets are pinned to the version that engines serve now.
        """
        by_batch = {ticket.batch: ticket for ticket in self._dispatcher.tickets.values()}
        resumed = [by_batch[f"{label}/{name}"] for name in names if f"{label}/{name}" in by_batch]
        if len(resumed) == len(names):
            return resumed
        for ticket in resumed:
            del self._dispatcher.tickets[ticket.ticket]
        # A sync that began before the trainer received this evaluation's label must end first.
        await self._woken.until(lambda: (self._hosted.idle or not self._is_pinned) and self._hosted.version is not None)
        pinned: Version | None = self._hosted.version if self._is_pinned else None
        tickets = [
            self._dispatcher.make_ticket(
                self._sets[name], f"{label}/{name}", deliver="none", lane="eval", pinned=pinned
            )
            for name in names
        ]
        async with asyncio.TaskGroup() as group:
            for ticket in tickets:
                group.create_task(self._dispatcher.open(ticket))
        return tickets
