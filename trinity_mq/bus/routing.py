"""Topic routing, and the check that a received message was published for the queue that delivered it.

A broker checks only the routing key of a publish against the permissions of a user. A sender can still route a message
elsewhere: with the headers ``CC`` and ``BCC``, by binding an exchange of its own, or with a queue of its own whose
messages the broker moves on. Therefore receivers check where a message was published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from trinity_mq.bus.topology import MARK, Queue
from trinity_mq.messages import DecodeError, Mark, decode_any

MOVED = "x-first-death-queue"
"""Header that the broker adds to a message that it moves to a dead-letter exchange."""
EXPERIENCE_TYPES = "application/vnd.trinity-mq."
"""Prefix of the content types of experiences and of references to experiences."""
TAKES_MOVED = (".dead", ".control")
"""Suffixes of the exchanges that receive moved messages from queues of a run. No outside program may publish there."""


def routing_problem(
    queue: Queue, exchange: str, key: str, headers: Mapping[str, object], body: bytes, content_type: str | None
) -> str | None:
    """Return the reason why a message in ``queue`` was not published for it. Return None if it was.

    Args:
        queue: The queue. A queue without bindings accepts every message.
        exchange: Exchange to which the message was published.
        key: Routing key of the message.
        headers: Headers of the message.
        body: Body of the message. With the routing key of marks, which readers may use, it must not be another message.
        content_type: Content type of the body.
    """
    if not queue.bindings:
        return None
    by_name = exchange == "" and key == queue.name  # publishing by queue name needs its own permission
    if not (
        by_name
        or any(binding.exchange == exchange and topic_matches(binding.pattern, key) for binding in queue.bindings)
    ):
        return f"published to {exchange[:80]!r} with routing key {key[:80]!r}, which is not bound to this queue"
    if MOVED in headers and not exchange.endswith(TAKES_MOVED):
        return f"moved here by the broker from the queue {str(headers[MOVED])[:80]!r}"
    if key == MARK and (kind := _other_than_mark(body, content_type)) is not None:
        return f"published with routing key {MARK!r}: a {kind}"
    return None


def _other_than_mark(body: bytes, content_type: str | None) -> str | None:
    """Return the kind of a body. Return None for a mark, and for a body that does not decode, because readers set that
    aside.
    """
    if content_type is not None and content_type.startswith(EXPERIENCE_TYPES):
        return content_type
    try:
        message = decode_any(body, content_type)
    except DecodeError:
        return None
    return None if isinstance(message, Mark) else message.kind


@lru_cache(maxsize=4096)
def topic_matches(pattern: str, key: str) -> bool:
    """Return whether a routing key matches an AMQP binding pattern: ``*`` is a single word, ``#`` any number of words.

    >>> topic_matches("train.#", "train"), topic_matches("*.a", "x.y.a")
    (True, False)
    """
    return _match(pattern.split(".") if pattern else [], key.split(".") if key else [])


def _match(pattern: Sequence[str], key: Sequence[str]) -> bool:
    if not pattern:
        return not key
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(_match(rest, key[skipped:]) for skipped in range(len(key) + 1))
    return bool(key) and first in {"*", key[0]} and _match(rest, key[1:])
