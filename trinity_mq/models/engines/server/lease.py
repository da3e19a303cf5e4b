"""How long an engine lives without hearing from its host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Lease:
    """Calls ``expired`` once, when ``seconds`` have passed since the last renewal. Used on the event loop."""

    def __init__(self, seconds: float, expired: Callable[[], None]) -> None:
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """Run for ``seconds`` from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expired)

    def end(self) -> None:
        """Run no more."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def left(self) -> float:
        """Seconds left."""
        if self._timer is None or self._timer.cancelled():
            return 0.0
        return max(0.0, self._timer.when() - asyncio.get_running_loop().time())
