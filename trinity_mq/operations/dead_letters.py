"""Dead letters of a run: list them, and republish the batches among them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from trinity_mq.bus import Bus, Delivery, Envelope, HeaderValue, Incoming, QueueGone, StreamCut, Topology
from trinity_mq.bus.streams import read_at
from trinity_mq.bus.topology import batch_key
from trinity_mq.errors import CommandError
from trinity_mq.messages import BatchClosed, BatchReady, DecodeError, decode
from trinity_mq.runtime.deliveries import EXPERIENCES, OFFSETS_HEADER, envelope
from trinity_mq.terminal import escape_to_one_line

QUIET_SECONDS = 2.0
"""Seconds without another letter after which the list ends, if the queue holds fewer letters than it reported. Also the
time limit for a chunk that is read again from the ready stream."""
BACK_LOOKS, BACK_LOOK = 40, 0.05
"""Maximum checks whether the read letters were returned to their queue, and seconds between two checks."""
COLUMNS = ("queue", "kind", "reason", "operator", "batch", "bytes", "message_id")


def row(letter: Incoming) -> tuple[str, ...]:
    """Return the table row of one letter, as :data:`COLUMNS`. Queue and reason come from the headers of trinity-mq,
    else from the broker's headers. ``-``: unknown.
    """
    headers = letter.headers
    queue, reason = headers.get("dead-queue"), headers.get("dead-reason")
    if reason is None:
        queue, reason = headers.get("x-first-death-queue"), headers.get("x-first-death-reason")
    operator, batch = headers.get("operator"), headers.get("batch")
    texts = (queue, letter.kind, reason, operator, batch, len(letter.body), letter.message_id)
    return tuple("-" if text is None else escape_to_one_line(" ".join(str(text).split())) for text in texts)


async def republish_batches(bus: Bus, topology: Topology, batches: set[str]) -> tuple[list[str], list[str], int]:
    """Publish dead-lettered batches again, all of them if ``batches`` is empty, else only ``batches``: manifests to the
    operators, processed batches to the trainer. Their letters leave the queue. Of several letters with the same ticket
    only the first is published.

    Returns:
        A line for each published batch, a line for each batch that could not be published, and the number of remaining
        letters.

    Raises:
        CommandError: The target queue of a batch does not exist.
    """
    republished: list[str] = []
    problems: list[str] = []
    tickets: set[str] = set()
    total = remaining = await bus.depth(topology.dead.name) or 0
    async for letter in _consume(bus, topology, total):
        handler = REPUBLISH.get(letter.kind or "")
        if handler is None or (batches and str(letter.headers.get("batch")) not in batches):
            continue
        kind, republish = handler
        try:
            batch = decode(letter.body, kind, letter.content_type)
            if batch.ticket not in tickets:
                republished.append(await republish(bus, topology, batch, letter))
                tickets.add(batch.ticket)
        except DecodeError as error:
            problems.append(f"letter {letter.message_id}: does not decode: {error}")
            continue
        except _ExperiencesLost as error:
            problems.append(f"batch {batch.batch}: its experiences are gone (ticket {batch.ticket}): {error}")
            continue
        await letter.ack()
        remaining -= 1
    return republished, problems, remaining


class _ExperiencesLost(Exception):
    """The experiences of a batch no longer exist."""


async def _to_operators(bus: Bus, topology: Topology, manifest: BatchClosed, letter: Incoming) -> str:
    if await bus.depth(topology.batch_queue(manifest.batch, manifest.ticket).name) is None:
        raise _ExperiencesLost("another operator has processed it, or the 7 days for which they are kept are over")
    again = envelope(manifest, message_id=f"closed-{manifest.ticket}-{uuid.uuid4().hex}")
    await _publish(bus, topology, "batches", "closed", again)
    return f"batch {manifest.batch} was returned to the operators (ticket {manifest.ticket})"


async def _to_trainer(bus: Bus, topology: Topology, ready: BatchReady, letter: Incoming) -> str:
    """Publish the chunks of a processed batch again, read from their offsets on the ready stream. The new processing id
    makes the trainer count its starts on the batch from zero.
    """
    op, key = uuid.uuid4().hex, batch_key(ready.batch)
    listed = str(letter.headers.get(OFFSETS_HEADER) or "")
    offsets = [int(word) for word in listed.split(",") if word.isdecimal()]
    if len(offsets) != ready.chunks:
        raise DecodeError(f"header {OFFSETS_HEADER} is {listed!r}, wanted {ready.chunks} offsets of the ready stream")
    try:
        chunks = await read_at(bus, topology.ready, offsets, QUIET_SECONDS)
    except (StreamCut, QueueGone) as error:
        raise _ExperiencesLost(f"the ready stream does not keep them any more: {error}") from error
    run_header = {"run_id": letter.run_id} if letter.run_id else {}
    for n, offset in enumerate(offsets):
        chunk = chunks.get(offset)
        if chunk is None or (chunk.headers.get("ticket"), chunk.headers.get("op")) != (ready.ticket, ready.op):
            raise _ExperiencesLost(f"the ready stream holds something else at offset {offset}")
        headers: dict[str, HeaderValue] = {"batch": ready.batch, "ticket": ready.ticket, "op": op, "n": n, **run_header}
        content_type = chunk.content_type or EXPERIENCES
        message = Envelope(
            body=chunk.body,
            kind="experience_chunk",
            message_id=f"{ready.ticket}-{op}-{n}",
            content_type=content_type,
            headers={"version": 1, **headers},
        )
        await _publish(bus, topology, "ready", key, message)
    again = envelope(
        ready.model_copy(update={"op": op}), message_id=f"ready-{ready.ticket}-{op}", headers={**run_header}
    )
    await _publish(bus, topology, "ready", key, again)
    return f"batch {ready.batch} was returned to the trainer (ticket {ready.ticket})"


REPUBLISH: dict[str, tuple[type[BatchClosed] | type[BatchReady], Callable[..., Awaitable[str]]]] = {
    BatchClosed.kind: (BatchClosed, _to_operators),
    BatchReady.kind: (BatchReady, _to_trainer),
}
"""Message class and republish function by kind of the dead letter."""


async def _publish(bus: Bus, topology: Topology, exchange: str, key: str, message: Envelope) -> None:
    if not await bus.publish(topology.exchange(exchange), key, message):
        raise CommandError(f"the queue of {topology.exchange(exchange)} does not exist: start the run, and try again")


async def letters(bus: Bus, topology: Topology, most: int) -> tuple[list[Incoming], int]:
    """Return the oldest dead letters, at most ``most``, and the number of all. They stay in the queue: the broker
    returns them before this call ends, or a moment later if that takes long.
    """
    total = await bus.depth(topology.dead.name) or 0
    read_letters: list[Incoming] = [letter async for letter in _consume(bus, topology, min(total, most))]
    for _ in range(BACK_LOOKS):  # the broker does not announce that it has returned the letters
        if (await bus.depth(topology.dead.name) or 0) >= total:
            break
        await asyncio.sleep(BACK_LOOK)
    return read_letters, total


async def _consume(bus: Bus, topology: Topology, count: int) -> AsyncIterator[Delivery]:
    """Yield ``count`` letters, oldest first. Letters that are not acknowledged are returned to the queue at the end;
    after 65535 of them (the largest prefetch) the broker sends no further letter.
    """
    if not count:
        return
    async with await bus.consume(topology.dead, prefetch=count) as subscription:
        with contextlib.suppress(TimeoutError):
            for _ in range(count):
                async with asyncio.timeout(QUIET_SECONDS):
                    letter = await anext(subscription)
                yield letter
