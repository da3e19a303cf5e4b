"""``trinity-mq tap``: prints the experiences of a live run as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import sys

from trinity_mq.cli.arguments import add_blob_store, add_broker, add_target, add_tokenizer, check_least
from trinity_mq.errors import CommandError
from trinity_mq.observability.experiences.printer import open_token_texts
from trinity_mq.observability.experiences.tap import ExperienceLinePrinter, names_texts, tap_run
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import find_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq tap``."""
    add_target(parser)
    parser.add_argument(
        "--from",
        dest="start",
        metavar="PLACE",
        default="now",
        help="beginning, now (default), or the number of a batch",
    )
    parser.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="continue until the run is over (default); --no-follow: stop at the current end of the stream",
    )
    parser.add_argument(
        "--fields",
        metavar="NAMES",
        help="only these fields, separated by commas; eid.batch is a part of eid (default: all)",
    )
    parser.add_argument("--every", metavar="N", type=int, default=1, help="only every N-th experience (default: 1)")
    add_broker(parser)
    add_blob_store(parser)
    add_tokenizer(parser)


def tap(arguments: argparse.Namespace) -> int:
    """Print the experiences of a run as they are published, from the place of ``--from`` on. Return 0 at the end of the
    run, or with ``--no-follow`` at the current end of the stream.
    """
    start = _start(arguments.start)
    if start is None and not arguments.follow:
        raise CommandError("--from now with --no-follow shows nothing: give --from beginning, or a batch")
    check_least(arguments, every=1)
    fields = _fields(arguments.fields)
    target = find_target(arguments, arguments.blob_store)
    lines = ExperienceLinePrinter(
        open_token_texts(arguments, target.config) if names_texts(fields) else None, fields, arguments.every
    )
    with contextlib.redirect_stdout(sys.stderr):  # library output must not mix with the JSON lines on stdout
        run_until_complete(tap_run(target, lines, start, follow=arguments.follow))
    return 0


def _start(text: str) -> int | None:
    """Return the first batch to print, 0 for the beginning of the stream, or None for experiences published from now
    on.
    """
    if text == "now":
        return None
    if text == "beginning":
        return 0
    if text.isdecimal():
        return int(text)
    raise CommandError(f"--from is {text!r}, wanted beginning, now, or the number of a batch such as 12")


def _fields(text: str | None) -> list[str] | None:
    """Return the names of the requested fields, or None for all fields.

    Raises:
        CommandError: ``text`` names no field, or a field that experiences do not have.
    """
    if text is None:
        return None
    from trinity_mq.observability.experiences.show_experience import json_fields

    names, allowed = [name.strip() for name in text.split(",") if name.strip()], json_fields()
    unknown = [name for name in names if name.partition(".")[0] not in allowed]
    if unknown or not names:
        raise CommandError(f"--fields is {text!r}, wanted names separated by commas, out of: {', '.join(allowed)}")
    return names
