"""Pauses a batch step between two decode steps so that new weights can be loaded, or ends it there.

The batch step runs in a thread of its own. While it is paused, another thread may use the model to copy weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from trinity_mq.messages import Version

Spans = list[tuple[int, Version]]
"""``(first decode step, version)`` of each stretch of a batch step that was sampled under one version."""


class BatchStepAborted(Exception):
    """The batch step was ended between two decode steps; its requests may start again."""


class PauseControl:
    """Pause control of one engine. :meth:`between` runs in the thread of the batch step, the other methods on the event
    loop.
    """

    def __init__(self, on_standing: Callable[[], None] = lambda: None) -> None:
        """Create the control. ``on_standing`` is called in the thread of the batch step when that step is paused."""
        self._on_standing = on_standing
        self._released = threading.Event()
        self._released.set()
        self._cut = self._standing = False
        self._version: Version | None = None
        """Weight version under which the batch step continues."""
        self.model_in_use = threading.Lock()
        """Held while the model is used or changed; a paused batch step releases it."""

    def begin(self, version: Version) -> None:
        """Record that a batch step begins under ``version``."""
        self._version, self._cut = version, False

    def hold(self) -> None:
        """Pause the batch step before its next decode step."""
        self._released.clear()

    def cut(self) -> None:
        """Make the batch step raise :class:`BatchStepAborted` before its next decode step."""
        self._cut = True

    def release(self, version: Version | None) -> None:
        """Let the batch step continue under ``version``. None: no weights are available, so a paused step is cut."""
        self._version, self._cut = version, self._standing and version is None
        self._released.set()

    def between(self, step: int, spans: Spans) -> Version | None:
        """Wait here, before decode step ``step``, while the pause lasts. If the version has changed, add it to
        ``spans`` and return it.

        Raises:
            BatchStepAborted: The batch step must not continue.
        """
        while not self._released.is_set():
            self._standing = True
            self.model_in_use.release()
            self._on_standing()
            self._released.wait()
            self.model_in_use.acquire()
            self._standing = False
        if self._cut:
            self._cut = False
            raise BatchStepAborted
        version = self._version
        if version is None or version == spans[-1][1]:
            return None
        spans.append((step, version))
        return version
