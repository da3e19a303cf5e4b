"""Synthetic arithmetic problems, the same on every machine, which a tiny model learns from random weights.

The sets, their shuffle and the held-out part are those of the recipe whose learning curve was measured.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Mapping
from itertools import product

from trinity_mq.data.errors import TasksetError

Digits = tuple[int, int, int]
SHUFFLE_SEED = 1234
MAX_HELD_OUT = 256


def _ops3(digits: Digits) -> list[tuple[str, str]]:
    """``+372=`` largest, ``-372=`` smallest, ``,372=`` middle digit."""
    text = "".join(map(str, digits))
    low, middle, high = sorted(digits)
    return [(f"+{text}=", str(high)), (f"-{text}=", str(low)), (f",{text}=", str(middle))]


def _max3(digits: Digits) -> list[tuple[str, str]]:
    """``3,7,2=`` largest digit."""
    return [(",".join(map(str, digits)) + "=", str(max(digits)))]


def _copy3(digits: Digits) -> list[tuple[str, str]]:
    """``372=`` the same again."""
    text = "".join(map(str, digits))
    return [(f"{text}=", text)]


def _sort3(digits: Digits) -> list[tuple[str, str]]:
    """``372=`` digits in rising order."""
    return [("".join(map(str, digits)) + "=", "".join(map(str, sorted(digits))))]


KINDS: Mapping[str, Callable[[Digits], list[tuple[str, str]]]] = {
    "copy3": _copy3,
    "max3": _max3,
    "ops3": _ops3,
    "sort3": _sort3,
}
"""Problem sets by name: the problems of three digits. 1000 problems each, ops3 3000."""


def problems(kind: str, split: str) -> list[dict[str, str]]:
    """Return the problems of one set as records ``{"question": "+372=", "answer": "7"}``, in a fixed order.

    Args:
        kind: A key of :data:`KINDS`.
        split: ``test`` is held out (256, at most a fifth of all), ``train`` is the rest: they share no question.

    Raises:
        TasksetError: Unknown set or split.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KINDS)}"
        raise TasksetError(f"no synthetic problems called {kind!r}; {hint}")
    if split not in {"train", "test"}:
        raise TasksetError(f"synthetic problems have no split {split!r}, wanted 'train' or 'test'")
    make = KINDS[kind]
    pairs = sorted(pair for digits in product(range(10), range(10), range(10)) for pair in make(digits))
    random.Random(SHUFFLE_SEED).shuffle(pairs)
    held_out = min(MAX_HELD_OUT, len(pairs) // 5)
    chosen = pairs[:held_out] if split == "test" else pairs[held_out:]
    return [{"question": question, "answer": answer} for question, answer in chosen]
