"""Turns messages into envelopes and deliveries into messages; dead-letters a body that cannot be used."""

from __future__ import annotations

import contextlib
import hashlib
import time

import structlog

from trinity_mq.bus import Bus, Delivery, Envelope, Incoming, StaleDelivery, Topology
from trinity_mq.bus.base import HeaderValue
from trinity_mq.messages import CONTENT_TYPE, DecodeError, Message, decode, decode_any, encode

log = structlog.get_logger(__name__)

EXPERIENCES = "application/vnd.trinity-mq.experiences"
"""Content type of experience parts and chunks."""
REFERENCE = "application/vnd.trinity-mq.reference"
"""Content type of an ExperienceReference, whose experience body lies in the blob store."""


def envelope(
    message: Message,
    *,
    message_id: str | None = None,
    headers: dict[str, HeaderValue] | None = None,
    correlation_id: str | None = None,
    reply_to: str | None = None,
) -> Envelope:
    """Return ``message`` ready to publish, with ``kind`` and ``version`` repeated in the headers."""
    found: dict[str, HeaderValue] = {"kind": message.kind, "version": message.version_number, **(headers or {})}
    for name in ("batch", "ticket", "attempt"):
        value = getattr(message, name, None)
        if isinstance(value, str | int) and name not in found:
            found[name] = value
    own_id = {} if message_id is None else {"message_id": message_id}
    return Envelope(
        body=encode(message),
        kind=message.kind,
        content_type=CONTENT_TYPE,
        headers=found,
        correlation_id=correlation_id,
        reply_to=reply_to,
        **own_id,
    )


async def dead_letter(bus: Bus, topology: Topology, incoming: Incoming, reason: str, by: str) -> None:
    """Publish a copy of a body to ``dead`` with its reason; the original is the caller's to acknowledge afterwards.

    A body too large for us to publish is rejected instead: the broker moves it, and the reason is in our log only.
    """
    log.warning(
        "dead_letter",
        queue=incoming.queue,
        reason=reason,
        message_id=incoming.message_id,
        deliveries=incoming.deliveries_before,
    )
    if len(incoming.body) > bus.max_message_bytes and isinstance(incoming, Delivery):
        with contextlib.suppress(StaleDelivery):  # stale: the broker redelivers it, and it is handled then
            await incoming.reject()
        return
    kept = {
        key: value
        for key, value in incoming.headers.items()
        if isinstance(value, str | int | float | bool) and not key.startswith("x-")
    }
    headers: dict[str, HeaderValue] = {
        **kept,
        "dead-reason": reason[:1000],
        "dead-queue": incoming.queue,
        "dead-by": by,
        "dead-deliveries": incoming.deliveries_before,
        "dead-time": time.time(),
    }
    copy = Envelope(
        body=incoming.body,
        kind=incoming.kind or "unknown",
        message_id=f"dead-{incoming.queue}-{_identity(incoming)}",
        content_type=incoming.content_type or "application/octet-stream",
        headers=headers,
        correlation_id=incoming.correlation_id,
        reply_to=incoming.reply_to,
    )
    while not await bus.publish(topology.exchange("dead"), incoming.routing_key or "unknown", copy):
        await bus.declare(topology.dead)  # it was deleted; the original is acknowledged next and must not be lost


def _identity(incoming: Incoming) -> str:
    """Return an id of this body; outside senders may leave the message id out."""
    if incoming.message_id:
        return incoming.message_id
    return hashlib.sha256(incoming.body).hexdigest()[:32] if incoming.offset is None else str(incoming.offset)


async def decode_or_dead_letter(
    bus: Bus,
    topology: Topology,
    delivery: Delivery,
    by: str,
    *,
    expect: type[Message] | None = None,
    quiet: bool = False,
) -> Message | None:
    """Return the control-plane message in ``delivery``; None if it does not decode, dead-lettered and acknowledged.

    Args:
        bus: A connected bus.
        topology: The run's names.
        delivery: The delivery.
        by: Id of the agent, for the dead letter.
        expect: The only kind that belongs there, which the body may then leave out.
        quiet: Only log a body that does not decode: of the many receivers of a broadcast one dead-letters it.
    """
    try:
        if expect is not None:
            return decode(delivery.body, expect, delivery.content_type)
        return decode_any(delivery.body, delivery.content_type)
    except DecodeError as error:
        if quiet:
            log.warning("undecodable", queue=delivery.queue, reason=str(error))
        else:
            await dead_letter(bus, topology, delivery, f"does not decode: {error}", by)
        await acknowledge(delivery)
        return None


async def acknowledge(delivery: Delivery) -> bool:
    """Acknowledge; return False for a stale delivery, which the broker redelivers."""
    try:
        await delivery.ack()
    except StaleDelivery:
        return False
    return True


async def requeue(delivery: Delivery) -> None:
    """Requeue, which counts as a delivery; a stale delivery has been taken back by the broker already."""
    with contextlib.suppress(StaleDelivery):
        await delivery.requeue()
