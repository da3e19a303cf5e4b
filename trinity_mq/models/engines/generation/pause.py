"""Pauses a batch step between two of its decode steps, so that new weights can go in, or ends it there.

The batch step runs in a thread of its own; while it stands still, another thread may use the model, to copy weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from trinity_mq.messages import Version

Spans = list[tuple[int, Version]]
"""``(first step, version)`` of each stretch of a batch step that was sampled under one version."""


class BatchCutOff(Exception):
    """The batch step was ended between two steps; its requests may begin anew."""


class PauseControl:
    """Pause control of one engine. :meth:`between` runs in the thread of the batch step, the rest on the event loop."""

    def __init__(self, on_standing: Callable[[], None] = lambda: None) -> None:
        """``on_standing`` is called in the thread of the batch step when that stands still."""
        self._on_standing = on_standing
        self._released = threading.Event()
        self._released.set()
        self._cut = self._standing = False
        self._version: Version | None = None
        """The weights under which the batch step goes on."""
        self.model_in_use = threading.Lock()
        """Held while the model is used or changed; a batch step that stands still gives it up."""

    def begin(self, version: Version) -> None:
        """A batch step begins under ``version``."""
        self._version, self._cut = version, False

    def hold(self) -> None:
        """Have the batch step stand still at its next step."""
        self._released.clear()

    def cut(self) -> None:
        """Have the batch step raise :class:`BatchCutOff` at its next step."""
        self._cut = True

    def release(self, version: Version | None) -> None:
        """Let the batch step go on under ``version``; None: there are no weights to go on with, so it is cut off."""
        self._version, self._cut = version, self._standing and version is None
        self._released.set()

    def between(self, step: int, spans: Spans) -> Version | None:
        """Stand still here, before step ``step``, while held; returns the version if it has changed, which is put into
        ``spans``.

        Raises:
            BatchCutOff: The batch step is not to go on.
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
            raise BatchCutOff
        version = self._version
        if version is None or version == spans[-1][1]:
            return None
        spans.append((step, version))
        return version
