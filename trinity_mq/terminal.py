"""Output of commands. No other module decides which characters reach a terminal. Also writes the files of commands."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trinity_mq.errors import CommandError

if TYPE_CHECKING:
    from rich.console import Console


def escape_unsafe(text: str) -> str:
    r"""Return ``text`` with each unsafe character replaced by its JSON escape, such as ``\u001b``.

    Unsafe are characters that control a terminal or hide text: control characters, bidirectional overrides, invisible
    characters and lone surrogates. Line ends and tabs stay. Because the escapes are JSON escapes, JSON text keeps its
    meaning.
    """
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        character if character in "\n\t" or _is_shown(character) else _spelled(character) for character in text
    )


def escape_to_one_line(text: str) -> str:
    """Return ``text`` as :func:`escape_unsafe` does, with line ends and tabs escaped too, so that foreign text cannot
    imitate further lines of our output.
    """
    return (
        text
        if text.isprintable()
        else "".join(character if _is_shown(character) else _spelled(character) for character in text)
    )


def escape_and_indent(text: str) -> str:
    """Return ``text`` with each line passed through :func:`escape_to_one_line` and every line after the first indented
    by two spaces, so that foreign text cannot imitate a line of our output. An indentation of two spaces that a line
    already has is not doubled.
    """
    return "\n  ".join(escape_to_one_line(line.removeprefix("  ")) for line in text.split("\n"))


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _spelled(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


class EscapingStream:
    """A text stream that passes all written text through :func:`escape_unsafe`."""

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream
        self.is_silent = True
        """Whether nothing has been written, and :func:`unguarded` has not been called for this stream."""

    def write(self, text: str) -> int:
        """Write ``text`` with its unsafe characters escaped."""
        self.is_silent = False
        self.unguarded.write(escape_unsafe(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the concatenation of ``lines`` with its unsafe characters escaped."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream behind an :class:`EscapingStream`, which then counts as written to, or any other ``stream``
    itself. Use it to write terminal colours around text that :func:`escape_unsafe` has already escaped.
    """
    if isinstance(stream, EscapingStream):
        stream.is_silent = False
        return stream.unguarded
    return stream


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Escape the unsafe characters of all text that is written to standard output and standard error inside the block,
    and of the tracebacks of uncaught errors. Text for a stream that is closed, as with ``2>&-``, is lost.
    """
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    out: Any = EscapingStream(unguarded(sys.stdout))
    err: Any = EscapingStream(unguarded(sys.stderr))
    sys.excepthook = _show_error
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


@contextlib.contextmanager
def announced(text: str, seconds: float) -> Iterator[None]:
    """Write ``text`` to standard error if that is a terminal and the command has printed nothing ``seconds`` after the
    start of the block, because imports may take long. Works only inside :func:`guarded_output`.
    """

    def announce() -> None:
        if all(getattr(stream, "is_silent", False) for stream in (sys.stdout, sys.stderr)):
            sys.stderr.write(f"{text}\n")

    timer = threading.Timer(seconds, announce)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _show_error(*error: Any) -> None:
    sys.stderr.write(escape_unsafe("".join(traceback.format_exception(*error))))


def open_console(out: TextIO | None = None, *, width: int | None = None) -> Console:
    """Return a rich console that does not interpret markup and escapes all text with :func:`escape_unsafe`.

    Args:
        out: The stream. None: standard output.
        width: Width in columns. None: the width of the terminal.
    """
    return _console_kind()(
        file=sys.stdout if out is None else out, width=width, markup=False, emoji=False, soft_wrap=False
    )


@functools.cache
def _console_kind() -> type[Console]:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class VisibleConsole(Console):
        """A rich console that escapes unsafe characters. Control segments come from rich itself and pass unchanged."""

        def __init__(self, *, file: TextIO, **options: Any) -> None:
            super().__init__(file=file.unguarded if isinstance(file, EscapingStream) else file, **options)
            self._guarded = file

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            unguarded(self._guarded)  # marks the stream as written to
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(escape_unsafe(segment.text), segment.style)

    return VisibleConsole


def align_columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return the rows of a table as lines with aligned columns. Cells are aligned to the left, or with ``right`` to the
    right.

    >>> align_columns([("name", "steps"), ("run", "12")])
    ['name  steps', 'run   12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if right else str.ljust
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]


def write_output(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path``, whose old content is replaced.

    Raises:
        CommandError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}; give another file") from error
