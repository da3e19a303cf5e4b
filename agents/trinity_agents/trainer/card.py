"""The trainer's side of a card that it shares with engines: takes the card to compute, and returns it before it waits.

See :mod:`trinity_mq.engines.card` for the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import structlog

from trinity_mq.engines.card import (
    ASK_INTERVAL,
    CARD_LEASE,
    AskEngines,
    CardLock,
    MoveIn,
    MoveOut,
    SleepLevel,
    TrainerCommand,
    TrainerStage,
    TrainerTurn,
)
from trinity_mq.engines.host.admin_client import EngineAdmin
from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.experience import Experience
from trinity_mq.models.errors import EngineError
from trinity_mq.training.checkpoints.checkpoint import Writer
from trinity_mq.training.learner import Learner

log = structlog.get_logger(__name__)

DRAIN_TIMEOUT = 5.0
"""Seconds for which a sleep request waits for an engine's running requests. The trainer repeats the sleep request."""


class MovableLearner(Learner, Protocol):
    """A learner whose state can leave the card."""

    async def leave_device(self) -> None:
        """Move weights, optimizer state and all other models to host memory, and free the memory of the card."""

    async def return_to_device(self) -> None:
        """Move everything back to the card."""

    async def host_weights(self) -> list[tuple[str, Any]]:
        """Return a copy of the weights in host memory, valid until the next call."""


class SleepRequests:
    """Sends commands such as ``sleep`` and ``wake`` to the living engines of a run on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "engines"
        self._session: aiohttp.ClientSession | None = None

    async def send(self, command: str, **body: Any) -> None:
        """Send a command to each living engine. An engine that does not obey is only logged; the caller asks again."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        session = self._session
        async with asyncio.TaskGroup() as group:
            for path in await asyncio.to_thread(lambda: sorted(self._folder.glob("*.ready.json"))):
                ready = await asyncio.to_thread(ReadyFile.read, path)
                if ready is not None and ready.lives():
                    group.create_task(self._send(EngineAdmin(session, ready.url, ready.token), ready.id, command, body))

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _send(self, engine: EngineAdmin, name: str, command: str, body: dict[str, Any]) -> None:
        try:
            await engine.post(command, body, 2 * DRAIN_TIMEOUT)
        except EngineError as error:
            log.info("engine_not_ready_to_share", engine=name, command=command, reason=str(error))


class ColocatedLearner:
    """A learner that shares its card with engines. Methods that compute take the card, and keep it until
    :meth:`hand_over` or :meth:`rest`.

    Args:
        learner: The learner that does the computing.
        folder: Run folder.
        canary: Token ids of the canary prompt.
    """

    def __init__(self, learner: MovableLearner, folder: Path, canary: Sequence[int]) -> None:
        self._learner, self._canary_tokens = learner, list(canary)
        self.turn = TrainerTurn()
        self._lock, self._engines = CardLock(folder), SleepRequests(folder)
        self._is_open = False
        self._renewing: asyncio.Task[None] | None = None
        self._canary: list[float] = []
        self._weights: list[tuple[str, Any]] | None = None
        """Host copy of the present weights; None after a step. The canary scores belong to the same weights."""

    # -- taking and returning the card

    async def take(self, level: SleepLevel = 1) -> None:
        """Return once this trainer holds the card. With ``level`` 1 the engines keep their weights in host memory, with
        2 they discard them.
        """
        commands = self.turn.want(level)
        while commands:
            commands = await self._perform(commands[0])

    async def hand_over(self) -> None:
        """Copy the weights and their canary scores to host memory for a weight sync, unless the copy is up to date, and
        return the card. The engines wake when the weights arrive.
        """
        if self._weights is None:
            await self.take()
            self._canary = await self._learner.canary_logprobs(self._canary_tokens)
            self._weights = await self._learner.host_weights()
        await self._leave(weights_follow=True)

    async def rest(self) -> None:
        """If this trainer holds the card, return it and wake the engines."""
        await self._leave(weights_follow=False)

    async def _leave(self, *, weights_follow: bool) -> None:
        for command in self.turn.done(weights_follow=weights_follow):
            await self._perform(command)

    async def _perform(self, command: TrainerCommand) -> list[TrainerCommand]:
        if isinstance(command, AskEngines):
            await self._engines.send("sleep", level=command.level, timeout=DRAIN_TIMEOUT, lease=CARD_LEASE)
            is_free = self._lock.try_take(shared=False)
            if not is_free:
                await asyncio.sleep(ASK_INTERVAL)  # a file lock does not notify
            return self.turn.locked(is_free=is_free)
        if isinstance(command, MoveIn):
            self._renewing = asyncio.create_task(self._renew(), name="card lease")
            if self._is_open:
                await self._learner.return_to_device()
            log.info("card_taken")
        if isinstance(command, MoveOut):
            if self._is_open:
                await self._learner.leave_device()
            await self._release()
            log.info("card_returned")
            if command.wakes:
                await self._engines.send("wake")
        return []

    async def _renew(self) -> None:
        """Renew the leases of the sleeping engines, until cancelled. An engine whose lease ends wakes as soon as it
        gets the lock.
        """
        while True:
            await asyncio.sleep(CARD_LEASE / 4)
            try:
                await self._engines.send("sleep", level=self.turn.level, timeout=DRAIN_TIMEOUT, lease=CARD_LEASE)
            except Exception:
                log.exception("card_lease_not_renewed")

    async def _release(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        self._lock.release()

    # -- methods of a learner

    async def open(self, checkpoint: Path | None) -> None:
        await self.take()
        self._weights = None
        await self._learner.open(checkpoint)
        self._is_open = True

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        await self.take()
        self._weights = None
        return await self._learner.step(experiences, step_number)

    async def save(self, folder: Path) -> str | None:
        await self.take()
        return await self._learner.save(folder)

    async def stage(self) -> Writer:
        await self.take()
        return await self._learner.stage()

    async def export(self, folder: Path) -> None:
        await self.take()
        await self._learner.export(folder)

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        return await self._learner.manifest()

    async def weights(self) -> list[tuple[str, Any]]:
        if self._weights is None:
            await self.hand_over()
        assert self._weights is not None
        return self._weights

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        if self._weights is None or list(tokens) != self._canary_tokens:
            self._canary_tokens = list(tokens)
            self._weights = None
            await self.hand_over()
        return self._canary

    async def close(self) -> None:
        """Close the learner, return the card, and wake the engines."""
        try:
            await self._learner.close()
        finally:
            was_holding = self.turn.stage is TrainerStage.HOLDING
            await self._release()
            if was_holding:
                with contextlib.suppress(EngineError):
                    await self._engines.send("wake")
            await self._engines.close()
