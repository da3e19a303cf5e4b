"""``trinity-mq inspect``: shows experiences from the ``ready`` stream of a run, which the trainer reads, or from a
file.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.cli.arguments import add_blob_store, add_broker, add_target, add_tokenizer, check_least
from trinity_mq.errors import CommandError
from trinity_mq.observability.experiences.evaluations import show_evaluations
from trinity_mq.observability.experiences.printer import Printer, note, open_token_texts, verdict
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import Target, find_target, open_streams

if TYPE_CHECKING:
    from trinity_mq.observability.experiences.stream import ExperienceFilter, StreamSummary

BODY_SUFFIX = ".tmqx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq inspect``."""
    add_target(parser, "or a file of experiences (.tmqx)")
    for name in ("batch", "task", "run", "step"):
        parser.add_argument(f"--{name}", metavar="ID", help=f"only experiences of this {name}")
    parser.add_argument(
        "--evaluation",
        metavar="SET",
        nargs="?",
        const="",
        help="show the answers to the last evaluation of each set, or of SET, instead; --step names another evaluation",
    )
    parser.add_argument("--limit", metavar="N", type=int, default=10, help="largest number shown (default: 10)")
    parser.add_argument("--last", action="store_true", help="show the last experiences instead of the first")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_broker(parser)
    add_blob_store(parser)
    add_tokenizer(parser)


def inspect(arguments: argparse.Namespace) -> int:
    """Print experiences, or with ``--evaluation`` answers of evaluations. Return 0, or 1 if nothing was printed."""
    from trinity_mq.observability.experiences.stream import ExperienceFilter

    check_least(arguments, limit=1)
    if arguments.evaluation is not None:
        return show_evaluations(arguments)
    choice = ExperienceFilter(arguments.batch, arguments.task, arguments.run, arguments.step)
    path = Path(arguments.target)
    if _is_body_file(path):
        arguments.is_last = True
        return _show_file(path, choice, arguments)
    target = find_target(arguments, arguments.blob_store)
    printer = Printer(open_token_texts(arguments, target.config), arguments)
    with contextlib.redirect_stdout(sys.stderr):  # library output must not mix with the experiences on stdout
        summary = run_until_complete(_read_stream(target, choice, printer))
    printer.end()
    return verdict(summary, printer, choice, target.run)


def _is_body_file(path: Path) -> bool:
    """Return whether TARGET is a file of experiences, by its suffix or its first bytes, and not a run."""
    if path.suffix == BODY_SUFFIX:
        return True
    from trinity_mq.experience.codec.body import MAGIC

    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


async def _read_stream(target: Target, choice: ExperienceFilter, printer: Printer) -> StreamSummary:
    from trinity_mq.observability.experiences.stream import ReadyReader

    async with open_streams(target, "inspect") as (bus, topology, store):
        reader = ReadyReader(bus, topology, choice, store, printer.take)
        try:
            return await reader.read()
        finally:
            for remark in reader.summary.notes:
                note(remark)


def _show_file(path: Path, choice: ExperienceFilter, arguments: argparse.Namespace) -> int:
    from trinity_mq.experience import DecodeError, ExperienceBatch
    from trinity_mq.experience.legacy.reader import legacy_form
    from trinity_mq.observability.experiences.stream import StreamSummary

    try:
        data = path.read_bytes()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}") from error
    if form := legacy_form(data):
        raise CommandError(f"{path} is a legacy body ({form}); convert it with `trinity-mq convert-experiences`")
    try:
        whole = ExperienceBatch.decode(data).settle()
    except DecodeError as error:
        raise CommandError(f"{path}: {error}") from error
    printer = Printer(open_token_texts(arguments, None), arguments)
    printer.take([choice.of(whole)])
    printer.end()
    return verdict(StreamSummary(experiences=len(whole)), printer, choice, str(path))
