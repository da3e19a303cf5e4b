"""Sources of what is seen of a run: its folder on this machine, and its broker."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import structlog

from trinity_mq.bus import Bus, BusError, BusUnavailable, QueueGone, StreamCut, Topology
from trinity_mq.cli.broker.connection import Target, connected
from trinity_mq.cli.broker.probe import broker_trouble
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.observe.observatory import Observatory
from trinity_mq.cli.run.follow import MetricsTail, depths, listen
from trinity_mq.config import ConfigError
from trinity_mq.reviews.stream import NoReviews, ReviewStream
from trinity_mq.runtime.deliveries import EXPERIENCES
from trinity_mq.runtime.errors import first_leaf
from trinity_mq.telemetry.sample_log import SAMPLES_FOLDER, SampleLogReader

log = structlog.get_logger(__name__)

Part = Literal["metrics", "samples", "reviews"]
QUEUES = ("submitted", "tasks.train", "tasks.eval", "closed", "dead")
FOLDER_SECONDS = 1.0
"""Seconds between two looks at the run's files."""
DEPTH_SECONDS = 2.0
AGAIN_SECONDS = 5.0
"""Seconds from a connection that failed to the next try."""
PROBE_AFTER = 5.0
"""Seconds without progress after which the broker is asked for an alarm."""
GONE_SECONDS = 10.0
"""Seconds without a connection after which the broker is looked for anew."""
STREAM_SECONDS = 1.0
"""Seconds between two messages that are taken from the stream."""


class FolderSource:
    """Metrics and samples of a run's folder, as they are written.

    Args:
        folder: The run's folder.
        observatory: Takes them in.
    """

    def __init__(self, folder: Path, observatory: Observatory) -> None:
        self._folder = folder
        self._metrics = MetricsTail(folder)
        self._samples = SampleLogReader(folder / SAMPLES_FOLDER)
        self._observatory = observatory

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(FOLDER_SECONDS)

    async def read(self) -> None:
        """Take in what is new."""
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
    """Heartbeats, metrics and depths from the broker; samples too where the run's folder is not here.

    Args:
        find: Returns the run and its broker as they are now; None: no broker runs. A private broker has another address
            after each start of its run.
        observatory: Takes them in.
        takes: Beside heartbeats and depths: ``metrics`` and ``samples``, which else are read from the run's folder, and
            ``reviews``.
    """

    def __init__(
        self, find: Callable[[], Target | None], observatory: Observatory, takes: Collection[Part] = ()
    ) -> None:
        self._find, self._observatory, self._takes = find, observatory, frozenset(takes)
        self.bus: Bus | None = None
        """The connected bus, None while there is none."""
        self.topology: Topology | None = None
        self.reviews: ReviewStream | None = None
        """Runs that wait for a person's verdict, None where nobody is asked."""
        self.url: str | None = None
        """URL of the broker that was found last."""

    async def run(self) -> None:
        """Follow the broker until cancelled; a connection that is lost is made again."""
        while True:
            try:
                await self._once()
                self._observatory.connection = ""
            except (BusError, CommandError, ConfigError, TimeoutError) as error:
                self._observatory.connection = str(error)
                log.warning("not_connected", reason=str(error))
            await asyncio.sleep(AGAIN_SECONDS)

    async def _once(self) -> None:
        """Find the broker and follow it until the connection is lost; return at once where none is at work."""
        target = await asyncio.to_thread(self._find)
        if target is None:
            return
        self.url = target.broker.url
        try:
            await self._follow(target)
        except ExceptionGroup as errors:
            raise first_leaf(errors) from None

    async def _follow(self, target: Target) -> None:
        async with connected(target.run, target.broker, "dash") as (bus, topology):
            wanted = "#" if "metrics" in self._takes else "beat.#"
            queue = topology.listener("dash", uuid.uuid4().hex[:12], "telemetry", wanted)
            self.bus, self.topology, self._observatory.is_live = bus, topology, True
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(listen(bus, queue, self._observatory.receive))
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
                # a broker says that it has an alarm to those who publish: asked only where one may be the reason
                is_still = self._observatory.still >= PROBE_AFTER
                self._observatory.broker_trouble = await broker_trouble(bus, topology) if is_still else ""
            else:
                self._observatory.connection = str(bus.trouble)
                if loop.time() - usable > GONE_SECONDS:
                    raise BusUnavailable(str(bus.trouble))
            await asyncio.sleep(DEPTH_SECONDS)

    async def _reviews(self, bus: Bus, topology: Topology) -> None:
        """Follow the reviews, once an operator has asked the first time."""
        while True:
            try:
                async with ReviewStream(bus, topology).following() as reviews:
                    self.reviews = reviews
                    while True:
                        self._observatory.reviews = len(reviews.pending())
                        await reviews.changed.wait()
            except (NoReviews, QueueGone):
                self.reviews = None
            except BusUnavailable:
                await bus.wait_usable()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _stream(self, bus: Bus, topology: Topology) -> None:
        """Take a message of experiences a second from the ready stream, from its present end on."""
        loop = asyncio.get_running_loop()
        stream = dataclasses.replace(topology.ready, redeclare=False)  # looking must not make it
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
            except QueueGone:  # the run has not begun yet
                await asyncio.sleep(AGAIN_SECONDS)
            except BusUnavailable:
                await bus.wait_usable()
