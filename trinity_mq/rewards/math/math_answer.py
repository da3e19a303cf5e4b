r"""Reward 1 for the right number: after ``####``, in ``\boxed{}``, or the last one of the response."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from trinity_mq.rewards.text import boxed

MAX_DIGITS = 100
"""A longer number is nobody's answer; exact arithmetic on it costs time."""
MAX_ANSWER = 200
"""Characters of a stated answer that are looked at."""

# The bound on groups keeps a megabyte of "1,234,234" linear.
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3}){1,12}(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    # A minus is a sign only where nothing stands right before it: "16-3" holds 16 and 3.
    rf"(?P<sign>(?<![\w)\].])[-\u2212])?\$?(?P<sign2>(?<=\$)[-\u2212])?(?P<top>{_UNSIGNED})(?:\s?/\s?(?P<bottom>{_UNSIGNED}))?"
)
_FRACTION = re.compile(rf"\\[dt]?frac\s?\{{({_UNSIGNED})\}}\s?\{{({_UNSIGNED})\}}")
_UNITS = re.compile(r"\\text\w*\s?\{[^{}]*\}")
_SPACING = re.compile(r"\\[,!;: ]|\\(?=[$%])")


def math_answer(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    """Return accuracy 1 if the number that ``response`` states equals that of ``truth`` exactly, else 0.

    Numbers are compared as fractions: ``1,234.50`` is ``1234.5``, ``$18`` is ``18``, ``0.5`` is ``1/2``, ``50%`` is
    ``50``. A response cut at a limit counts only if it has marked its answer: half a calculation has no last number.
    """
    wanted = final_number(truth) if truth else None
    seen = final_number(response, marked_only=not finished)
    return {"accuracy": float(wanted is not None and seen == wanted)}


def final_number(text: str, *, marked_only: bool = False) -> Fraction | None:
    r"""Return the number that ``text`` ends up with, None if there is none.

    That is the one number after the last ``####`` on its line or in the last ``\boxed{}``, whichever comes later and
    holds exactly one; else, unless ``marked_only``, the last number of all.
    """
    marks = sorted((found for found in (after_hashes(text), boxed(text)) if found is not None), reverse=True)
    for _, answer in marks:
        numbers = [_value(match) for match in _NUMBER.finditer(plain(answer[:MAX_ANSWER]))]
        if len(numbers) == 1:
            return numbers[0]
    if marked_only:
        return None
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def after_hashes(text: str) -> tuple[int, str] | None:
    """Return where the last ``####`` stands and the rest of its line, None without one."""
    start = text.rfind("####")
    return None if start < 0 else (start, text[start:].partition("\n")[0].lstrip("#").strip())


def number_of(text: str) -> Fraction | None:
    """Return the number that ``text`` is, as a whole; None if it is none."""
    match = _NUMBER.fullmatch(text)
    return _value(match) if match else None


def plain(answer: str) -> str:
    r"""Return LaTeX as plain text where it matters for numbers: ``\frac{1}{2}`` is 1/2, ``1{,}234`` is 1,234."""
    answer = _FRACTION.sub(r" \1/\2 ", answer.replace("{,}", ","))
    return _SPACING.sub("", _UNITS.sub(" ", answer))


def _value(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > MAX_DIGITS:
        return None
    top = Fraction(match["top"].replace(",", ""))
    bottom = Fraction(match["bottom"].replace(",", "")) if match["bottom"] else Fraction(1)
    if bottom == 0:
        return None
    return top / bottom * (-1 if match["sign"] or match["sign2"] else 1)
