"""``trinity-mq dead``: lists dead letters, and publishes dead-lettered batches again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from trinity_mq.bus import Bus, Delivery, Envelope, HeaderValue, Incoming, QueueGone, StreamCut, Topology
from trinity_mq.bus.streams import read_at
from trinity_mq.bus.topology import batch_key
from trinity_mq.cli.arguments import add_actions, add_broker, add_target
from trinity_mq.cli.broker.connection import Target, find_target, reached
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.cli.output import one_line
from trinity_mq.messages import BatchClosed, BatchReady, DecodeError, decode
from trinity_mq.runtime.deliveries import EXPERIENCES, OFFSETS_HEADER, envelope

QUIET_SECONDS = 2.0
"""Seconds without another letter after which the list ends, if the queue holds fewer letters than it reported."""
BACK_LOOKS, BACK_LOOK = 40, 0.05
"""Maximum checks whether the read letters were returned to their queue, and seconds between two checks."""
COLUMNS = ("queue", "kind", "reason", "operator", "batch", "bytes", "message_id")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``trinity-mq dead list`` and ``trinity-mq dead replay``."""
    add = add_actions(parser)
    listing = add("list", "list dead letters with their reasons, and leave them where they are", list_dead)
    add_target(listing)
    add_broker(listing)
    listing.add_argument("--limit", type=int, default=100, help="largest number listed (default: 100)")
    again = add(
        "replay",
        "publish batches again that operators could not process or trainers did not survive, once that is repaired",
        replay,
    )
    add_target(again)
    add_broker(again)
    again.add_argument(
        "--batch", metavar="N", action="append", default=[], help="only this batch; may be given several times"
    )


def list_dead(arguments: argparse.Namespace) -> int:
    """Print dead letters, oldest first, without removing them: as paragraphs on a terminal, else as tab-separated
    lines.
    """
    target = find_target(arguments)
    letters, total = run_to_the_end(_letters(target, arguments.limit))
    if not total:
        print(f"run {target.run!r} has no dead letters")
        return 0
    rows = [row(letter) for letter in letters]
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = [line for number, cells in enumerate(rows, 1) for line in paragraph(number, cells, width)]
    else:
        lines = ["\t".join(" ".join(cell.split()) for cell in cells) for cells in (COLUMNS, *rows)]
    for line in lines:
        print(line)
    if len(letters) < total:
        print(f"{len(letters)} of {total} shown (--limit)", file=sys.stderr)
    return 0


def paragraph(number: int, cells: Sequence[str], width: int) -> list[str]:
    """Return one letter for a terminal: kind and origin, reason, and message id, in lines of at most ``width``
    characters.
    """
    letter = dict(zip(COLUMNS, cells, strict=True))
    parts = [f"{name} {letter[name]}" for name in ("batch", "operator") if letter[name] != "-"]
    head = ", ".join([f"{number}. {letter['kind']} from {letter['queue']}", *parts, f"{letter['bytes']} bytes"])
    lines = textwrap.wrap(head, width, subsequent_indent="   ")
    for text in (letter["reason"], f"id {letter['message_id']}"):
        lines += textwrap.wrap(text, width, initial_indent="   ", subsequent_indent="   ")
    return lines


def row(letter: Incoming) -> tuple[str, ...]:
    """Return the table row of one letter, from the headers of trinity-mq, else from the broker's headers."""
    headers = letter.headers
    queue, reason = headers.get("dead-queue"), headers.get("dead-reason")
    if reason is None:
        queue, reason = headers.get("x-first-death-queue"), headers.get("x-first-death-reason")
    operator, batch = headers.get("operator"), headers.get("batch")
    texts = (queue, letter.kind, reason, operator, batch, len(letter.body), letter.message_id)
    return tuple("-" if text is None else one_line(" ".join(str(text).split())) for text in texts)


def replay(arguments: argparse.Namespace) -> int:
    """Publish dead batches again. Return 1 if a batch could not be published."""
    target = find_target(arguments)
    republished, problems, remaining = run_to_the_end(_replay(target, set(arguments.batch)))
    for line in (*republished, *problems):
        print(line)
    if republished:
        print(
            "what the operators make of them, and what a trainer did not survive, goes to the ready stream, where "
            "`trinity-mq inspect` shows it. A trainer "
            "that has passed a batch by now takes what is at most synchronizer.max_staleness train steps old along "
            "with its next batch (sample/repaired_batches), and counts the rest (sample/dropped_stale_groups)"
        )
    else:
        rest = f"; {remaining} other letters stay where they are, see `trinity-mq dead list`" if remaining else ""
        print(f"run {target.run!r} has no dead batch to run again{rest}")
    return 1 if problems else 0


async def _replay(target: Target, batches: set[str]) -> tuple[list[str], list[str], int]:
    async with reached(target, "dead") as (bus, topology):
        return await republish_batches(bus, topology, batches)


async def republish_batches(bus: Bus, topology: Topology, batches: set[str]) -> tuple[list[str], list[str], int]:
    """Publish dead-lettered batches again, all of them or only ``batches``: manifests to the operators, processed
    batches to the trainer.

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
        handler = _REPUBLISH.get(letter.kind or "")
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
    return f"batch {manifest.batch} is with the operators again (ticket {manifest.ticket})"


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
    return f"batch {ready.batch} is with the trainer again (ticket {ready.ticket})"


_REPUBLISH: dict[str, tuple[type[BatchClosed] | type[BatchReady], Callable[..., Awaitable[str]]]] = {
    BatchClosed.kind: (BatchClosed, _to_operators),
    BatchReady.kind: (BatchReady, _to_trainer),
}
"""Message class and republish function by kind of the dead letter."""


async def _publish(bus: Bus, topology: Topology, exchange: str, key: str, message: Envelope) -> None:
    if not await bus.publish(topology.exchange(exchange), key, message):
        raise CommandError(f"the queue of {topology.exchange(exchange)} does not exist: start the run, and try again")


async def _letters(target: Target, limit: int) -> tuple[Sequence[Incoming], int]:
    async with reached(target, "dead") as (bus, topology):
        return await letters(bus, topology, limit)


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
    """Yield ``count`` letters, oldest first. Letters that are not acknowledged are returned to the queue at the end."""
    if not count:
        return
    async with await bus.consume(topology.dead, prefetch=count) as subscription:
        with contextlib.suppress(TimeoutError):
            for _ in range(count):
                async with asyncio.timeout(QUIET_SECONDS):
                    letter = await anext(subscription)
                yield letter
