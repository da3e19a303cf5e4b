"""Prints the experiences of a run as JSON lines while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import select
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from trinity_mq.observability.experiences.printer import note
from trinity_mq.targets.connection import Target, open_streams

if TYPE_CHECKING:
    from trinity_mq.bus import Bus, Topology
    from trinity_mq.experience import Experience, ExperienceBatch
    from trinity_mq.observability.experiences.stream import ReadyReader
    from trinity_mq.observability.experiences.token_texts import TokenTexts

LOOK_SECONDS = 1.0
"""Interval in seconds between checks whether the run is over and whether the reader of our output closed it."""
LAST_SECONDS = 10.0
"""Seconds for reading the rest of the stream after the run is over."""
TEXTS = "token_texts"


def names_texts(fields: Sequence[str] | None) -> bool:
    """Return whether the output has the texts of tokens. ``fields`` None selects all fields."""
    return fields is None or TEXTS in fields


def select_fields(whole: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the named fields. The name ``a.b`` selects the part ``b`` of ``a``, or None if that part does not
    exist.
    """
    selection: dict[str, Any] = {}
    for name in fields:
        value: Any = whole
        first, *rest = (name,) if name in whole else name.split(".")
        for part in (first, *rest):
            value = value.get(part) if isinstance(value, Mapping) else None
        selection[name] = value
    return selection


class ExperienceLinePrinter:
    """Prints one JSON object per line for each experience.

    Args:
        texts: Token texts. None: token texts are printed as null.
        fields: Fields of each line. None: all fields.
        every: Print every N-th experience.
    """

    def __init__(self, texts: TokenTexts | None, fields: Sequence[str] | None, every: int) -> None:
        from trinity_mq.observability.experiences.token_texts import TokenTexts

        self._texts, self._fields, self._every, self.out = texts or TokenTexts(), fields, every, sys.stdout
        self._received = 0
        self.printed = 0

    def take(self, batches: Sequence[ExperienceBatch]) -> bool:
        """Print every N-th experience of the batches. Return False, so that reading continues."""
        for batch in batches:
            first = -self._received % self._every
            self._received += len(batch)
            for experience in batch.select(range(first, len(batch), self._every)).to_list():
                self._print(experience)
        return False

    def _print(self, experience: Experience) -> None:
        from trinity_mq.observability.experiences.show_experience import as_json
        from trinity_mq.telemetry.jsonline import dump_line

        whole = as_json(experience, self._texts)
        print(
            dump_line(whole if self._fields is None else select_fields(whole, self._fields)), file=self.out, flush=True
        )
        self.printed += 1


async def tap_run(target: Target, lines: ExperienceLinePrinter, start: int | None, *, follow: bool) -> None:
    """Print the experiences of a run. With ``follow``, wait for further batches, and return when the run has ended.
    Without ``follow``, return at the current end of the stream. A run with a private broker that does not run now is
    never followed: its stored batches are read.

    Args:
        target: The run.
        lines: Prints the experiences.
        start: First batch; 0: the beginning of the stream. None: only batches that arrive from now on, or all stored
            batches if the run is not followed.
        follow: Wait for further batches.
    """
    from trinity_mq.observability.experiences.stream import ExperienceFilter, ReadyReader

    is_ours = target.broker.url is None
    """True if no other process uses the broker, because it is the private broker of a run that is not running."""
    async with open_streams(target, "tap") as (bus, topology, store):
        reader = ReadyReader(bus, topology, ExperienceFilter(), store, lines.take, since=start or None, note=note)
        if not follow or is_ours:
            await reader.read()
            return
        reading = asyncio.create_task(reader.follow(None if start is None else 0), name="follow the stream")
        try:
            async with asyncio.TaskGroup() as group:
                watching = [
                    group.create_task(_end_with_run(bus, topology, target, reader, reading), name="the run's end"),
                    group.create_task(_watch_output(lines.out), name="the reader of our output"),
                ]
                await asyncio.wait([reading])
                for task in watching:
                    task.cancel()
            if not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()


async def _end_with_run(
    bus: Bus, topology: Topology, target: Target, reader: ReadyReader, reading: asyncio.Task[Any]
) -> None:
    """Stop the reading once the run is over and its published experiences were read or cannot be read."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(_listen(bus, topology, over), name="heartbeats")
        marker = group.create_task(_watch_folder(target, over), name="run marker")
        await over.wait()
        listening.cancel()
        marker.cancel()
    from trinity_mq.bus import BusUnavailable

    with contextlib.suppress(BusUnavailable, TimeoutError):
        async with asyncio.timeout(LAST_SECONDS):
            await reader.end()
            await asyncio.wait([reading])
    if not reading.done():
        note(
            "the run is over and its broker does not answer any more; the last experiences may be missing: "
            f"`trinity-mq tap {target.run} --no-follow --from BATCH` shows it"
        )
        reading.cancel()


async def _listen(bus: Bus, topology: Topology, over: asyncio.Event) -> None:
    """Set ``over`` once an explorer's heartbeat reports the end of the run."""
    from trinity_mq.bus import BusUnavailable
    from trinity_mq.bus.retry import retrying
    from trinity_mq.messages import ExplorerStatus, Heartbeat
    from trinity_mq.observability.follow import follow_telemetry

    def receive(message: object) -> None:
        if isinstance(message, Heartbeat) and isinstance(message.detail, ExplorerStatus) and message.detail.finished:
            over.set()

    async for attempt in retrying(BusUnavailable):
        with attempt:
            await follow_telemetry(bus, topology, "tap", receive, pattern="beat.explorer.#")


async def _watch_folder(target: Target, over: asyncio.Event) -> None:
    """Set ``over`` once the run folder, if it is on this machine, has the marker of a finished run."""
    folder = target.folder
    while folder is None or not folder.finished:  # noqa: ASYNC110  # another process writes it
        await asyncio.sleep(LOOK_SECONDS)
    over.set()


async def _watch_output(out: TextIO) -> None:
    """Raise BrokenPipeError once the reader of our output has closed it, even if nothing is printed. Return only if the
    output does not have a file descriptor.
    """
    try:
        number = out.fileno()
    except (OSError, ValueError):  # the output has no file descriptor
        return
    poll = select.poll()
    poll.register(number, 0)
    closed_events = select.POLLERR | select.POLLNVAL
    while not any(event & closed_events for _, event in poll.poll(0)):  # noqa: ASYNC110  # a poll in a thread never ends
        await asyncio.sleep(LOOK_SECONDS)
    raise BrokenPipeError
