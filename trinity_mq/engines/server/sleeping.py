"""Puts an engine that shares its card with the trainer to sleep and wakes it; see :mod:`trinity_mq.engines.card`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from trinity_mq.engines.card import CardLock, EngineCommand, EngineStage, EngineTurn, SleepLevel
from trinity_mq.engines.state import EngineState

log = structlog.get_logger(__name__)


class Sleeper:
    """Puts one engine to sleep, and wakes it. Use it on the event loop.

    Args:
        lock: Lock on the card, which the engine holds.
        state: State of the engine.
        batcher: Has the methods ``idle`` and ``call`` of the static batcher.
        generator: Has the methods ``sleep(level)``, ``wake_weights()`` and ``wake_cache()``.
        give_up: Ends an engine that cannot sleep or wake, for the reason that it gets; the host starts another engine.
    """

    def __init__(
        self, lock: CardLock, state: EngineState, batcher: Any, generator: Any, give_up: Callable[[str], None]
    ) -> None:
        self.turn = EngineTurn()
        self._lock, self._state, self._batcher, self._generator = lock, state, batcher, generator
        self._give_up = give_up
        self._lease = 0.0
        self._serves = True
        """Whether the engine serves as soon as it is awake. False: weights come first."""
        self._draining: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None
        state.before_resume = self._may_resume

    async def sleep(self, level: SleepLevel, lease: float, timeout: float) -> bool:
        """Handle the trainer's request for the card. Return whether the engine sleeps; the trainer repeats the request.

        Args:
            level: Treatment of the weights.
            lease: Seconds after which the engine wakes by itself unless the request is repeated.
            timeout: Seconds to wait for the running batch steps.
        """
        self._lease = lease
        self._state.pause(lease)
        self._perform(self.turn.sleep(level))
        if self._draining is not None:
            await asyncio.wait({self._draining}, timeout=timeout)
        return self.turn.stage is EngineStage.ASLEEP

    def wake(self) -> None:
        """Start to wake, and serve when awake."""
        self._serves = True
        self._perform(self.turn.wake())

    async def wake_for_weights(self) -> None:
        """Return when the memory of the weights is filled again. The caller then loads new weights, and must call
        :meth:`wake_cache`.
        """
        self._serves = False
        self._perform([command for command in self.turn.wake() if command is not EngineCommand.SERVE])
        if self._draining is not None and not self._draining.done():
            await asyncio.shield(self._draining)  # the drain may start to wake the engine at its end
        if self._waking is not None and not self._waking.done():
            await asyncio.shield(self._waking)

    async def wake_cache(self) -> None:
        """Fill the memory of the cache again, if the engine is awake. Stop the engine if that fails."""
        if self._state.asleep:
            return
        try:
            await self._batcher.call(self._generator.wake_cache)
        except Exception as error:
            self._give_up(f"it could not fill the memory of its cache: {error}")
            raise

    def _may_resume(self) -> bool:
        if self.turn.stage is not EngineStage.AWAKE:
            self._serves = True
            self._perform([command for command in self.turn.wake() if command is not EngineCommand.SERVE])
        return self.turn.stage is EngineStage.AWAKE

    def _perform(self, commands: list[EngineCommand]) -> None:
        for command in commands:
            if command is EngineCommand.PAUSE_REQUESTS and (self._draining is None or self._draining.done()):
                self._draining = asyncio.create_task(self._drain(), name="drain")
            elif command is EngineCommand.TAKE_CARD:
                self._waking = asyncio.create_task(self._take_card(), name="wake")
            elif command is EngineCommand.STOP_WAKING and self._waking is not None:
                self._waking.cancel()
            elif command is EngineCommand.SERVE:
                self._state.resume()

    async def _drain(self) -> None:
        """Wait for the running batch steps, then free the memory and release the lock."""
        try:
            await self._batcher.idle()
        except Exception as error:
            log.exception("engine_cannot_drain")
            self._give_up(f"it could not end its running requests: {error}")
            return
        if not self.turn.drained():
            return
        level = self.turn.level
        self._state.asleep = True
        try:
            await self._batcher.call(partial(self._generator.sleep, level))
        except Exception as error:
            log.exception("engine_cannot_sleep")
            self._give_up(f"it could not free the memory of its card: {error}")
            return
        if level == 2:
            self._state.touch()
        self._lock.release()
        self._state.restart_pause_lease(self._lease)
        log.info("engine_sleeps", sleep_level=level)
        self._perform(self.turn.freed())

    async def _take_card(self) -> None:
        """Take the lock, fill the memory, and serve unless new weights come first."""
        try:
            await self._lock.take(shared=True)
            if not self.turn.locked():
                self._lock.release()
                return
            await self._batcher.call(self._generator.wake_weights)
            if self._serves:
                await self._batcher.call(self._generator.wake_cache)
        except Exception as error:
            log.exception("engine_cannot_wake")
            self._give_up(f"it could not fill the memory of its card: {error}")
            return
        self._state.asleep = False
        commands = self.turn.woken()
        if self._serves:
            self._perform(commands)
        log.info("engine_wakes", phase=self._state.phase)
