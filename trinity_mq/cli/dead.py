"""``trinity-mq dead``: lists dead letters, and publishes dead-lettered batches again."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence

from trinity_mq.bus import Incoming
from trinity_mq.cli.arguments import add_actions, add_broker, add_target, check_least
from trinity_mq.operations.dead_letters import COLUMNS, letters, republish_batches, row
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import Target, find_target, open_bus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``trinity-mq dead list`` and ``trinity-mq dead replay``."""
    add = add_actions(parser)
    listing = add("list", "list dead letters with their reasons, and leave them where they are", list_dead)
    add_target(listing)
    add_broker(listing)
    listing.add_argument("--limit", type=int, default=100, help="largest number listed (default: 100)")
    again = add(
        "replay",
        "after the cause is fixed, publish dead-lettered batches again: batches that operators could not process, or "
        "during which trainers crashed",
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
    check_least(arguments, limit=1)
    target = find_target(arguments)
    letters, total = run_until_complete(_letters(target, arguments.limit))
    if not total:
        arguments.is_last = True
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
    """Return one dead letter for a terminal: its number in the list, kind and origin, reason, and message id, in lines
    of at most ``width`` characters. ``cells`` are the letter's values of :data:`COLUMNS`.
    """
    letter = dict(zip(COLUMNS, cells, strict=True))
    parts = [f"{name} {letter[name]}" for name in ("batch", "operator") if letter[name] != "-"]
    head = ", ".join([f"{number}. {letter['kind']} from {letter['queue']}", *parts, f"{letter['bytes']} bytes"])
    lines = textwrap.wrap(head, width, subsequent_indent="   ")
    for text in (letter["reason"], f"id {letter['message_id']}"):
        lines += textwrap.wrap(text, width, initial_indent="   ", subsequent_indent="   ")
    return lines


def replay(arguments: argparse.Namespace) -> int:
    """Publish dead batches again: all, or the batches of ``--batch``. Return 1 if a batch could not be published."""
    target = find_target(arguments)
    republished, problems, remaining = run_until_complete(_replay(target, set(arguments.batch)))
    for line in (*republished, *problems):
        print(line)
    if republished:
        print(
            "The processed batches, and the batches during which a trainer crashed, go to the ready stream, where "
            "`trinity-mq inspect` shows them. A trainer that has already passed a batch trains on its groups that "
            "are at most synchronizer.max_staleness train steps old along with its next batch "
            "(sample/repaired_batches), and drops and counts the older groups (sample/dropped_stale_groups)"
        )
    else:
        rest = f"; {remaining} other letters stay where they are, see `trinity-mq dead list`" if remaining else ""
        print(f"run {target.run!r} has no dead batch to run again{rest}")
    return 1 if problems else 0


async def _replay(target: Target, batches: set[str]) -> tuple[list[str], list[str], int]:
    async with open_bus(target, "dead") as (bus, topology):
        return await republish_batches(bus, topology, batches)


async def _letters(target: Target, limit: int) -> tuple[Sequence[Incoming], int]:
    async with open_bus(target, "dead") as (bus, topology):
        return await letters(bus, topology, limit)
