"""Sources of a run's state: its folder on this machine and its broker."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import structlog

from trinity_mq.bus import Bus, BusError, BusUnavailable, QueueGone, StreamCut, Topology
from trinity_mq.config import ConfigError
from trinity_mq.errors import CommandError
from trinity_mq.observability.follow import MetricsTail, consume_messages, depths
from trinity_mq.observability.observatory import RunState
from trinity_mq.reviews.stream import ReviewStream
from trinity_mq.runtime.deliveries import EXPERIENCES
from trinity_mq.runtime.errors import first_leaf
from trinity_mq.targets.connection import Target, connect_bus
from trinity_mq.targets.probe import broker_problem
from trinity_mq.telemetry.sample_log import SAMPLES_FOLDER, SampleLogReader

log = structlog.get_logger(__name__)

Part = Literal["metrics", "samples", "reviews"]
QUEUES = ("submitted", "tasks.train", "tasks.eval", "closed", "dead")
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
        observatory: Receives the metrics and samples.
    """

    def __init__(self, folder: Path, observatory: RunState) -> None:
        self._folder = folder
        self._metrics = MetricsTail(folder)
        self._samples = SampleLogReader(folder / SAMPLES_FOLDER)
        self._observatory = observatory

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
            self._observatory.problems.append(f"{self._folder} cannot be read: {error.strerror or error}")
            return
        for line in lines:
            self._observatory.receive_line(line)
        for record in records:
            self._observatory.samples.put(record.body, record.step)


class BrokerSource:
    """Reads heartbeats and queue depths from the broker, and the optional parts in ``takes``.

    Args:
        find: Returns the current run and broker, or None if no broker runs. It is called again for each connection,
            because a private broker has a new address after each start of its run.
        observatory: Receives the data.
        takes: Parts to read in addition to heartbeats and depths: ``metrics`` and ``samples``, which are otherwise read
            from the run's folder, and ``reviews``.
    """

    def __init__(self, find: Callable[[], Target | None], observatory: RunState, takes: Collection[Part] = ()) -> None:
        self._find, self._observatory, self._takes = find, observatory, frozenset(takes)
        self.bus: Bus | None = None
        """The connected bus. None: not connected."""
        self.topology: Topology | None = None
        self.reviews: ReviewStream | None = None
        """Runs that wait for a person's verdict. None: no operator requests verdicts."""
        self.url: str | None = None
        """URL of the broker found last."""

    async def run(self) -> None:
        """Connection loop: follows the broker until cancelled, and reconnects after a lost connection."""
        while True:
            try:
                await self._connect_and_follow()
                self._observatory.connection = ""
            except (BusError, CommandError, ConfigError, TimeoutError) as error:
                self._observatory.connection = str(error)
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
            queue = topology.listener("dash", uuid.uuid4().hex[:12], "telemetry", pattern)
            self.bus, self.topology, self._observatory.is_live = bus, topology, True
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(consume_messages(bus, queue, self._observatory.receive))
                    group.create_task(self._depths(bus, topology))
                    if "reviews" in self._takes:
                        group.create_task(self._reviews(bus, topology))
                    if "samples" in self._takes:
                        group.create_task(self._stream(bus, topology))
            finally:
                self.bus, self.reviews, self._observatory.is_live = None, None, False

    async def _depths(self, bus: Bus, topology: Topology) -> None:
        loop = asyncio.get_running_loop()
        usable = loop.time()
        while True:
            if bus.usable:
                usable, self._observatory.connection = loop.time(), ""
                self._observatory.set_depths(await depths(bus, topology, QUEUES))
                # a broker reports an alarm only to publishers, so publish a probe only when nothing progresses
                is_still = self._observatory.still >= PROBE_AFTER
                self._observatory.broker_trouble = await broker_problem(bus, topology) if is_still else ""
            else:
                self._observatory.connection = str(bus.trouble)
                if loop.time() - usable > GONE_SECONDS:
                    raise BusUnavailable(str(bus.trouble))
            await asyncio.sleep(DEPTH_SECONDS)

    async def _reviews(self, bus: Bus, topology: Topology) -> None:
        """Follow the reviews. Retry until an operator has requested the first review."""
        while True:
            try:
                async with ReviewStream(bus, topology).following() as reviews:
                    self.reviews = reviews
                    while True:
                        self._observatory.reviews = len(reviews.pending())
                        await reviews.changed.wait()
            except QueueGone:
                self.reviews = None
            except BusUnavailable:
                await bus.wait_usable()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _stream(self, bus: Bus, topology: Topology) -> None:
        """Take at most one message of experiences per second from the ready stream, starting at its current end."""
        loop = asyncio.get_running_loop()
        stream = dataclasses.replace(topology.ready, redeclare=False)  # reading must not create the stream
        offset: int | None = None
        taken = -STREAM_SECONDS
        while True:
            try:
                async with await bus.consume(stream, offset=offset) as feed:
                    async for delivery in feed:
                        offset = (delivery.offset or 0) + 1
                        if delivery.content_type != EXPERIENCES or bus.is_foreign(delivery):
                            continue
                        if loop.time() - taken >= STREAM_SECONDS:
                            taken = loop.time()
                            self._observatory.samples.put(delivery.body, None)
                return
            except StreamCut as cut:
                offset = cut.got
            except QueueGone:  # the run has not started yet
                await asyncio.sleep(AGAIN_SECONDS)
            except BusUnavailable:
                await bus.wait_usable()
