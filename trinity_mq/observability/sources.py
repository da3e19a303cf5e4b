"""Sources of a run's state: its folder on this machine and its broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import structlog

from trinity_mq.bus import Bus, BusError, BusUnavailable, QueueGone, StreamCut, Topology
from trinity_mq.config import ConfigError
from trinity_mq.errors import CommandError
from trinity_mq.observability.follow import QUEUES, MetricsTail, depths, follow_telemetry, parse_metrics
from trinity_mq.observability.history import RunHistory
from trinity_mq.observability.run_state import RunState
from trinity_mq.observability.samples import SampleStore
from trinity_mq.reviews.stream import ReviewStream
from trinity_mq.runtime.errors import first_leaf
from trinity_mq.targets.connection import Target, connect_bus
from trinity_mq.targets.probe import broker_problem
from trinity_mq.telemetry.sample_log import SAMPLES_FOLDER, SampleLogReader
from trinity_mq.transport.ready_stream import ReadyStream, has_experiences

log = structlog.get_logger(__name__)

Part = Literal["metrics", "samples", "reviews"]
FOLDER_SECONDS = 1.0
"""Poll interval of the run's files in seconds."""
DEPTH_SECONDS = 2.0
AGAIN_SECONDS = 5.0
"""Reconnect delay in seconds."""
PROBE_AFTER = 5.0
"""Seconds without progress after which the broker is checked for an alarm."""
GONE_SECONDS = 10.0
"""Seconds without a connection after which the broker's address is looked up again."""
STREAM_SECONDS = 1.0
"""Minimum seconds between two messages taken from the stream."""


class FolderSource:
    """Reads metrics and samples from a run's folder as they are written.

    Args:
        folder: The run's folder.
        state: Receives the metrics.
        history: Receives the metrics and samples.
    """

    def __init__(self, folder: Path, state: RunState, history: RunHistory) -> None:
        self._folder = folder
        self._metrics = MetricsTail(folder)
        self._samples = SampleLogReader(folder / SAMPLES_FOLDER)
        self._state, self._history = state, history

    async def run(self) -> None:
        """Poll loop: reads new data until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(FOLDER_SECONDS)

    async def read(self) -> None:
        """Read the new metrics and samples."""
        try:
            lines = await asyncio.to_thread(self._metrics.read_lines)
            records = await asyncio.to_thread(lambda: list(self._samples.read()))
        except OSError as error:
            self._state.problems.append(f"{self._folder} cannot be read: {error.strerror or error}")
            return
        for line in lines:
            message, at = parse_metrics(line), line.get("time")
            if message is not None and isinstance(at, int | float):
                self._state.receive(message, at)
                self._history.receive(message, at)
        for record in records:
            self._history.samples.put(record.body, record.step)


class BrokerSource:
    """Reads heartbeats and queue depths from the broker, and the optional parts in ``takes``.

    Args:
        find: Returns the current run and broker, or None if no broker runs. It is called again for each connection,
            because a private broker has a new address after each start of its run.
        state: Receives the data.
        takes: Parts to read in addition to heartbeats and depths: ``metrics`` and ``samples``, which are otherwise read
            from the run's folder, and ``reviews``.
        history: Receives the metrics and samples. None: they are not kept, and no samples are read.
    """

    def __init__(
        self,
        find: Callable[[], Target | None],
        state: RunState,
        takes: Collection[Part] = (),
        history: RunHistory | None = None,
    ) -> None:
        self._find, self._state, self._takes, self._history = find, state, frozenset(takes), history
        self.bus: Bus | None = None
        """The connected bus. None: not connected."""
        self.topology: Topology | None = None
        self.reviews: ReviewStream | None = None
        """Stream of the reviews of rollouts. None: not connected, or no operator has requested a verdict yet."""
        self.url: str | None = None
        """URL of the broker found last. None: no broker was found yet."""

    async def run(self) -> None:
        """Connection loop: follows the broker until cancelled, and reconnects after a lost connection."""
        while True:
            try:
                await self._connect_and_follow()
                self._state.connection = ""
            except (BusError, CommandError, ConfigError, TimeoutError) as error:
                self._state.connection = str(error)
                log.warning("not_connected", reason=str(error))
            await asyncio.sleep(AGAIN_SECONDS)

    async def _connect_and_follow(self) -> None:
        """Find the broker and follow it until the connection is lost. Return at once if no broker runs."""
        target = await asyncio.to_thread(self._find)
        if target is None:
            return
        self.url = target.broker.url
        try:
            await self._follow(target)
        except ExceptionGroup as errors:
            raise first_leaf(errors) from None

    async def _follow(self, target: Target) -> None:
        async with connect_bus(target.run, target.broker, "dash") as (bus, topology):
            pattern = "#" if "metrics" in self._takes else "beat.#"
            self.bus, self.topology, self._state.is_live = bus, topology, True
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(follow_telemetry(bus, topology, "dash", self._receive, pattern=pattern))
                    group.create_task(self._depths(bus, topology))
                    if "reviews" in self._takes:
                        group.create_task(self._reviews(bus, topology))
                    if "samples" in self._takes and self._history is not None:
                        group.create_task(self._stream(bus, topology, self._history.samples))
            finally:
                self.bus, self.reviews, self._state.is_live = None, None, False

    def _receive(self, message: object) -> None:
        now = time.time()
        self._state.receive(message, now)
        if self._history is not None:
            self._history.receive(message, now)

    async def _depths(self, bus: Bus, topology: Topology) -> None:
        loop = asyncio.get_running_loop()
        usable = loop.time()
        while True:
            if bus.usable:
                usable, self._state.connection = loop.time(), ""
                self._state.set_depths(await depths(bus, topology, QUEUES), time.time())
                # a broker reports an alarm only to publishers, so publish a probe only when nothing progresses
                is_still = self._state.still(time.time()) >= PROBE_AFTER
                self._state.broker_trouble = await broker_problem(bus, topology) if is_still else ""
            else:
                self._state.connection = str(bus.trouble)
                if loop.time() - usable > GONE_SECONDS:
                    raise BusUnavailable(str(bus.trouble))
            await asyncio.sleep(DEPTH_SECONDS)

    async def _reviews(self, bus: Bus, topology: Topology) -> None:
        """Follow the reviews. Retry until an operator has requested the first review, and after each outage."""
        while True:
            try:
                async with ReviewStream(bus, topology).following() as reviews:
                    self.reviews = reviews
                    while True:
                        self._state.reviews = len(reviews.pending())
                        await reviews.changed.wait()
            except QueueGone:
                self.reviews = None
            except BusUnavailable:
                self.reviews = None  # nobody reads it now, so a verdict on it would never be confirmed
                await bus.wait_usable()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _stream(self, bus: Bus, topology: Topology, samples: SampleStore) -> None:
        """Take at most one chunk of experiences per second from the ready stream, starting at its current end."""
        loop = asyncio.get_running_loop()
        stream = ReadyStream(bus, topology)
        offset: int | None = None
        taken = -STREAM_SECONDS
        while True:
            try:
                async for delivery in stream.read(offset):
                    offset = (delivery.offset or 0) + 1
                    if not has_experiences(delivery) or bus.is_foreign(delivery):
                        continue
                    if loop.time() - taken >= STREAM_SECONDS:
                        taken = loop.time()
                        samples.put(delivery.body, None)
                return
            except StreamCut as cut:
                offset = cut.got
            except QueueGone:  # the run has not started yet
                await asyncio.sleep(AGAIN_SECONDS)
            except BusUnavailable:
                await bus.wait_usable()
