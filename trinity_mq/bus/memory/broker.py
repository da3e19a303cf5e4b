"""The shared state of the in-memory broker, and the faults that a test may ask of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from trinity_mq.bus.base import BusRefused
from trinity_mq.bus.memory.queues import MemoryQueue, Stored, StreamQueue, WorkQueue
from trinity_mq.bus.topology import Binding, Queue


class Client(Protocol):
    """Interface of a bus towards the broker."""

    def disconnect(self, reason: str) -> None:
        """The connection is gone."""

    def reconnect(self) -> None:
        """Connect again and rebuild."""

    def reconnect_in(self, seconds: float) -> None:
        """Connect again later."""

    def refresh(self) -> None:
        """An alarm began or ended."""


class MemoryBroker:
    """In-memory broker of one test, shared by its buses."""

    def __init__(self) -> None:
        self.queues: dict[str, MemoryQueue] = {}
        self.blocked = False
        self._bindings: dict[str, set[tuple[str, str]]] = defaultdict(set)  # exchange to (pattern, queue)
        self._clients: list[Client] = []
        self._confirms_to_lose = 0

    def drop(self, bus: Client, *, delay: float | None = 0.5) -> None:
        """Cut the connection of ``bus``. It returns after ``delay`` seconds, or with :meth:`restore` if None."""
        bus.disconnect("connection lost")
        if delay is not None:
            bus.reconnect_in(delay)

    def restore(self, bus: Client) -> None:
        """Let ``bus`` connect again now."""
        bus.reconnect()

    def block(self) -> None:
        """Raise an alarm: publishers wait."""
        self._alarm(True)

    def unblock(self) -> None:
        """End the alarm."""
        self._alarm(False)

    def lose_confirm_once(self) -> None:
        """Store the next message but lose its confirm, so that its publisher repeats it."""
        self._confirms_to_lose += 1

    def loses_confirm(self) -> bool:
        """Return whether the publish under way is to lose its confirm."""
        if not self._confirms_to_lose:
            return False
        self._confirms_to_lose -= 1
        return True

    def enter(self, client: Client) -> None:
        """Note a connection."""
        self._clients.append(client)

    def leave(self, client: Client) -> None:
        """Forget a connection; its exclusive queues go with it."""
        self._clients.remove(client)
        for name in [name for name, queue in self.queues.items() if queue.owner is client]:
            self.delete(name)

    def declare(self, queue: Queue, client: Client) -> MemoryQueue:
        """Return the queue, made if it is missing, with its bindings.

        Raises:
            BusRefused: It is exclusive to another connection.
        """
        found = self.queues.get(queue.name)
        if found is None:
            owner = client if queue.kind == "exclusive" else None
            found = StreamQueue(queue, owner) if queue.kind == "stream" else WorkQueue(queue, owner)
            self.queues[queue.name] = found
        check_owner(found, client)
        for binding in queue.bindings:
            self._bindings[binding.exchange].add((binding.pattern, queue.name))
        return found

    def unbind(self, name: str, bindings: Iterable[Binding]) -> None:
        """Remove bindings of a queue."""
        for binding in bindings:
            self._bindings[binding.exchange].discard((binding.pattern, name))

    def delete(self, name: str) -> None:
        """Remove a queue with its bindings; its consumers hear of it."""
        for bound in self._bindings.values():
            bound.difference_update({entry for entry in bound if entry[1] == name})
        queue = self.queues.pop(name, None)
        if queue is not None:
            queue.delete()

    def route(self, message: Stored) -> bool:
        """Store a message in every queue that a binding leads to; return whether there is one."""
        if message.exchange:
            bound = self._bindings[message.exchange]
            names = {name for pattern, name in bound if topic_matches(pattern, message.routing_key)}
        else:
            names = {message.routing_key} & self.queues.keys()
        for name in sorted(names):
            self.queues[name].put(message)
        return bool(names)

    def dead_letter(self, queue: Queue, message: Stored) -> None:
        """Pass a rejected message on under its own routing key with the reason; drop it where no exchange is set."""
        if queue.dead_letter_exchange is None:
            return
        reason = {
            "x-first-death-queue": queue.name,
            "x-first-death-reason": "rejected",
            "x-first-death-exchange": message.exchange,
        }
        headers = {**message.headers, **reason}
        self.route(replace(message, exchange=queue.dead_letter_exchange, headers=headers, returns=0))

    def _alarm(self, blocked: bool) -> None:
        self.blocked = blocked
        for client in self._clients:
            client.refresh()


def check_owner(queue: MemoryQueue, client: Client) -> None:
    """Refuse the use of another's exclusive queue."""
    if queue.owner is not None and queue.owner is not client:
        raise BusRefused(f"queue {queue.declared.name} is exclusive to another connection")


def topic_matches(pattern: str, key: str) -> bool:
    """Return whether a routing key fits an AMQP binding pattern: ``*`` is one word, ``#`` any number of words.

    >>> topic_matches("train.#", "train"), topic_matches("*.a", "x.y.a")
    (True, False)
    """
    return _match(_words(pattern), _words(key))


def _words(text: str) -> Sequence[str]:
    return text.split(".") if text else ()


def _match(pattern: Sequence[str], key: Sequence[str]) -> bool:
    if not pattern:
        return not key
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(_match(rest, key[skipped:]) for skipped in range(len(key) + 1))
    return bool(key) and first in {"*", key[0]} and _match(rest, key[1:])
