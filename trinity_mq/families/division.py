"""Divides the text of an answer into thoughts, content and calls, while it is sampled or afterwards.

Both ways use :class:`AnswerFlow`. A streamed answer therefore equals an answer that is read as a whole.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trinity_mq.families.messages import Message, Tools
from trinity_mq.families.thoughts import ThoughtFormat, opens_thoughts, written


class Division(NamedTuple):
    """The parts of an answer, without the tags between them."""

    thoughts: str | None
    """Text of the thoughts. None: the answer has no thoughts, or empty thoughts."""
    content: str
    calls: str
    """Text from the beginning of the first call, or of the first stop text, to the end of the answer."""


class Delta(NamedTuple):
    """Text of an answer that has become final."""

    thoughts: str = ""
    content: str = ""


class ReadCalls(NamedTuple):
    """Result of a call reader: the tool calls of an answer."""

    calls: list[Message]
    malformed: int = 0
    rest: str = ""
    """Text that does not belong to a call. It is shown to the user."""


CallReader = Callable[[str, Tools], ReadCalls]
"""Reads the tool calls of an answer. Arguments: the text from the beginning of the first call on; the offered tools. If
any call is malformed, the reader returns an empty list of calls and the number of malformed calls. It may instead raise
ValueError, which counts as a single malformed call.
"""


class Marks(NamedTuple):
    """Texts that divide the answers of a family."""

    thoughts: ThoughtFormat | None = None
    calls: tuple[str, ...] = ()
    """Texts that begin calls."""
    headers: tuple[str, ...] = ()
    """Texts that the model writes around content, and that are not part of the content."""

    def divide(self, text: str) -> bool:
        """Return whether a text contains any of these marks. An answer without marks consists of content only."""
        return any(mark and mark in text for mark in (*(self.thoughts or ()), *self.calls, *self.headers))


class _Part:
    """The thoughts or the content of an answer, emitted while the text grows. Blanks at its end are held back."""

    def __init__(self, *, strips: bool) -> None:
        self._strips = strips
        self._pieces: list[str] = []
        self._blanks: list[str] = []

    def add(self, text: str) -> str:
        """Add text and return the text that is now final. Blanks at the end are held back. Blanks at the beginning are
        left out if this part is stripped.
        """
        if not self._pieces and self._strips:
            text = text.lstrip()
        solid = text.rstrip()
        if not solid:
            if text:
                self._blanks.append(text)
            return ""
        emitted = "".join(self._blanks) + solid
        self._blanks = [text[len(solid) :]] if len(solid) < len(text) else []
        self._pieces.append(emitted)
        return emitted

    def strip(self) -> None:
        """Leave out blanks at the beginning of this part, if it has no other text yet."""
        if not self._pieces:
            self._strips, self._blanks = True, []

    def text(self, *, strips: bool) -> str:
        """Return the whole text, without the blanks at its end if ``strips``."""
        return "".join(self._pieces) if strips else "".join([*self._pieces, *self._blanks])


class AnswerFlow:
    """Divides an answer as its text grows. The time is linear in the length of the text.

    Thoughts begin where the prompt or the answer opens them, and end at the next closing tag that is not quoted. All
    text from the first call outside thoughts on belongs to the calls. Blanks around thoughts and before calls are left
    out.
    """

    def __init__(self, marks: Marks, prompt_end: str | None = None, stops: Sequence[str] = ()) -> None:
        """Begin an answer.

        Args:
            marks: Marks of the family.
            prompt_end: The prompt, or its last characters. It may open thoughts. None: unknown.
            stops: Texts at which sampling ends. Text from the first stop on is not emitted.
        """
        self._marks = marks
        self._is_thinking = opens_thoughts(prompt_end, marks.thoughts)
        self._is_ended = False
        """True once a call or a stop has begun: no further text is emitted."""
        self._window = ""
        """Text whose kind is undecided, preceded by at most :data:`_CONTEXT` characters that were already read."""
        self._context = 0
        """Number of characters at the beginning of the window that were already read."""
        self._thoughts, self._content = _Part(strips=True), _Part(strips=False)
        self._held: list[str] = []
        self._outside, self._inside = _scanners(marks, tuple(stops))

    def add(self, text: str) -> Delta:
        """Add sampled text and return the new final text."""
        if self._is_ended:
            self._held.append(text)
            return Delta()
        self._window += text
        return self._read(is_whole=False)

    def finish(self) -> Division:
        """Return the parts of the whole answer."""
        if not self._is_ended:
            self._read(is_whole=True)
        calls = "".join(self._held)
        thoughts = self._thoughts.text(strips=True) or None
        return Division(thoughts, self._content.text(strips=bool(calls)), calls)

    def _read(self, *, is_whole: bool) -> Delta:
        thoughts: list[str] = []
        content: list[str] = []
        while not self._is_ended:
            scanner = self._inside if self._is_thinking else self._outside
            start, end, mark = scanner.first(self._window, self._context, is_whole=is_whole)
            emitted = self._window[self._context : start]
            (thoughts if self._is_thinking else content).append(
                (self._thoughts if self._is_thinking else self._content).add(emitted)
            )
            if not mark:
                self._keep(start)
                break
            self._pass(mark, start, end)
        return Delta("".join(thoughts), "".join(content))

    def _keep(self, end: int) -> None:
        """Forget the text before ``end``, except its last characters."""
        begin = max(0, end - _CONTEXT)
        self._window, self._context = self._window[begin:], end - begin

    def _pass(self, mark: str, start: int, end: int) -> None:
        tags = self._marks.thoughts
        if self._is_thinking and tags and mark == tags.closing:
            self._is_thinking = False
            self._content.strip()
        elif not self._is_thinking and tags and mark == tags.opening:
            self._is_thinking = True
            self._thoughts.add("\n\n")
        elif self._is_thinking or mark not in self._marks.headers:
            self._is_ended = True
            self._held.append(self._window[start:])
        self._context = end  # the window is cut once, behind the last mark


_CONTEXT = 2
"""Number of characters before a tag that show whether the tag is quoted."""


class _Scanner:
    """Finds the first of several marks in a growing text."""

    def __init__(self, marks: Sequence[str], quoted: set[str]) -> None:
        """``quoted``: marks that do not count between quotation marks."""
        self._marks = sorted(set(marks), key=len, reverse=True)
        self._quoted = quoted
        patterns = [written(mark) if mark in quoted else re.escape(mark) for mark in self._marks]
        self._pattern = re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None
        self._longest = max(map(len, self._marks), default=0)
        self._first = frozenset(mark[0] for mark in self._marks)

    def first(self, text: str, start: int, *, is_whole: bool) -> tuple[int, int, str]:
        """Return begin, end and text of the first mark in ``text`` from ``start`` on. Without a mark, begin and end are
        the end of the decided text, and the mark is empty.
        """
        match = self._pattern.search(text, start) if self._pattern else None
        if match is not None and match.start() < len(text) - self._longest:
            return match.start(), match.end(), match[0]  # saves the search for the undecided end at each mark
        undecided = len(text) if is_whole or self._pattern is None else self._undecided(text, start)
        if match is None or match.start() >= undecided:
            return undecided, undecided, ""
        return match.start(), match.end(), match[0]

    def _undecided(self, text: str, start: int) -> int:
        """Return the first position at which further text could complete a mark, or show that a mark is quoted."""
        for place in range(max(start, len(text) - self._longest), len(text)):
            if text[place] not in self._first:
                continue
            rest = text[place:]
            for mark in self._marks:
                if len(mark) > len(rest) and mark.startswith(rest):
                    return place
                if rest == mark and mark in self._quoted:
                    return place
        return len(text)


@functools.lru_cache(maxsize=128)
def _scanners(marks: Marks, stops: tuple[str, ...]) -> tuple[_Scanner, _Scanner]:
    """Return the scanners for text outside thoughts and inside thoughts."""
    opening, closing = marks.thoughts or ("", "")
    quoted = {opening, closing}
    outside = filter(None, (opening, *marks.calls, *marks.headers, *stops))
    return _Scanner([*outside], quoted), _Scanner([*filter(None, (closing, *stops))], quoted)


def divide(text: str, marks: Marks, prompt_end: str | None) -> Division:
    """Return the parts of a whole answer; see :class:`AnswerFlow`."""
    flow = AnswerFlow(marks, prompt_end)
    flow.add(text)
    return flow.finish()
