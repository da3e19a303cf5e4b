"""``trinity-mq dead``: what was rejected or given up, and why."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence

from trinity_mq.bus import Incoming
from trinity_mq.cli.target import connected, target
from trinity_mq.config import BrokerConfig

SILENCE = 2.0
"""Seconds without another letter until the list ends, should the queue hold fewer than it said."""
COLUMNS = ("queue", "kind", "reason", "batch", "bytes", "message_id")


def list_dead(arguments: argparse.Namespace) -> int:
    """Print a table of dead letters, oldest first; they stay where they are."""
    run, broker = target(arguments)
    letters, total = asyncio.run(_letters(run, broker, arguments.limit))
    if not total:
        print(f"run {run!r} has no dead letters")
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
    """Return what the table says of one letter: from our own headers, else from the broker's."""
    headers = letter.headers
    queue, reason = headers.get("dead-queue"), headers.get("dead-reason")
    if reason is None:
        queue, reason = headers.get("x-first-death-queue"), headers.get("x-first-death-reason")
    batch = headers.get("batch")
    texts = (queue, letter.kind, reason, batch, len(letter.body), letter.message_id)
    return tuple("-" if text is None else str(text) for text in texts)


async def _letters(run: str, broker: BrokerConfig, limit: int) -> tuple[Sequence[Incoming], int]:
    async with connected(run, broker, "dead") as (bus, topology):
        total = await bus.depth(topology.dead.name) or 0
        wanted = min(total, limit)
        letters: list[Incoming] = []
        if wanted:
            # never acknowledged: closing the consumer gives them all back
            async with await bus.consume(topology.dead, prefetch=wanted) as feed:
                with contextlib.suppress(TimeoutError):
                    while len(letters) < wanted:
                        async with asyncio.timeout(SILENCE):
                            letters.append(await anext(feed))
        return letters, total
