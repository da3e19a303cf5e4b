"""Mode ``bench``: evaluates the checkpoints one by one, after the trainer has sent their weights to the engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import structlog

from trinity_agents.explorer.evaluation import Evaluations
from trinity_agents.explorer.state import ExplorerState
from trinity_mq.messages import TrainerStatus, Version
from trinity_mq.runtime.agent import Agent

log = structlog.get_logger(__name__)

Until = Callable[[str, Callable[[], bool]], Awaitable[bool]]
"""Waits for a condition, described by the first argument; returns False if the explorer is drained first."""


class Benchmark:
    """The evaluations of a run of mode ``bench``.

    ``wants`` in the explorer's heartbeats is the label of the checkpoint that the engines need, valid once ``opened``
    is not 0. ``answered`` in the trainer's heartbeats is the label of the weights that the trainer sends the engines.

    Args:
        agent: The explorer.
        state: The explorer's state; its completed evaluations are repeated only if the checkpoint has changed since.
        evaluations: Executes the evaluations.
        checksums: Checksum of the weights by checkpoint label, in the order of evaluation.
        served: Returns the weight version that the engines serve.
        until: Waits for a condition.
        save: Saves the state.
    """

    def __init__(
        self,
        agent: Agent,
        state: ExplorerState,
        evaluations: Evaluations,
        checksums: Mapping[int, str],
        *,
        served: Callable[[], Version | None],
        until: Until,
        save: Callable[[], Awaitable[None]],
    ) -> None:
        self._agent, self._state, self._evaluations = agent, state, evaluations
        self._checksums, self._served, self._until, self._save = checksums, served, until, save
        self.label = 0
        """Label of the checkpoint that the engines need, 0 before the first checkpoint."""
        state.ended = True  # mode bench has no training batches, so submitted training tasks are refused
        state.opened, state.due = 0, []
        for label, checksum in checksums.items():
            if state.benchmarked.get(str(label)) != checksum:
                state.evaluated = [
                    evaluation for evaluation in state.evaluated if not evaluation.startswith(f"{label}/")
                ]
        state.finished = state.finished and not self._remaining_labels()

    @property
    def total(self) -> int:
        """Number of checkpoints."""
        return len(self._checksums)

    def _remaining_labels(self) -> list[int]:
        return [label for label in self._checksums if not self._evaluations.is_done(label)]

    async def run(self) -> bool:
        """Evaluate the remaining checkpoints; return False if the explorer is drained first."""
        for number, (label, checksum) in enumerate(self._checksums.items(), 1):
            if self._evaluations.is_done(label):
                continue
            self.label, self._state.opened = label, number
            self._state.benchmarked[str(label)] = checksum
            await self._save()
            self._agent.heartbeat_now()
            if not await self._until(f"engines to take checkpoint {label}", self._is_served):
                return False
            self._evaluations.request(label)
            await self._save()
            if not await self._until(f"the evaluation of checkpoint {label}", self._is_evaluated):
                return False
            log.info("checkpoint_evaluated", label=label, number=number, of=self.total)
        self._state.finished = True
        await self._save()
        self._agent.heartbeat_now()
        return True

    def _is_evaluated(self) -> bool:
        return self._evaluations.is_done(self.label)

    def _is_served(self) -> bool:
        trainer: TrainerStatus = self._agent.peers.trainer
        held = (trainer.generation, trainer.step)
        return trainer.answered == self.label and trainer.committed == held == self._served()
