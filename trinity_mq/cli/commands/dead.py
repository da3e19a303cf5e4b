"""``trinity-mq dead``: lists dead letters, and publishes batches among them again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence

from trinity_mq.bus import Bus, Delivery, Incoming, Topology
from trinity_mq.cli.arguments import add_actions, add_broker, add_target
from trinity_mq.cli.broker.connection import Target, find_target, reached
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.messages import BatchClosed, DecodeError, decode
from trinity_mq.runtime.deliveries import envelope

QUIET_SECONDS = 2.0
"""Seconds without another letter after which the list ends, if the queue holds fewer than it reported."""
COLUMNS = ("queue", "kind", "reason", "operator", "batch", "bytes", "message_id")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``trinity-mq dead list`` and ``trinity-mq dead replay``."""
    add = add_actions(parser)
    listing = add("list", "list dead letters with their reasons, and leave them where they are", list_dead)
    add_target(listing)
    add_broker(listing)
    listing.add_argument("--limit", type=int, default=100, help="largest number listed (default: 100)")
    again = add(
        "replay", "publish batches that operators could not process again, after the operators were repaired", replay
    )
    add_target(again)
    add_broker(again)
    again.add_argument(
        "--batch", metavar="N", action="append", default=[], help="only this batch; may be given several times"
    )


def list_dead(arguments: argparse.Namespace) -> int:
    """Print a table of dead letters, oldest first; they stay where they are."""
    target = find_target(arguments)
    letters, total = run_to_the_end(_letters(target, arguments.limit))
    if not total:
        print(f"run {target.run!r} has no dead letters")
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, caption=f"{len(letters)} of {total} shown" if len(letters) < total else None)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for letter in letters:
        table.add_row(*row(letter))
    Console().print(table)
    return 0


def row(letter: Incoming) -> tuple[str, ...]:
    """Return the table row of one letter, from our own headers, else from the broker's."""
    headers = letter.headers
    queue, reason = headers.get("dead-queue"), headers.get("dead-reason")
    if reason is None:
        queue, reason = headers.get("x-first-death-queue"), headers.get("x-first-death-reason")
    operator, batch = headers.get("operator"), headers.get("batch")
    texts = (queue, letter.kind, reason, operator, batch, len(letter.body), letter.message_id)
    return tuple("-" if text is None else str(text) for text in texts)


def replay(arguments: argparse.Namespace) -> int:
    """Publish batches that operators could not process again; return 1 if one could not be published."""
    target = find_target(arguments)
    republished, problems, kept = run_to_the_end(_replay(target, set(arguments.batch)))
    for line in (*republished, *problems):
        print(line)
    if republished:
        print(
            "what the operators make of them goes to the ready stream, where `trinity-mq inspect` shows it. A trainer "
            "that has passed a batch by now takes what is at most synchronizer.max_staleness train steps old along "
            "with its next batch (sample/repaired_batches), and counts the rest (sample/dropped_stale_groups)"
        )
    else:
        rest = f"; {kept} other letters stay where they are, see `trinity-mq dead list`" if kept else ""
        print(f"run {target.run!r} has no dead batch to run again{rest}")
    return 1 if problems else 0


async def _replay(target: Target, batches: set[str]) -> tuple[list[str], list[str], int]:
    async with reached(target, "dead") as (bus, topology):
        return await republish_batches(bus, topology, batches)


async def republish_batches(bus: Bus, topology: Topology, batches: set[str]) -> tuple[list[str], list[str], int]:
    """Publish manifests among the dead letters again, all or those of ``batches``.

    Returns:
        A line for each batch that was published, one for each that could not be, and the number of letters left.

    Raises:
        CommandError: The operators' queue does not exist.
    """
    republished: list[str] = []
    problems: list[str] = []
    tickets: set[str] = set()
    total = kept = await bus.depth(topology.dead.name) or 0
    async for letter in _each(bus, topology, total):
        if letter.kind != BatchClosed.kind or (batches and str(letter.headers.get("batch")) not in batches):
            continue
        try:
            manifest = decode(letter.body, BatchClosed, letter.content_type)
            problem = await _problem(bus, topology, manifest)
        except DecodeError as error:
            problem = f"letter {letter.message_id}: does not decode: {error}"
        if problem is not None:
            problems.append(problem)
            continue
        if manifest.ticket not in tickets:
            again = envelope(manifest, message_id=f"closed-{manifest.ticket}-{uuid.uuid4().hex}")
            if not await bus.publish(topology.exchange("batches"), "closed", again):
                raise CommandError(f"the queue {topology.closed.name} does not exist: start the run, and try again")
            tickets.add(manifest.ticket)
            republished.append(f"batch {manifest.batch} is with the operators again (ticket {manifest.ticket})")
        await letter.ack()
        kept -= 1
    return republished, problems, kept


async def _problem(bus: Bus, topology: Topology, manifest: BatchClosed) -> str | None:
    """Return why a batch cannot be processed any more, None if it can."""
    if await bus.depth(topology.batch_queue(manifest.batch, manifest.ticket).name) is not None:
        return None
    return (
        f"batch {manifest.batch}: its experiences are gone (ticket {manifest.ticket}): another operator has processed "
        "it, or the 7 days for which they are kept are over"
    )


async def _letters(target: Target, limit: int) -> tuple[Sequence[Incoming], int]:
    async with reached(target, "dead") as (bus, topology):
        total = await bus.depth(topology.dead.name) or 0
        return [letter async for letter in _each(bus, topology, min(total, limit))], total


async def _each(bus: Bus, topology: Topology, count: int) -> AsyncIterator[Delivery]:
    """Yield so many letters, oldest first; those that are not acknowledged go back at the end."""
    if not count:
        return
    async with await bus.consume(topology.dead, prefetch=count) as subscription:
        with contextlib.suppress(TimeoutError):
            for _ in range(count):
                async with asyncio.timeout(QUIET_SECONDS):
                    letter = await anext(subscription)
                yield letter
