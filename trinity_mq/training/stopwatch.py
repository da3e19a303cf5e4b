"""Measures the duration of the parts of a train step. Only :meth:`Stopwatch.metrics` waits for a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trinity_mq.telemetry.trace import span


class Stopwatch:
    """Sums the seconds of each part.

    On a GPU a part only enqueues its work, so its seconds are measured between two events in the GPU's queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the ``with`` block to the part ``name``."""
        if self._on_gpu:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._events.append((name, first, last))
        else:
            started = time.perf_counter()
            with span(name, threads=True):
                yield
            self._add(name, time.perf_counter() - started)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each part as ``time/<part>``; waits for the GPU."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, first, last in self._events:
            self._add(name, first.elapsed_time(last) / 1000)
        self._events.clear()
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()}
