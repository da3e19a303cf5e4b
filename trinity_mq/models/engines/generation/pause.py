"""Pauses a batch step between two of its decode steps, so that new weights can go in, or ends it there.

The batch step runs in the engine's worker thread, where all of torch runs; while it is paused, that thread does the
work of the sync, such as copying weights.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from trinity_mq.messages import Version

T = TypeVar("T")
Spans = list[tuple[int, Version]]
"""``(first step, version)`` of each stretch of a batch step that was sampled under one version."""


class BatchCutOff(Exception):
    """The batch step was ended between two steps; its requests may begin anew."""


class PauseControl:
    """Pause control of one engine. :meth:`between` runs in the worker thread, everything else on the event loop."""

    def __init__(self, on_standing: Callable[[], None] = lambda: None) -> None:
        """``on_standing`` is called in the worker thread when a batch step stands still."""
        self._on_standing = on_standing
        self._changed = threading.Condition()
        self._held = self._cut = self._standing = False
        self._version: Version | None = None
        """The weights under which the batch step goes on."""
        self._work: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def hold(self) -> None:
        """Have the batch step stand still at its next step."""
        with self._changed:
            self._held = True

    def cut(self) -> None:
        """Have the batch step raise :class:`BatchCutOff` at its next step."""
        with self._changed:
            self._cut = True

    def release(self, version: Version | None) -> None:
        """Let the batch step go on under ``version``; None: there are no weights to go on with, so it is cut off."""
        with self._changed:
            self._cut = self._held and self._standing and version is None
            self._held, self._version = False, version
            self._changed.notify_all()

    def submit(self, work: Callable[[], T]) -> Future[T] | None:
        """Have ``work`` done in the worker thread while the batch step stands still; None: it does not."""
        with self._changed:
            if not (self._held and self._standing):
                return None
            future: Future[T] = Future()
            self._work.append((work, future))
            self._changed.notify_all()
            return future

    def between(self, step: int, spans: Spans) -> Version | None:
        """Stand still here, before step ``step``, if that is wanted; returns the version if it has changed, which is
        put into ``spans``.

        Raises:
            BatchCutOff: The batch step is not to go on.
        """
        with self._changed:
            if self._held:
                self._stand()
            if self._cut:
                self._cut = False
                raise BatchCutOff
            if self._version is None or self._version == spans[-1][1]:
                return None
            spans.append((step, self._version))
            return self._version

    def begin(self, version: Version) -> None:
        """A batch step begins under ``version``."""
        with self._changed:
            self._version, self._cut = version, False

    def _stand(self) -> None:
        """Do what there is to do until released; what was asked for by then is done to the end."""
        self._standing = True
        self._on_standing()
        try:
            while self._held or self._work:
                if not self._work:
                    self._changed.wait()
                    continue
                work, future = self._work.popleft()
                self._changed.release()
                try:
                    _do(work, future)
                finally:
                    self._changed.acquire()
        finally:
            self._standing = False


def _do(work: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
