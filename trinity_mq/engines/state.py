"""Serving state of an engine: its weights, and whether it is paused for a sync."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import structlog

from trinity_mq.engines.api_errors import ApiError, not_current, stopping
from trinity_mq.messages import Version

log = structlog.get_logger(__name__)

Phase = Literal["empty", "current", "dirty"]
PAUSE_LEASE = 120.0
"""Default lease of a pause in seconds, and the shortest lease that a host asks for. When the lease ends without a
further command, the engine resumes by itself.
"""


class StateError(Exception):
    """A command that does not fit the engine's state; the message says what to do first."""


class EngineState:
    """Serving state. Empty: no weights yet. Current: holds a committed version. Dirty: weights were touched and not
    committed.

    The engine may also be paused: no batch step starts, and requests wait. A pause has a lease. When the lease runs out
    the engine resumes, with its old version if no weights were touched. Use this class on the event loop only.
    """

    def __init__(self) -> None:
        self.phase: Phase = "empty"
        self.version: Version | None = None
        self.progress = 0
        self.paused = False
        self.draining = False
        self.receiving = False
        """True while weights are being received. During that time the lease does not end the pause."""
        self.applied = False
        """True when all new weights are in place and their version is not committed yet."""
        self._arriving: Version | None = None
        """Version of the weights that are being received, or were received and are not committed. None: any version may
        be committed."""
        self.running = asyncio.Event()
        """Set while not paused."""
        self.running.set()
        self.asleep = False
        """True while the engine's memory on the card is freed, so that the trainer can use the card."""
        self.before_resume: Callable[[], bool] = lambda: True
        """Returns whether the engine may resume now. If not, the call starts to wake the engine, which then resumes by
        itself.
        """
        self.on_resume: Callable[[], None] = lambda: None
        """Called at every :meth:`resume` that was allowed: after each end of a pause and each commit."""
        self._pause_ends: asyncio.TimerHandle | None = None

    @property
    def label(self) -> str:
        """The state in one word."""
        if self.draining:
            return "draining"
        if self.asleep:
            return "asleep"
        return "paused" if self.paused else self.phase

    def problem(self, pin: Version | None) -> ApiError | None:
        """Return why a request cannot be served now, or None. A pause is not a problem, because it passes."""
        if self.draining:
            return stopping()
        if self.phase != "current" and not self.paused:
            waits = "for its first weights" if self.phase == "empty" else "for weights: a transfer was aborted halfway"
            return not_current(f"the engine waits {waits}; retry, or use another engine")
        if pin is not None and not self.paused and pin != self.version:
            held = "none" if self.version is None else ".".join(map(str, self.version))
            return ApiError(
                409,
                f"the request is pinned to version {pin[0]}.{pin[1]}, the engine holds {held}; drop X-TMQ-Version or "
                "use another engine",
                code="version_mismatch",
                param="X-TMQ-Version",
                extra={"wanted": list(pin), "held": None if self.version is None else list(self.version)},
            )
        return None

    def pause(self, lease: float) -> None:
        """Pause for at most ``lease`` seconds; a running pause gets the new lease."""
        self.paused = True
        self.running.clear()
        self.restart_pause_lease(lease)

    def restart_pause_lease(self, lease: float) -> None:
        """Restart the lease of the pause with ``lease`` seconds."""
        if self._pause_ends is not None:
            self._pause_ends.cancel()
        self._pause_ends = asyncio.get_running_loop().call_later(lease, self._pause_ran_out, lease)

    def _pause_ran_out(self, lease: float) -> None:
        if self.receiving:  # receiving has its own deadline
            self.restart_pause_lease(lease)
            return
        log.warning("pause_lease_expired", seconds=lease, phase=self.phase)
        self.resume()

    def touch(self, version: Version | None = None) -> None:
        """Mark the weights as about to be overwritten: they have no version until a commit.

        Args:
            version: The only version under which the new weights can be committed. None: any version.
        """
        self.phase, self.version, self.applied, self._arriving = "dirty", None, False, version

    def resume(self) -> None:
        """Resume and serve the current weights: the old version if it was not touched. An engine that sleeps wakes
        first.
        """
        if self._pause_ends is not None:
            self._pause_ends.cancel()
            self._pause_ends = None
        if not self.before_resume():
            return
        self.applied = False
        self.paused = False
        self.running.set()
        self.on_resume()

    def serve_fixed_weights(self) -> None:
        """Serve the present weights as version 0.0, for a model that is not trained."""
        self.phase, self.version = "current", (0, 0)

    def commit(self, version: Version, progress: int) -> None:
        """Record ``version`` for the applied weights (or for weights held already) and serve them.

        Raises:
            StateError: The engine holds no weights that could be this version. This also happens after a host was
                suspended while another host took over its engine: the first host may commit an older version after
                weights of a newer version arrived.
        """
        if self.applied and self._arriving not in (None, version):
            raise StateError(
                f"cannot commit version {version}: the received weights belong to {self._arriving}; another host "
                "gives this engine its weights"
            )
        if not self.applied and not (self.phase == "current" and self.version == version):
            held = f"holds {self.version}" if self.phase == "current" else f"is {self.phase}"
            raise StateError(
                f"cannot commit version {version}: no weights were received for it and the engine {held}; "
                "pause and receive first"
            )
        self.phase, self.version, self.progress = "current", version, progress
        self.resume()


class Lease:
    """Calls ``expired`` once, ``seconds`` after the last renewal. Use it on the event loop."""

    def __init__(self, seconds: float, expired: Callable[[], None]) -> None:
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """Restart the lease with ``seconds``."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expired)

    def end(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def left(self) -> float:
        """Seconds until the lease expires."""
        if self._timer is None or self._timer.cancelled():
            return 0.0
        return max(0.0, self._timer.when() - asyncio.get_running_loop().time())
