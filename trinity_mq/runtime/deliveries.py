"""Puts messages into envelopes, decodes deliveries, returns deliveries to their queue, dead-letters them, and notes the
messages in hand, so that a message that crashes its agent is recognised.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from trinity_mq.bus import Bus, BusError, Delivery, Envelope, Incoming, StaleDelivery, Topology
from trinity_mq.bus.properties import HeaderValue, clamped, header_text, omitted_headers_text, outside_headers
from trinity_mq.messages import (
    CONTENT_TYPE,
    DecodeError,
    Mark,
    Message,
    NewerBodyError,
    decode,
    decode_any,
    encode,
)
from trinity_mq.runtime.errors import CrashingMessageError, dead_letter_reason, is_content_error
from trinity_mq.telemetry.trace import parent_header

log = structlog.get_logger(__name__)

EXPERIENCES = "application/vnd.trinity-mq.experiences"
"""Content type of experience parts and chunks."""
REFERENCE = "application/vnd.trinity-mq.reference"
"""Content type of an ExperienceReference, whose experience body is in the blob store."""
OFFSETS_HEADER = "offsets"
"""Header of a dead-lettered BatchReady: the offsets of its chunks on the ready stream, separated by commas."""

GIVEN_BACK, FAILED, RETURNED, FAILURES = "given-back", "failed-tries", "returned", "failures"
PUT_BACK = "put-back"
"""Headers of a message that an agent returned to the queue: see :class:`DeliveryHistory`."""
MAX_FAILURES = 5
"""Maximum number of failure reasons in the headers of a message."""
MAX_FAILURE = 240
"""Maximum number of characters of a failure reason."""
MAX_DEATHS = 3
"""Number of process deaths with the same message in hand after which the message is set aside unhandled."""
SLOTS, SLOT = 64, 512
"""Maximum number of queues for which the message in hand is noted, and bytes of each note."""


def envelope(
    message: Message,
    *,
    message_id: str | None = None,
    headers: dict[str, HeaderValue] | None = None,
    correlation_id: str | None = None,
    reply_to: str | None = None,
) -> Envelope:
    """Return ``message`` ready to publish. The headers repeat its kind, its schema version and, if it has them, its
    batch, ticket and attempt, except a value that does not fit into a header. While tracing is on, a message of a batch
    also has the header ``traceparent``.
    """
    all_headers: dict[str, HeaderValue] = {"kind": message.kind, "version": message.version_number, **(headers or {})}
    fields = {name: getattr(message, name, None) for name in ("batch", "ticket", "attempt") if name not in all_headers}
    repeated, _ = outside_headers({name: value for name, value in fields.items() if isinstance(value, str | int)})
    all_headers |= repeated
    if isinstance(batch := all_headers.get("batch"), int | str):
        task = getattr(message, "task_id", None)
        all_headers |= parent_header(batch, task if isinstance(task, int) else None)
    own_id = {} if message_id is None else {"message_id": message_id}
    return Envelope(
        body=encode(message),
        kind=message.kind,
        content_type=CONTENT_TYPE,
        headers=all_headers,
        correlation_id=correlation_id,
        reply_to=reply_to,
        **own_id,
    )


def new_mark() -> Envelope:
    """Return a unique mark, by which a reader finds the current end of a stream."""
    nonce = uuid.uuid4().hex
    return envelope(Mark(nonce=nonce), message_id=f"mark-{nonce}")


async def dead_letter(
    bus: Bus, topology: Topology, incoming: Incoming, reason: str, by: str, *, past: DeliveryHistory | None = None
) -> None:
    """Publish a copy of a body to ``dead`` with its reason. The caller acknowledges the original afterwards.

    A body too large to publish is rejected instead: from a queue the broker moves it to ``dead``, on a stream it stays
    where it is, and only our log has the reason. The same holds for a body that was encoded again. ``past`` is the
    history of the message, by default its deliveries before this delivery.
    """
    past = past or DeliveryHistory.of(incoming)
    log.warning(
        "dead_letter",
        queue=incoming.queue,
        reason=reason,
        message_id=incoming.message_id,
        deliveries=past.count,
    )
    if len(incoming.body) > bus.max_message_bytes:
        if isinstance(incoming, Delivery):
            with contextlib.suppress(StaleDelivery):  # stale: the broker redelivers the message, and it is handled then
                await incoming.reject()
        return
    _, left_out = outside_headers(incoming.headers)
    headers: dict[str, HeaderValue] = {
        **past.headers,
        "dead-reason": header_text(reason, 1000) + omitted_headers_text(left_out),
        "dead-queue": incoming.queue,
        "dead-by": by,
        "dead-deliveries": past.count,
        "dead-time": time.time(),
    }
    copy = _copy(incoming, f"dead-{incoming.queue}-{_identity(incoming)}", headers)
    # the original is acknowledged next and must not be lost
    await bus.publish_declared(topology.dead, incoming.routing_key or "unknown", copy)


def _copy(incoming: Incoming, message_id: str, headers: dict[str, HeaderValue]) -> Envelope:
    """Return the message to publish again, with ``headers`` added to its own headers."""
    original_headers, _ = outside_headers(incoming.headers)
    return Envelope(
        body=incoming.body,
        kind=str(original_headers.get("kind") or "unknown"),
        message_id=message_id,
        content_type=incoming.content_type or "application/octet-stream",
        headers={**original_headers, **headers},
        correlation_id=incoming.correlation_id,
        reply_to=incoming.reply_to,
    )


def _identity(incoming: Incoming) -> str:
    """Return an id of this body. Outside senders may leave the message id out."""
    if incoming.message_id:
        return incoming.message_id
    return hashlib.sha256(incoming.body).hexdigest()[:32] if incoming.offset is None else str(incoming.offset)


def check_readable(incoming: Incoming) -> None:
    """Check that the properties of a message could be read.

    Raises:
        DecodeError: The properties could not be read.
    """
    if incoming.unreadable is not None:
        raise DecodeError(incoming.unreadable)


@contextlib.contextmanager
def message_in_hand(bus: Bus, incoming: Incoming) -> Iterator[None]:
    """Note that a message is in hand while the ``with`` block handles it.

    Raises:
        CrashingMessageError: The message was in hand at :data:`MAX_DEATHS` deaths of this agent's process.
    """
    if bus.notes is None:
        yield
        return
    with bus.notes.in_hand(incoming) as deaths:
        if deaths >= MAX_DEATHS:
            raise CrashingMessageError(f"the process died {deaths} times while it handled this message")
        yield


async def handle_or_set_aside(
    bus: Bus,
    topology: Topology,
    delivery: Delivery,
    by: str,
    handle: Callable[[], Awaitable[None]],
    *,
    decide: Callable[[str], Awaitable[None]] | None = None,
    quiet: bool = False,
) -> None:
    """Handle a message. If it cannot be handled because of its content, or was in hand at :data:`MAX_DEATHS` deaths of
    the process, it is dead-lettered and acknowledged. Any other error is raised.

    Args:
        bus: The bus that the delivery came from.
        topology: The run's names.
        delivery: The message.
        by: Id of the agent.
        handle: Handles the message, and acknowledges it.
        decide: Called with the reason before the message is dead-lettered. It publishes the decision that another agent
            waits for.
        quiet: Only log the message, since another of the many receivers of a broadcast dead-letters it.
    """
    try:
        with message_in_hand(bus, delivery):
            await handle()
        return
    except Exception as error:
        if not is_content_error(error):
            raise
        log.warning("message_rejected", queue=delivery.queue, message_id=delivery.message_id, exc_info=error)
        reason = dead_letter_reason(error)
    if decide is not None:
        await decide(reason)
    if not quiet:
        await dead_letter(bus, topology, delivery, reason, by)
    await acknowledge(delivery)


async def decode_or_dead_letter(
    bus: Bus,
    topology: Topology,
    delivery: Delivery,
    by: str,
    *,
    expect: type[Message] | None = None,
    quiet: bool = False,
    at_once: bool = False,
) -> Message | None:
    """Return the control-plane message in ``delivery``; None if it does not decode. Then it was dead-lettered, or only
    logged with ``quiet``, and acknowledged.

    A body of a newer version is held until the heartbeats of all other agents have arrived. If an agent of a newer
    release is among them, this agent ends, and the body is redelivered to an agent that can read it.

    Args:
        bus: A connected bus.
        topology: The run's names.
        delivery: The delivery.
        by: Id of the agent, for the dead letter.
        expect: The only kind allowed in this queue; the body may then leave the kind out.
        at_once: Do not wait for heartbeats, as for heartbeats themselves.
        quiet: Only log a body that does not decode, since another of the many receivers of a broadcast dead-letters it.
    """
    try:
        check_readable(delivery)
        if expect is not None:
            return decode(delivery.body, expect, delivery.content_type)
        return decode_any(delivery.body, delivery.content_type)
    except DecodeError as error:
        if isinstance(error, NewerBodyError) and not at_once and bus.met is not None:
            await bus.met.wait()
        if quiet:
            log.warning("undecodable", queue=delivery.queue, reason=str(error))
        else:
            await dead_letter(bus, topology, delivery, f"does not decode: {error}", by)
        await acknowledge(delivery)
        return None


async def acknowledge_foreign(bus: Bus, delivery: Delivery) -> bool:
    """Acknowledge and count a message of another run of the same name; return whether it was such a message."""
    if not bus.is_foreign(delivery):
        return False
    if not bus.foreign:
        log.warning("messages_of_another_run", queue=delivery.queue, theirs=delivery.run_id, ours=bus.run_id)
    bus.foreign += 1
    await acknowledge(delivery)
    return True


async def acknowledge(delivery: Delivery) -> bool:
    """Acknowledge a delivery; return False for a stale delivery, which the broker redelivers."""
    try:
        await delivery.ack()
    except StaleDelivery:
        return False
    return True


async def requeue(delivery: Delivery) -> None:
    """Requeue a delivery, which counts as returned. A stale delivery is already back in the queue."""
    with contextlib.suppress(StaleDelivery):
        await delivery.requeue()


@dataclass(frozen=True, slots=True)
class DeliveryHistory:
    """The outcomes of the earlier deliveries of a message."""

    given_back: int = 0
    """Number of deliveries that an agent returned to the queue in good order, as at the end of its drain. They say
    nothing about the message."""
    failed: int = 0
    """Number of deliveries whose handling failed in a process that survived and reported the failure."""
    returned: int = 0
    """Number of deliveries that the broker took back: the agent died, lost its connection, or the broker restarted.
    They are not evidence against the message."""
    failures: tuple[str, ...] = ()
    """Failure reasons of the latest tries."""
    put_back: int = 0
    """Number of deliveries, counted in ``given_back`` too, that failed because infrastructure was unavailable, such as
    a sandbox."""

    @classmethod
    def of(cls, incoming: Incoming) -> DeliveryHistory:
        """Return the history of a message's earlier deliveries, from its headers and the broker's delivery count."""

        def number(name: str) -> int:
            return clamped(incoming.headers.get(name))

        failures = incoming.headers.get(FAILURES)
        return cls(
            given_back=number(GIVEN_BACK),
            failed=number(FAILED),
            returned=number(RETURNED) + incoming.deliveries_before,
            failures=tuple(line[:MAX_FAILURE] for line in failures.split("\n")[-MAX_FAILURES:])
            if isinstance(failures, str)
            else (),
            put_back=number(PUT_BACK),
        )

    @property
    def count(self) -> int:
        """Number of earlier deliveries."""
        return self.given_back + self.failed + self.returned

    @property
    def suspect(self) -> int:
        """Number of deliveries that the handling of the message may have ended: all except the deliveries in
        ``given_back``.
        """
        return self.failed + self.returned

    def poisoned(self, limit: int, crashes: int = 0) -> bool:
        """Return whether the message must not be tried again: it had at least ``limit`` suspect deliveries, and there
        is evidence against its handling. Evidence is a reported failure, or a crash: ``crashes`` is the number of
        crashes counted by :class:`CrashLog`.
        """
        return self.suspect >= limit and bool(self.failed or crashes)

    def then(self, failure: str | None) -> DeliveryHistory:
        """Return the outcomes with one more delivery, which ended with ``failure``, or in good order if None."""
        if failure is None:
            return replace(self, given_back=self.given_back + 1)
        line = " ".join(failure.split())[:MAX_FAILURE]
        failures = (*self.failures, f"delivery {self.count + 1}: {line}")[-MAX_FAILURES:]
        return replace(self, failed=self.failed + 1, failures=failures)

    @property
    def headers(self) -> dict[str, HeaderValue]:
        """The headers that record the outcomes."""
        headers: dict[str, HeaderValue] = {
            GIVEN_BACK: self.given_back,
            FAILED: self.failed,
            RETURNED: self.returned,
            PUT_BACK: self.put_back,
        }
        headers[FAILURES] = "\n".join(self.failures)
        return {name: value for name, value in headers.items() if value}


async def return_delivery(bus: Bus, delivery: Delivery, failure: str | None = None) -> None:
    """Publish a delivery again under its message id with headers for its outcome, then acknowledge it.

    If this process dies between the two, both copies are delivered, and the readers of slices and manifests drop the
    second. A delivery that cannot be published is requeued, which counts as returned.

    Args:
        bus: The bus that the delivery came from.
        delivery: The delivery.
        failure: Reason why its handling failed; None: it is returned in good order.
    """
    await _give_back(bus, delivery, DeliveryHistory.of(delivery).then(failure))


async def put_back(bus: Bus, delivery: Delivery) -> None:
    """Return a delivery to its queue in good order, as :func:`return_delivery` does, and count it also in
    ``put_back``: its handling failed because infrastructure was unavailable.
    """
    past = DeliveryHistory.of(delivery)
    await _give_back(bus, delivery, replace(past.then(None), put_back=past.put_back + 1))


async def _give_back(bus: Bus, delivery: Delivery, past: DeliveryHistory) -> None:
    if await republish(bus, delivery, past):
        await acknowledge(delivery)
    else:
        await requeue(delivery)


async def republish(bus: Bus, delivery: Delivery, past: DeliveryHistory) -> bool:
    """Publish a copy of a delivery under its message id to its original exchange and routing key, with headers for its
    past outcomes; return whether it reached a queue. The caller acknowledges or requeues the delivery.
    """
    copy = _copy(delivery, _identity(delivery), past.headers)
    try:
        return await bus.publish(delivery.exchange, delivery.routing_key, copy)
    except (BusError, ValueError) as error:  # ValueError: it came through an exchange that does not belong to the run
        log.warning("requeued", queue=delivery.queue, message_id=delivery.message_id, reason=str(error))
        return False


class CrashLog:
    """Counts the earlier processes of this agent that died while they handled a slice, a ticket or another message.
    Unlike the broker's count of deliveries, this is evidence of a crash. The counts are kept in a file that is not
    synced to disk, since a failing machine is not a crash of the agent.

    A message that is only briefly in hand is noted in a second, memory-mapped file: a note costs a copy of a few bytes,
    and the kernel keeps it when the process is killed.

    Args:
        path: The file; its folder must exist. None: nothing is noted or remembered.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._at_work: Counter[str] = Counter()
        self._crashes: Counter[str] = Counter()
        try:
            crashes = json.loads(path.read_bytes()) if path is not None else {}
            self._crashes.update({str(key): int(n) for key, n in dict(crashes).items()})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            log.warning("crash_notes_unreadable", path=str(path), reason=str(error))
        self._slots: dict[str, int] = {}
        """Slot number of each queue."""
        self._in_hand_slots = self._map_slots()

    def crashes(self, key: str) -> int:
        """Return the number of processes that died while they worked on ``key``: a slice, a ticket or a message."""
        return self._crashes[key]

    @contextlib.contextmanager
    def at_work(self, key: str) -> Iterator[None]:
        """Note that this process works on ``key`` until the block ends. The note remains only if the process dies."""
        self._at_work[key] += 1
        self._write()
        try:
            yield
        finally:
            self._at_work -= Counter([key])
            self._write()

    @contextlib.contextmanager
    def in_hand(self, incoming: Incoming) -> Iterator[int]:
        """Note that a message is in hand until the ``with`` block ends. The note remains only if the process dies. The
        block gets the number of processes that died with the message in hand. At the end of the block this number is
        forgotten, unless it has reached :data:`MAX_DEATHS`. The block must not wait for a broker or a peer: a process
        killed while waiting did not die of the message.
        """
        key = _message_key(incoming)
        start = self._slots.setdefault(incoming.queue, len(self._slots)) * SLOT
        encoded = key.encode()[: SLOT - 2]
        is_noted = start + SLOT <= len(self._in_hand_slots)
        if is_noted:
            self._in_hand_slots[start : start + 2 + len(encoded)] = len(encoded).to_bytes(2, "big") + encoded
        try:
            yield self._crashes[key] if self._crashes else 0
        finally:
            if is_noted:
                self._in_hand_slots[start : start + 2] = bytes(2)
            if self._crashes and self._crashes[key] < MAX_DEATHS:  # a stream may be read from its beginning again
                self.forget(key)

    def _map_slots(self) -> mmap.mmap:
        """Return empty slots, after counting the messages that the last process had in hand."""
        size, path = SLOTS * SLOT, self._path and self._path.with_suffix(".hand")
        if path is None:
            return mmap.mmap(-1, size)
        try:
            if path.exists() and (messages := list(_names_in_slots(path.read_bytes()))):
                log.warning("messages_in_hand_at_crash", messages=messages)
                self._crashes.update(messages)
                self._write()
            path.write_bytes(bytes(size))
            with path.open("r+b") as file:
                return mmap.mmap(file.fileno(), size)
        except (OSError, ValueError) as error:
            log.warning("crash_notes_not_written", path=str(path), reason=str(error))
            return mmap.mmap(-1, size)

    def forget(self, key: str) -> None:
        """Forget the crashes of ``key`` after its work is done."""
        if self._crashes.pop(key, 0):
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            if not (crashes := self._crashes + self._at_work):
                self._path.unlink(missing_ok=True)
                return
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text(json.dumps(crashes), encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            log.warning("crash_notes_not_written", path=str(self._path), reason=str(error))


def _names_in_slots(slots: bytes) -> Iterator[str]:
    """Yield the names of messages in hand from the slots."""
    for start in range(0, len(slots) - SLOT + 1, SLOT):
        size = int.from_bytes(slots[start : start + 2], "big")
        if 0 < size <= SLOT - 2:
            yield slots[start + 2 : start + 2 + size].decode("utf-8", "replace")


def _message_key(incoming: Incoming) -> str:
    """Return a name of a message that is the same at each delivery."""
    if incoming.offset is not None:
        return f"{incoming.queue}@{incoming.offset}"
    name = incoming.message_id.encode("utf-8", "backslashreplace") if incoming.message_id else incoming.body
    return f"{incoming.queue} {hashlib.sha256(name).hexdigest()}"
