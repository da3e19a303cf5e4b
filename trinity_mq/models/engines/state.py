"""Serving state of an engine: the weights it holds, and whether it is paused for a sync."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import structlog

from trinity_mq.messages import Version
from trinity_mq.models.engines.api_errors import ApiError, not_current, stopping

log = structlog.get_logger(__name__)

Phase = Literal["empty", "current", "dirty"]


class StateError(Exception):
    """A command that does not fit the engine's state; the message says what to do first."""


class EngineState:
    """Empty until the first weights, current at a committed version, dirty once weights were touched and not committed.

    It may also be paused: no batch step starts, requests wait. A pause has a lease, after which the engine goes on by
    itself, with its old version if nothing was touched. To be used on the event loop only.
    """

    def __init__(self) -> None:
        self.phase: Phase = "empty"
        self.version: Version | None = None
        self.progress = 0
        self.paused = False
        self.draining = False
        self.receiving = False
        """Weights are on their way; the pause's lease stands still."""
        self.applied = False
        """All new weights are in place, their version is not committed yet."""
        self._arriving: Version | None = None
        """Version of the weights that are applied; None: who sent them did not say."""
        self.running = asyncio.Event()
        """Set while not paused."""
        self.running.set()
        self.on_resume: Callable[[], None] = lambda: None
        """Called whenever a pause has ended, in whatever way."""
        self._pause_ends: asyncio.TimerHandle | None = None

    @property
    def label(self) -> str:
        """The state in one word."""
        if self.draining:
            return "draining"
        return "paused" if self.paused else self.phase

    def problem(self, pin: Version | None) -> ApiError | None:
        """Return why a request cannot be served now, None if it can. A pause is no problem: it passes."""
        if self.draining:
            return stopping()
        if self.phase != "current" and not self.paused:
            waits = "for its first weights" if self.phase == "empty" else "for weights: a transfer was cut off half-way"
            return not_current(f"the engine waits {waits}; ask again, or use another engine")
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
        """Stand still for at most ``lease`` seconds; a pause that is on is prolonged."""
        self.paused = True
        self.running.clear()
        self.restart_pause_lease(lease)

    def restart_pause_lease(self, lease: float) -> None:
        """Give the pause ``lease`` seconds from now on."""
        if self._pause_ends is not None:
            self._pause_ends.cancel()
        self._pause_ends = asyncio.get_running_loop().call_later(lease, self._pause_ran_out, lease)

    def _pause_ran_out(self, lease: float) -> None:
        if self.receiving:  # bounded by its own deadline
            self.restart_pause_lease(lease)
            return
        log.warning("pause_ran_out", seconds=lease, phase=self.phase)
        self.resume()

    def touch(self, version: Version | None = None) -> None:
        """New values are about to be written: from now on the weights are of no version until a commit.

        Args:
            version: The only one that they can be committed as; None: any.
        """
        self.phase, self.version, self.applied, self._arriving = "dirty", None, False, version

    def resume(self) -> None:
        """Serve what is there: the old version if it is untouched."""
        if self._pause_ends is not None:
            self._pause_ends.cancel()
            self._pause_ends = None
        self.applied = False
        self.paused = False
        self.running.set()
        self.on_resume()

    def hold_for_good(self) -> None:
        """Serve the weights that are there, as version 0.0: those of a model that is not trained."""
        self.phase, self.version = "current", (0, 0)

    def commit(self, version: Version, progress: int) -> None:
        """Stamp what was applied (or what is held already) as ``version`` and serve it.

        Raises:
            StateError: Nothing was applied that could be this version. A host that stood still while another one took
                its engine over may commit an older version after weights of a newer one arrived.
        """
        if self.applied and self._arriving not in (None, version):
            raise StateError(
                f"cannot commit version {version}: the weights that were received are those of {self._arriving}; "
                "another host gives this engine its weights"
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
