"""``trinity-mq inspect``: shows experiences from the ``ready`` stream of a run, which the trainer reads, or from a
file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.cli.broker.connection import Target, find_target, reached, saved_run_id
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.inspect.evaluations import show_evaluations
from trinity_mq.cli.inspect.token_texts import TokenTexts, tokenizer_folder
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.config import Config

if TYPE_CHECKING:
    from trinity_mq.cli.inspect.stream import Choice, StreamSummary
    from trinity_mq.experience import Experience, ExperienceBatch

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
    parser.add_argument("--last", action="store_true", help="show the last ones instead of the first ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_broker(parser)
    parser.add_argument("--blob-store", metavar="URL", help="where large bodies are (default: that of the YAML file)")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="with a tokenizer.json (default: the run's model)")


def inspect(arguments: argparse.Namespace) -> int:
    """Print experiences. Return 0, or 1 if no experience was printed."""
    from trinity_mq.cli.inspect.stream import Choice

    if arguments.limit < 1:
        raise CommandError(f"--limit is {arguments.limit}, wanted at least 1")
    if arguments.evaluation is not None:
        return show_evaluations(arguments)
    choice = Choice(arguments.batch, arguments.task, arguments.run, arguments.step)
    path = Path(arguments.target)
    if path.suffix == BODY_SUFFIX or _is_body(path):
        return _show_file(path, choice, arguments)
    target = find_target(arguments, arguments.blob_store)
    printer = Printer(known_texts(arguments, target.config), arguments)
    with contextlib.redirect_stdout(sys.stderr):  # library output must not mix with the experiences on stdout
        summary = run_to_the_end(_read_stream(target, choice, printer))
    printer.end()
    return _verdict(summary, printer, choice, target.run)


def _is_body(path: Path) -> bool:
    from trinity_mq.experience.codec.body import MAGIC

    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def known_texts(arguments: argparse.Namespace, config: Config | None) -> TokenTexts:
    """Return the token texts of ``--tokenizer``, else of the run's model. Print a note if no tokenizer is available.

    Raises:
        CommandError: The tokenizer in ``--tokenizer`` cannot be loaded.
    """
    if arguments.tokenizer is not None:
        texts = TokenTexts(Path(arguments.tokenizer).expanduser())
        if texts.problem:
            raise CommandError(f"--tokenizer: {texts.problem}")
        return texts
    texts = TokenTexts(None if config is None else tokenizer_folder(config.model, config.path))
    if texts.problem:
        note(f"token ids without texts: {texts.problem}; --tokenizer FOLDER names one")
    return texts


async def _read_stream(target: Target, choice: Choice, printer: Printer) -> StreamSummary:
    from trinity_mq.cli.inspect.stream import ReadyReader
    from trinity_mq.transport.blobs import open_store

    async with reached(target, "inspect") as (bus, topology):
        if target.folder is not None:
            bus.run_id = saved_run_id(target.folder.path)
        reader = ReadyReader(bus, topology, choice, open_store(target.broker, target.run), printer.take)
        try:
            return await reader.read()
        finally:
            for remark in reader.summary.notes:
                note(remark)


def _show_file(path: Path, choice: Choice, arguments: argparse.Namespace) -> int:
    from trinity_mq.cli.inspect.stream import StreamSummary
    from trinity_mq.experience import DecodeError, ExperienceBatch
    from trinity_mq.experience.legacy.reader import legacy_form

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
    printer = Printer(known_texts(arguments, None), arguments)
    printer.take([choice.of(whole)])
    printer.end()
    return _verdict(StreamSummary(experiences=len(whole)), printer, choice, str(path))


class Printer:
    """Prints the first matching experiences at once, or keeps the last for printing at the end."""

    def __init__(self, texts: TokenTexts, arguments: argparse.Namespace) -> None:
        self._texts, self._limit, self._as_json, self._out = texts, arguments.limit, arguments.json, sys.stdout
        self._last_experiences: collections.deque[Experience] | None = None
        if arguments.last:
            self._last_experiences = collections.deque(maxlen=arguments.limit)
        self.printed = 0
        self._matched = 0

    @property
    def more(self) -> bool:
        """True if more experiences matched than were printed."""
        return self._matched > self.printed

    def take(self, batches: Sequence[ExperienceBatch]) -> bool:
        """Print or keep matching experiences. Return True if no more are needed."""
        for experience in (item for batch in batches for item in self._printable(batch)):
            if self._last_experiences is not None:
                self._last_experiences.append(experience)
            else:
                self._print(experience)
        return self._last_experiences is None and self.printed >= self._limit

    def _printable(self, batch: ExperienceBatch) -> Iterator[Experience]:
        """Yield the experiences of a batch that may be printed, as objects that do not keep the rest of the batch in
        memory.
        """
        last = self._last_experiences is not None
        limit = self._limit if last else self._limit - self.printed
        part = batch[-limit:] if last else batch[:limit]
        self._matched += len(batch)
        yield from part.to_list()

    def end(self) -> None:
        """Print the experiences kept for ``--last``."""
        for experience in self._last_experiences or ():
            self._print(experience)

    def _print(self, experience: Experience) -> None:
        from trinity_mq.cli.inspect.show_experience import as_json, open_console, show
        from trinity_mq.telemetry.jsonline import dump_line

        self.printed += 1
        if self._as_json:
            print(dump_line(as_json(experience, self._texts)), file=self._out, flush=True)
            return
        show(open_console(self._out), experience, self._texts)


def _verdict(summary: StreamSummary, printer: Printer, choice: Choice, location: str) -> int:
    """Print on stderr why experiences are missing, and return the exit code."""
    if printer.printed:
        if printer.more:
            note(f"{printer.printed} shown; there are more (--limit, --last, --batch, --task, --run, --step)")
        return 0
    if summary.experiences:
        explanation = f"none of {summary.experiences} experiences matches {choice}"
    elif summary.batches and choice.batch is not None and choice.batch not in summary.batches:
        explanation = f"{location} has no batch {choice.batch}; it has {_span(summary.batches)}"
    elif summary.batches:
        explanation = f"{location} has no experiences in {_span(summary.batches)}"
    else:
        explanation = f"{location} holds no processed batch yet"
    if summary.incomplete:
        explanation += f"; under way: {_span(summary.incomplete)}"
    note(explanation)
    return 1


def _span(batches: Sequence[str]) -> str:
    return f"batch {batches[0]}" if len(batches) == 1 else f"{len(batches)} batches, {batches[0]} to {batches[-1]}"


def note(line: str) -> None:
    """Print a line for the user on stderr, apart from the output."""
    print(line, file=sys.stderr, flush=True)
