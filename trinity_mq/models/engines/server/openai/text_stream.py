"""The text of a response while it is being sampled: pieces that together are the text of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
UNFINISHED = "\ufffd"
"""What the first bytes of a longer character decode to."""


class TextFlow:
    """Gives out what is certain: no half characters, nothing that may turn out to be a stop string or a tool call."""

    def __init__(self, decode: Decode, *, stops: Sequence[str] = (), calls: str = "") -> None:
        """``stops`` end the text; what begins with ``calls``, and blanks before it, is held until the end."""
        self._decode = decode
        self._marks = [*stops, *([calls] if calls else [])]
        self._holds_blanks = bool(calls)
        self._ids: list[int] = []
        self._start = self._read = 0
        self._text = ""
        self._sent = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Take in tokens and return the text that is certain now."""
        self._ids += token_ids
        known, now = self._decode([self._ids[self._start : self._read], self._ids[self._start :]])
        if not now.endswith(UNFINISHED) and len(now) > len(known):
            # a few tokens before the new ones are decoded with them: some tokenizers join neighbours
            self._text += now[len(known) :]
            self._start, self._read = self._read, len(self._ids)
        return self._give(self._certain())

    def finish(self, text: str) -> str:
        """Return what is missing of ``text``, the whole."""
        self._text = text
        return self._give(len(text))

    def _give(self, end: int) -> str:
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _certain(self) -> int:
        """Return how much of the text no mark can claim."""
        end = len(self._text)
        for mark in self._marks:
            place = self._text.find(mark, self._sent)  # its beginning would have been held back
            if place >= 0:
                end = min(end, place)
                continue
            for length in range(min(len(mark) - 1, len(self._text)), 0, -1):
                if self._text.endswith(mark[:length]):
                    end = min(end, len(self._text) - length)
                    break
        if self._holds_blanks:
            end = self._sent + len(self._text[self._sent : end].rstrip())
        return max(end, self._sent)
