"""Queues of the in-memory broker: work queues that deliver until answered, streams that are read by offset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from trinity_mq.bus.topology import Queue


@dataclass(slots=True, kw_only=True)
class Stored:
    """A message in a queue."""

    body: bytes
    exchange: str
    routing_key: str
    message_id: str
    content_type: str
    headers: Mapping[str, object]
    correlation_id: str | None
    reply_to: str | None
    order: int = 0
    """Place in its queue, by which what comes back is put where it was."""
    returns: int = 0
    offset: int | None = None


class Reader(Protocol):
    """Interface of a consumer towards a queue."""

    @property
    def room(self) -> bool:
        """May another message be sent to it?"""

    def receive(self, message: Stored) -> None:
        """Take a message."""

    def queue_deleted(self) -> None:
        """The queue is gone."""

    def cut(self, kept: int) -> None:
        """The stream no longer holds what comes next; ``kept`` is the first offset that it holds."""


class MemoryQueue(ABC):
    """Base class of work queues and streams."""

    def __init__(self, declared: Queue, owner: object | None) -> None:
        self.declared, self.owner = declared, owner

    @property
    @abstractmethod
    def depth(self) -> int:
        """Messages ready."""

    @abstractmethod
    def put(self, message: Stored) -> None:
        """Store a message."""

    @abstractmethod
    def delete(self) -> None:
        """Tell the consumers."""


class WorkQueue(MemoryQueue):
    """A quorum queue, or an exclusive one (which counts no returns)."""

    def __init__(self, declared: Queue, owner: object | None = None) -> None:
        super().__init__(declared, owner)
        self._ready: deque[Stored] = deque()
        self._readers: list[Reader] = []
        self._last_order = 0

    @property
    def depth(self) -> int:
        """Messages neither delivered nor waiting for an answer."""
        return len(self._ready)

    @property
    def messages(self) -> list[Stored]:
        """Messages neither delivered nor waiting for an answer, in order."""
        return list(self._ready)

    def put(self, message: Stored) -> None:
        """Append and deliver."""
        self._last_order += 1
        self._ready.append(replace(message, order=self._last_order))
        self.dispatch()

    def take_back(self, messages: Iterable[Stored]) -> None:
        """Requeue what was not acknowledged, where it was, one return more each. Delivers nothing by itself."""
        for message in messages:
            if self.declared.kind == "quorum":
                message.returns += 1
            self._ready.append(message)
        self._ready = deque(sorted(self._ready, key=lambda message: message.order))

    def attach(self, reader: Reader) -> None:
        """Add a consumer and deliver to it."""
        self._readers.append(reader)
        self.dispatch()

    def detach(self, reader: Reader) -> None:
        """Remove a consumer; the caller gives back what it held."""
        self._readers.remove(reader)

    def dispatch(self) -> None:
        """Deliver while there is a message and a consumer with room: in turn, or to the single active one."""
        while self._ready:
            candidates = self._readers[:1] if self.declared.single_active_consumer else self._readers
            reader = next((reader for reader in candidates if reader.room), None)
            if reader is None:
                return
            if not self.declared.single_active_consumer:
                self._readers.remove(reader)
                self._readers.append(reader)
            reader.receive(self._ready.popleft())

    def delete(self) -> None:
        """Drop the messages, tell the consumers."""
        self._ready.clear()
        for reader in tuple(self._readers):
            reader.queue_deleted()


@dataclass(slots=True)
class _Position:
    reader: Reader
    next: int


class StreamQueue(MemoryQueue):
    """A stream; retention cuts message by message, where a broker cuts whole segments."""

    def __init__(self, declared: Queue, owner: object | None = None) -> None:
        super().__init__(declared, owner)
        self._first = 0
        self._messages: deque[Stored] = deque()
        self._bytes = 0
        self._positions: list[_Position] = []

    @property
    def depth(self) -> int:
        """Messages kept."""
        return len(self._messages)

    @property
    def end(self) -> int:
        """The offset of the next message published."""
        return self._first + len(self._messages)

    def put(self, message: Stored) -> None:
        """Append, cut what retention does not keep, deliver."""
        limit = self.declared.max_length_bytes
        self._messages.append(replace(message, offset=self.end))
        self._bytes += len(message.body)
        while limit is not None and self._bytes > limit and len(self._messages) > 1:
            self._bytes -= len(self._messages.popleft().body)
            self._first += 1
        self.dispatch()

    def attach(self, reader: Reader, offset: int) -> None:
        """Deliver from ``offset`` on; beyond the end it waits."""
        self._positions.append(_Position(reader, offset))
        self.dispatch()

    def detach(self, reader: Reader) -> None:
        """Remove a consumer."""
        self._positions = [position for position in self._positions if position.reader is not reader]

    def dispatch(self) -> None:
        """Deliver to each consumer what it has room for."""
        for position in tuple(self._positions):
            if position.next < self._first:
                position.reader.cut(self._first)
                continue
            while position.next < self.end and position.reader.room:
                position.next += 1
                position.reader.receive(self._messages[position.next - 1 - self._first])

    def delete(self) -> None:
        """Tell the consumers."""
        for position in tuple(self._positions):
            position.reader.queue_deleted()
