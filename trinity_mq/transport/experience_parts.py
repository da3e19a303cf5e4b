"""Messages of experiences: parts from runners and chunks from operators, split to the maximum message size.

An experience part belongs to one attempt, named in the headers ``attempt``, ``part`` and ``parts``. A *shared* part
holds all experiences of several attempts at slices of one ticket, one attempt after the other; its header ``attempts``
lists them: ``<attempt>:<experiences>,<attempt>:<experiences>,...``. Each entry counts as part 0 of 1 of its attempt.
The manifest accepts or drops each entry like any other part.

Processes that do not open bodies must not import torch. Therefore each function that opens bodies imports the
experience package itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trinity_mq.bus import Envelope, Incoming, MessageTooLarge
from trinity_mq.bus.properties import HeaderValue
from trinity_mq.messages import BatchClosed, DecodeError, TaskSlice, Version, encode
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE
from trinity_mq.telemetry.trace import parent_header
from trinity_mq.transport.batch_blobs import Content
from trinity_mq.transport.blobs import BlobStore, resolve_body

if TYPE_CHECKING:
    from trinity_mq.experience import Experience, ExperienceBatch

PartKey = tuple[str, int]
"""``(attempt, part)``: id of an attempt, and number of one of its parts."""

MAX_COUNT_DIGITS = 6
"""Maximum digits of an experience count in the ``attempts`` header."""


@dataclass(frozen=True)
class PartMember:
    """Contribution of one attempt to a shared part."""

    task_slice: TaskSlice
    attempt: str
    experiences: Sequence[Experience]
    size: int
    """Upper bound of the size of its encoded experiences in bytes."""
    oldest: Version | None
    """The oldest weight version in the contribution."""


@dataclass(frozen=True, slots=True)
class AttemptRows:
    """Rows of a part that hold the experiences of one attempt."""

    key: PartKey
    rows: slice | None = None
    """Rows of this attempt; None: all rows."""
    total: int = 0
    """Number of experiences of all attempts in the part, if ``rows`` is set."""

    def of(self, batch: ExperienceBatch) -> ExperienceBatch:
        """Return the experiences of this attempt from the part's experiences ``batch``.

        Raises:
            DecodeError: The number of experiences in the part differs from its header.
        """
        if self.rows is None:
            return batch
        self.check(len(batch))
        return batch[self.rows]

    def check(self, experiences: int) -> None:
        """Raise DecodeError if the number of ``experiences`` differs from the part's header."""
        if self.rows is not None and self.total != experiences:
            raise DecodeError(f"header attempts lists {self.total} experiences, the body holds {experiences}")


def attempt_rows_of(incoming: Incoming) -> list[AttemptRows]:
    """Return the attempts whose experiences a part holds, with their rows.

    Raises:
        DecodeError: The headers are missing or malformed.
    """
    attempt, part, attempts = (incoming.headers.get(name) for name in ("attempt", "part", "attempts"))
    if isinstance(attempt, str) and isinstance(part, int):
        return [AttemptRows((attempt, part))]
    if not isinstance(attempts, str):
        raise DecodeError("an experience part needs the headers attempt and part, or attempts where several share it")
    counts: dict[str, int] = {}
    for entry in attempts.split(","):
        name, _, count = entry.rpartition(":")
        if not name or name in counts or not count.isascii() or not count.isdigit() or len(count) > MAX_COUNT_DIGITS:
            raise DecodeError(f"header attempts has {entry[:80]!r}, wanted <attempt>:<experiences>, each attempt once")
        counts[name] = int(count)
    ends = list(itertools.accumulate(counts.values()))
    return [
        AttemptRows((name, 0), slice(end - count, end), ends[-1])
        for (name, count), end in zip(counts.items(), ends, strict=True)
    ]


def split_to_size(
    experiences: Sequence[Experience],
    max_bytes: int,
    *,
    compression: Literal["none", "zstd"] = "none",
    store: BlobStore | None = None,
) -> list[bytes]:
    """Return bodies that hold the experiences in order, each of at most ``max_bytes``. With a ``store``, the body of a
    single experience may be larger, for sending by reference.

    Raises:
        EncodeError: An experience holds a value that cannot be encoded.
        MessageTooLarge: A single experience is over the limit.
    """
    from trinity_mq.experience import ExperienceBatch

    if not experiences:
        return []
    batch = ExperienceBatch.of(experiences)
    body = batch.encode(compression)
    if len(body) <= max_bytes:
        return [body]
    if len(batch) > 1:
        half = len(batch) // 2
        halves = (batch[:half], batch[half:])
        return [
            part
            for half_batch in halves
            for part in split_to_size(half_batch, max_bytes, compression=compression, store=store)
        ]
    size = f"experience {batch[0].eid} takes {len(body)} bytes"
    if store is None:
        raise MessageTooLarge(
            f"{size}, over broker.max_message_bytes {max_bytes}; set broker.blob_store, so that it travels by "
            "reference, raise that limit (the broker itself allows 16 MiB) or make responses shorter"
        )
    if len(body) > store.max_bytes:
        raise MessageTooLarge(f"{size}, over broker.max_batch_bytes {store.max_bytes}: no reader would accept it")
    return [body]


def part_message(
    task_slice: TaskSlice, attempt: str, part: int, parts: int, content: Content, oldest: Version | None = None
) -> Envelope:
    """Return one experience part of an attempt at a slice; ``oldest`` is the oldest weight version in it."""
    headers = _part_headers(task_slice, oldest, attempt=attempt, part=part, parts=parts)
    return _message("experience_part", f"{attempt}-{part}", content, headers)


def shared_part_message(members: Sequence[PartMember], body: bytes) -> Envelope:
    """Return the part for ``members`` of one ticket; ``body`` holds their experiences in this order. A single member
    gets an ordinary part.
    """
    first = members[0]
    if len(members) == 1:
        return part_message(first.task_slice, first.attempt, 0, 1, body, first.oldest)
    oldest = min((member.oldest for member in members if member.oldest is not None), default=None)
    attempts = ",".join(f"{member.attempt}:{len(member.experiences)}" for member in members)
    headers = _part_headers(first.task_slice, oldest, attempts=attempts)
    return _message("experience_part", f"{first.attempt}-0+{len(members) - 1}", body, headers)


def _part_headers(task_slice: TaskSlice, oldest: Version | None, **more: HeaderValue) -> dict[str, HeaderValue]:
    headers = {"version": 1, "batch": task_slice.batch, "ticket": task_slice.ticket, **more}
    return headers if oldest is None else {**headers, "policy_version": f"{oldest[0]}.{oldest[1]}"}


def chunk_message(manifest: BatchClosed, op: str, n: int, content: Content) -> Envelope:
    """Return chunk ``n`` of the processing ``op`` of a batch."""
    headers: dict[str, HeaderValue] = {"version": 1, "batch": manifest.batch, "ticket": manifest.ticket}
    headers |= {"op": op, "n": n}
    return _message("experience_chunk", f"{manifest.ticket}-{op}-{n}", content, headers)


def _message(kind: str, message_id: str, content: Content, headers: dict[str, HeaderValue]) -> Envelope:
    if isinstance(batch := headers.get("batch"), int | str):
        headers |= parent_header(batch)
    if isinstance(content, bytes):
        return Envelope(body=content, kind=kind, message_id=message_id, content_type=EXPERIENCES, headers=headers)
    body = encode(content)
    return Envelope(body=body, kind=kind, message_id=message_id, content_type=REFERENCE, headers=headers)


@dataclass(frozen=True)
class ReceivedPart:
    """Received experiences of one attempt: a message, or some rows of a message."""

    incoming: Incoming
    share: AttemptRows


def requested_parts(manifest: BatchClosed, parts: Mapping[PartKey, ReceivedPart]) -> Iterable[tuple[str, Envelope]]:
    """Yield ``(reply_to, part)`` for submitters that requested the experiences of their task.

    A reference is sent unresolved. A submitter without access to the store gets only the reference. A submitter with
    access has an hour to fetch the blob. A shared part that does not decode is skipped.
    """
    for request in manifest.wanted:
        for accepted in manifest.accepted:
            for part in range(accepted.parts if accepted.task_id == request.task_id else 0):
                headers: dict[str, HeaderValue] = {
                    "ticket": manifest.ticket,
                    "attempt": accepted.attempt,
                    "part": part,
                    "parts": accepted.parts,
                }
                stored_part = parts[accepted.attempt, part]
                body = _body_of_attempt(stored_part)
                if body is None:
                    continue  # the part is dead-lettered when the batch is processed
                yield (
                    request.reply_to,
                    Envelope(
                        body=body,
                        kind="experience_part",
                        message_id=f"wanted-{accepted.attempt}-{part}",
                        content_type=stored_part.incoming.content_type or EXPERIENCES,
                        headers=headers,
                        correlation_id=request.correlation_id,
                    ),
                )


def _body_of_attempt(part: ReceivedPart) -> bytes | None:
    """Return a body with the experiences of this attempt only; None if the part does not decode."""
    from trinity_mq.experience import EncodeError, ExperienceBatch

    body = part.incoming.body
    if part.share.rows is None:
        return body
    try:
        return part.share.of(ExperienceBatch.decode(body)).encode()
    except (DecodeError, EncodeError):
        return None


def decode_parts(
    parts: Iterable[ReceivedPart], store: BlobStore | None
) -> tuple[ExperienceBatch, list[tuple[Incoming, str]]]:
    """Return the experiences in ``parts``, in order, and the messages that do not decode, each with its reason.

    Raises:
        StoreUnavailable: A part is a reference, and its store does not answer.
    """
    from trinity_mq.experience import ExperienceBatch

    bodies: dict[int, ExperienceBatch] = {}
    first: dict[int, int] = {}
    """Index of each body's first experience in the concatenation of all bodies."""
    rows: list[range] = []
    total = 0
    bad: dict[int, tuple[Incoming, str]] = {}
    for part in parts:
        incoming = part.incoming
        try:
            if id(incoming) not in bodies and id(incoming) not in bad:
                # decode everything now: a malformed part from another program can still be reported as bad here
                whole = ExperienceBatch.decode(resolve_body(store, incoming.body, incoming.content_type)).settle()
                part.share.check(len(whole))
                bodies[id(incoming)], first[id(incoming)] = whole, total
                total += len(whole)
        except DecodeError as error:
            bad[id(incoming)] = incoming, f"does not decode: {error}"
        if id(incoming) in bodies:
            begin, part_rows = first[id(incoming)], range(len(bodies[id(incoming)]))
            part_rows = part_rows if part.share.rows is None else part_rows[part.share.rows]
            rows.append(range(begin + part_rows.start, begin + part_rows.stop))
    selected = list(itertools.chain.from_iterable(rows))
    return ExperienceBatch.concat(bodies.values()).select(selected), list(bad.values())
