"""Prints selected experiences, and explains on stderr why experiences are missing."""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.observability.experiences.token_texts import TokenTexts, tokenizer_folder

if TYPE_CHECKING:
    from trinity_mq.experience import Experience, ExperienceBatch
    from trinity_mq.observability.experiences.stream import ExperienceFilter, StreamSummary


def open_token_texts(arguments: argparse.Namespace, config: Config | None) -> TokenTexts:
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
        note(f"token ids without texts: {texts.problem}; name a tokenizer with --tokenizer FOLDER")
    return texts


class Printer:
    """Prints the first ``--limit`` matching experiences at once, or with ``--last`` keeps the last for printing at the
    end.
    """

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
        """Print or keep the matching experiences in ``batches``. Return True if no more experiences are needed."""
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
        from trinity_mq.observability.experiences.show_experience import as_json, open_console, print_experience
        from trinity_mq.telemetry.jsonline import dump_line

        self.printed += 1
        if self._as_json:
            print(dump_line(as_json(experience, self._texts)), file=self._out, flush=True)
            return
        print_experience(open_console(self._out), experience, self._texts)


def verdict(summary: StreamSummary, printer: Printer, choice: ExperienceFilter, location: str) -> int:
    """Print on stderr why experiences are missing. Return the exit code: 0 if an experience was printed, else 1."""
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
