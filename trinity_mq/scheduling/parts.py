"""What runners and operators send of experiences: bodies that fit into a message, under the names readers go by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trinity_mq.bus import Delivery, Envelope, MessageTooLarge
from trinity_mq.bus.base import HeaderValue
from trinity_mq.experience import DecodeError, Experience
from trinity_mq.messages import BatchClosed, Outcome, TaskResult, TaskSlice, Version
from trinity_mq.runtime.mail import EXPERIENCES
from trinity_mq.scheduling.status import SliceOutcome

PartKey = tuple[str, int]
"""``(attempt, part)``."""

MESSAGE_LIMIT = 2000
"""Characters of a failure's message that travel: a stream of results is no place for a workflow's whole output."""


def split_to_size(experiences: Sequence[Experience], max_bytes: int) -> list[bytes]:
    """Return bodies of at most ``max_bytes`` each that hold the experiences in order.

    Raises:
        EncodeError: An experience holds what cannot travel.
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
            "raise that limit (the broker itself allows 16 MiB) or make responses shorter"
        )
    half = len(experiences) // 2
    return split_to_size(experiences[:half], max_bytes) + split_to_size(experiences[half:], max_bytes)


def part_mail(
    piece: TaskSlice, attempt: str, part: int, parts: int, body: bytes, oldest: Version | None = None
) -> Envelope:
    """Return one experience part of an attempt at a slice; ``oldest`` are the oldest weights in it."""
    headers: dict[str, HeaderValue] = {
        "version": 1,
        "batch": piece.batch,
        "ticket": piece.ticket,
        "attempt": attempt,
        "part": part,
        "parts": parts,
    }
    if oldest is not None:
        headers["policy_version"] = f"{oldest[0]}.{oldest[1]}"
    return Envelope(
        body=body,
        kind="experience_part",
        message_id=f"{attempt}-{part}",
        content_type=EXPERIENCES,
        headers=headers,
    )


def chunk_mail(manifest: BatchClosed, op: str, n: int, body: bytes) -> Envelope:
    """Return chunk ``n`` of the processing ``op`` of a batch."""
    headers: dict[str, HeaderValue] = {
        "version": 1,
        "batch": manifest.batch,
        "ticket": manifest.ticket,
        "op": op,
        "n": n,
    }
    return Envelope(
        body=body,
        kind="experience_chunk",
        message_id=f"{manifest.ticket}-{op}-{n}",
        content_type=EXPERIENCES,
        headers=headers,
    )


def wanted_mails(manifest: BatchClosed, bodies: dict[PartKey, bytes]) -> Iterable[tuple[str, Envelope]]:
    """Yield ``(reply_to, part)`` for the submitters who asked for the experiences of their task."""
    for wanted in manifest.wanted:
        for accepted in manifest.accepted:
            for part in range(accepted.parts if accepted.task_id == wanted.task_id else 0):
                headers: dict[str, HeaderValue] = {
                    "ticket": manifest.ticket,
                    "attempt": accepted.attempt,
                    "part": part,
                    "parts": accepted.parts,
                }
                yield (
                    wanted.reply_to,
                    Envelope(
                        body=bodies[accepted.attempt, part],
                        kind="experience_part",
                        message_id=f"wanted-{accepted.attempt}-{part}",
                        content_type=EXPERIENCES,
                        headers=headers,
                        correlation_id=wanted.correlation_id,
                    ),
                )


def decode_parts(parts: Iterable[Delivery]) -> tuple[list[Experience], list[tuple[Delivery, str]]]:
    """Return the experiences in ``parts``, in order, and the parts that do not decode, each with its reason."""
    good: list[Experience] = []
    bad: list[tuple[Delivery, str]] = []
    for part in parts:
        try:
            good += Experience.deserialize_many(part.body)
        except DecodeError as error:
            bad.append((part, f"does not decode: {error}"))
    return good, bad


def end_of(piece: TaskSlice, outcome: SliceOutcome) -> Outcome:
    """Return how a slice ended whose workflow had its turn."""
    if len(outcome.runs) == piece.repeat_times:
        return "finished"
    return "partial" if outcome.runs else "failed"


def slice_result(
    piece: TaskSlice,
    attempt: str,
    runner: str,
    end: Outcome,
    *,
    parts: int = 0,
    outcome: SliceOutcome | None = None,
    message: str | None = None,
    seconds: float = 0.0,
) -> TaskResult:
    """Return what the explorer is told of an attempt; ``outcome`` is what the workflow left, if it had its turn.

    Raises:
        ValidationError: The outcome's metrics are no numbers.
    """
    done = outcome or SliceOutcome.failure(message or "")
    text = message if outcome is None else outcome.message
    return TaskResult(
        batch=piece.batch,
        ticket=piece.ticket,
        task_id=piece.task_id,
        run_base=piece.run_base,
        repeat_times=piece.repeat_times,
        attempt=attempt,
        outcome=end,
        runner=runner,
        runs=done.runs,
        parts=parts,
        metrics=done.metrics,
        message=text and text[:MESSAGE_LIMIT].encode(errors="replace").decode(),
        seconds=seconds,
        version_min=done.version_min,
        version_max=done.version_max,
    )
