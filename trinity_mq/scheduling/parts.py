"""Experiences as bodies that fit into a message."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_mq.bus import MessageTooLarge
from trinity_mq.experience import Experience


def split_to_size(experiences: Sequence[Experience], max_bytes: int) -> list[bytes]:
    """Return bodies of at most ``max_bytes`` each that hold the experiences in order.

    Raises:
        MessageTooLarge: A single experience is over the limit.
    """
    if not experiences:
        return []
    body = Experience.serialize_many(list(experiences))
    if len(body) <= max_bytes:
        return [body]
    if len(experiences) == 1:
        raise MessageTooLarge(
            f"experience {experiences[0].eid} takes {len(body)} bytes, over broker.max_message_bytes {max_bytes}; "
            "raise that limit (the broker "
            "itself allows 16 MiB) or make responses shorter"
        )
    half = len(experiences) // 2
    return split_to_size(experiences[:half], max_bytes) + split_to_size(experiences[half:], max_bytes)
