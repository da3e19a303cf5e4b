r"""What answer a text states, and whether it is the right one: exactly for numbers, else by math-verify.

What is mathematically the same is math-verify's notion (https://github.com/huggingface/Math-Verify):
``\frac{1}{\sqrt{3}}`` is ``\frac{\sqrt{3}}{3}``, ``x = 5`` is ``5``, sets have no order, tuples have one.
"""

from __future__ import annotations

from fractions import Fraction

from trinity_mq.rewards.math.judge import LONGEST, same
from trinity_mq.rewards.math.math_answer import after_hashes, final_number, number_of, plain
from trinity_mq.rewards.text import boxed, tagged

_QUOTES = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def correct(response: str, truth: str | None, *, finished: bool) -> bool:
    r"""Return whether ``response`` states the answer that ``truth`` states.

    An answer is stated after the last ``####`` on its line, in the last ``\boxed{}`` or in the last
    ``<answer></answer>``, whichever begins last; ``truth`` may be the bare answer. A response without a mark counts
    only if it ``finished``: then its last number, or its last formula, is the answer.
    """
    if not truth:
        return False
    wanted = marked(truth)
    wanted = truth.strip() if wanted is None else wanted
    if not wanted or len(wanted) > LONGEST:
        return False
    seen = marked(response)
    if seen is not None:
        return equal(wanted, seen)
    return finished and _ends_with(response[-LONGEST:], wanted)


def marked(text: str) -> str | None:
    """Return the answer that ``text`` marks as such, None without a mark."""
    found = [mark for mark in (_after_hashes(text), boxed(text), tagged(text)) if mark is not None]
    return max(found)[1].strip() if found else None


def equal(wanted: str, seen: str) -> bool:
    """Return whether two answers are the same. Numbers are compared exactly; what is empty or too long is no answer."""
    if not (0 < len(wanted) <= LONGEST and 0 < len(seen) <= LONGEST):
        return False
    numbers = _number(wanted), _number(seen)
    if None not in numbers:
        if numbers[0] == numbers[1]:
            return True
        if "%" not in wanted + seen:
            return False
    return wanted.split() == seen.split() or same(wanted, seen)


def _ends_with(tail: str, wanted: str) -> bool:
    number = _number(wanted)
    if number is not None and final_number(plain(tail)) == number:
        return True
    if any(opening in tail for opening, _ in _QUOTES):
        return same(wanted, tail, marked=False)
    return number is None and wanted.split() == tail.split()


def _number(answer: str) -> Fraction | None:
    r"""Return the number that ``answer`` is, and nothing else but a unit in ``\text{}``; None if it is none."""
    text = answer.strip().removesuffix(".")
    for opening, closing in _QUOTES:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    return number_of(plain(text).strip().removesuffix("%").strip())


def _after_hashes(text: str) -> tuple[int, str] | None:
    found = after_hashes(text)
    return found and (found[0], found[1].partition("</answer>")[0])
