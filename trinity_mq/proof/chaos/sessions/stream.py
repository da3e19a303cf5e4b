"""The sessions of a run, read again from their stream: every event, and the resulting ledger."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from trinity_mq.bus import Bus, BusUnavailable, Delivery, Topology
from trinity_mq.bus.streams import read_up_to_now
from trinity_mq.gateway.ledger import Ledger
from trinity_mq.messages import DecodeError, SessionCall, SessionsDecided, decode_any
from trinity_mq.runtime.deliveries import new_mark
from trinity_mq.runtime.errors import first_leaf

READ_SECONDS = 120.0
EVENT_KEY = "event"
"""Routing key of the gateways' own events. The marker that ends the reading uses it too, because a gateway would
dead-letter a marker with another key."""


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
    """Read the sessions stream of a run from its beginning to its current end: the ledger first, then the events.

    Raises:
        BusUnavailable: The stream does not answer.
    """
    from trinity_agents.gateway.session_stream import SessionStream

    record = SessionRecord()
    try:
        async with asyncio.TaskGroup() as group:
            store = SessionStream(bus, topology, record_timeout=1.0, tasks=group)
            following = group.create_task(store.follow(), name="read the sessions")
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await store.changed.until(store.is_ready)
            except TimeoutError:
                raise BusUnavailable(f"the stream of sessions was not read within {READ_SECONDS:g} s") from None
            finally:
                following.cancel()
    except ExceptionGroup as errors:
        raise first_leaf(errors) from None
    record.ledger = store.ledger
    await _read_events(bus, topology, record)
    return record


async def _read_events(bus: Bus, topology: Topology, record: SessionRecord) -> None:
    """Read the events of the stream into the record.

    Raises:
        BusUnavailable: The stream does not answer.
    """
    ids, first = set[str](), True
    events = read_up_to_now(bus, topology.sessions, new_mark(), offset=0, key=EVENT_KEY, seconds=READ_SECONDS)
    async for delivery in events:
        if first:
            record.begin, first = delivery.offset or 0, False
        if delivery.message_id not in ids and not bus.is_foreign(delivery):
            ids.add(delivery.message_id or "")
            _take(delivery, record)


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
