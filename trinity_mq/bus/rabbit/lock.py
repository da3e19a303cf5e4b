"""A lock: an exclusive queue on the consuming connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from trinity_mq.bus.base import Lock
from trinity_mq.bus.rabbit.admin import Admin
from trinity_mq.bus.rabbit.connection import Locked

log = structlog.get_logger(__name__)


class RabbitLock(Lock):
    """Held while the connection lives."""

    def __init__(self, queue: str, release: Callable[[RabbitLock], Awaitable[None]]) -> None:
        self.queue = queue
        self._release = release
        self._held = True
        self._lost = asyncio.Event()

    @property
    def held(self) -> bool:
        """Held now."""
        return self._held

    async def wait_lost(self) -> None:
        """Return when another took it."""
        await self._lost.wait()

    async def release(self) -> None:
        """Give it up."""
        await self._release(self)
        self._held = False

    def suspend(self) -> None:
        """The connection is lost."""
        self._held = False

    async def retake(self, admin: Admin) -> bool:
        """Take it on a new connection, waiting for what our old one may still hold; False when another has it."""
        try:
            await admin.own_again(self.queue)
        except Locked as error:
            log.error("lock lost to another connection", lock=self.queue, broker=str(error))
            self._lost.set()
            return False
        self._held = True
        return True
