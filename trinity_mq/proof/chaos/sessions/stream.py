"""The sessions of a run, read again from their stream: every event, and the resulting ledger."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from trinity_mq.bus import Bus, BusUnavailable, Delivery, StreamCut, Topology
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.gateway.ledger import Ledger
from trinity_mq.messages import DecodeError, SessionCall, SessionsDecided, decode_any
from trinity_mq.runtime.deliveries import new_mark

READ_SECONDS = 120.0
EVENT_KEY = "event"
"""Routing key of the gateways' own events. A marker with another key would be dead-lettered by a gateway."""


@dataclass
class SessionRecord:
    """Content of the sessions stream."""

    ledger: Ledger = field(default_factory=Ledger)
    """The ledger that a gateway derives from the whole stream."""
    calls: defaultdict[str, dict[str, SessionCall]] = field(default_factory=lambda: defaultdict(dict))
    """Answers by session and id, the first copy of each."""
    decisions: list[SessionsDecided] = field(default_factory=list)
    """Decisions in stream order, without repeated message ids."""
    begin: int = 0
    """First offset that retention has kept."""
    undecodable: list[str] = field(default_factory=list)


async def read_sessions(bus: Bus, topology: Topology) -> SessionRecord:
    """Read the stream from its beginning to its current end.

    Raises:
        BusUnavailable: The stream does not answer.
    """
    from trinity_agents.gateway.stream_book import SessionStream

    record = SessionRecord()
    async with asyncio.TaskGroup() as group:
        book = SessionStream(bus, topology, record_timeout=1.0, tasks=group)
        following = group.create_task(book.follow(), name="read the sessions")
        try:
            async with asyncio.timeout(READ_SECONDS):
                await book.changed.until(book.is_ready)
        except TimeoutError:
            raise BusUnavailable(f"the stream of sessions was not read within {READ_SECONDS:g} s") from None
        finally:
            following.cancel()
    record.ledger = book.ledger
    await _read_events(bus, topology, record)
    return record


async def _read_events(bus: Bus, topology: Topology, record: SessionRecord) -> None:
    mark, offset, ids = new_mark(), 0, set[str]()
    await bus.publish(topology.exchange("sessions"), EVENT_KEY, mark)
    while True:
        try:
            async with await bus.consume(topology.sessions, offset=offset) as feed:
                while (delivery := await next_or_quiet(bus, feed, READ_SECONDS)) is not None:
                    if delivery.message_id == mark.message_id:
                        return
                    if delivery.message_id not in ids and not bus.is_foreign(delivery):
                        ids.add(delivery.message_id or "")
                        _take(delivery, record)
        except StreamCut as cut:
            offset = record.begin = cut.got
            continue
        raise BusUnavailable(f"the stream of sessions was silent for {READ_SECONDS:g} s")


def _take(delivery: Delivery, record: SessionRecord) -> None:
    try:
        message = decode_any(delivery.body, delivery.content_type)
    except DecodeError as error:
        record.undecodable.append(f"sessions, offset {delivery.offset}: {error}")
        return
    if isinstance(message, SessionCall):
        record.calls[message.session].setdefault(message.call, message)
    elif isinstance(message, SessionsDecided):
        record.decisions.append(message)
