"""Synthetic arithmetic problems, identical on every machine, for tiny models with random weights and for trained
models.

The sets, their shuffle and the held-out part are the same as in the recipes whose learning curves were measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, TypeVar

from trinity_mq.data.errors import TasksetError
from trinity_mq.errors import suggest

T = TypeVar("T")

Digits = tuple[int, int, int]
Problem = tuple[str, str]
"""A question and its answer."""
SHUFFLE_SEED = 1234
MAX_HELD_OUT = 256


def _ops3(digits: Digits) -> list[Problem]:
    """Return three questions: ``+372=`` asks for the largest digit, ``-372=`` the smallest, ``,372=`` the middle."""
    text = "".join(map(str, digits))
    low, middle, high = sorted(digits)
    return [(f"+{text}=", str(high)), (f"-{text}=", str(low)), (f",{text}=", str(middle))]


def _max3(digits: Digits) -> list[Problem]:
    """Return a question such as ``3,7,2=``, which asks for the largest digit."""
    return [(",".join(map(str, digits)) + "=", str(max(digits)))]


def _copy3(digits: Digits) -> list[Problem]:
    """Return a question such as ``372=``, which asks for the same digits."""
    text = "".join(map(str, digits))
    return [(f"{text}=", text)]


def _sort3(digits: Digits) -> list[Problem]:
    """Return a question such as ``372=``, which asks for the digits in ascending order."""
    return [("".join(map(str, digits)) + "=", "".join(map(str, sorted(digits))))]


def _three_digits(make: Callable[[Digits], list[Problem]]) -> list[Problem]:
    return [problem for digits in product(range(10), range(10), range(10)) for problem in make(digits)]


def _sums() -> list[Problem]:
    """Return questions such as ``What is 12 + 31?``, with numbers from 2 to 49."""
    return [(f"What is {a} + {b}?", str(a + b)) for a, b in product(range(2, 50), repeat=2)]


NAMES = ("Anna", "Ben", "Leo", "Mia", "Sara", "Tom")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "stamps")


def _word_problems() -> list[Problem]:
    """Return questions such as ``Mia has 14 apples and gives 5 away. How many apples does Mia have now?``, with numbers
    from 2 to 30.
    """
    records = []
    for a, b in product(range(2, 31), repeat=2):
        name, thing = NAMES[(a + 2 * b) % len(NAMES)], THINGS[(2 * a + b) % len(THINGS)]
        more = (f"buys {b} more", f"finds {b} more")[(a + b) % 2]
        less = (f"gives {b} away", f"loses {b} of them")[(a + b) % 2]
        for action, result in ((more, a + b), (less, a - b)):
            if result >= 0:
                asked = f"How many {thing} does {name} have now?"
                records.append((f"{name} has {a} {thing} and {action}. {asked}", str(result)))
    return records


KINDS: Mapping[str, Callable[[], list[Problem]]] = {
    "copy3": lambda: _three_digits(_copy3),
    "max3": lambda: _three_digits(_max3),
    "ops3": lambda: _three_digits(_ops3),
    "sort3": lambda: _three_digits(_sort3),
    "sums": _sums,
    "word_problems": _word_problems,
}
"""Problem sets by name. Three-digit sets, for a tiny model: 1000 problems each, ops3 3000. English sets, for a trained
model: sums 2304, word_problems 1276.
"""


def _other_digit(question: str, answer: str) -> str:
    """Return a plausible wrong answer: the first other digit of the question, else the next digit."""
    return next(
        (character for character in question if character.isdigit() and character != answer),
        str((int(answer) + 1) % 10),
    )


SEEDS = "seeds"
"""Name of a set of numbers, for environments and games that use them as seeds."""
MANY_SEEDS = 1000

PREFERENCES: Mapping[str, tuple[str, Callable[[str, str], str]]] = {
    "ops3_pairs": ("ops3", _other_digit),
    "max3_pairs": ("max3", _other_digit),
}
"""Preference sets by name: the problem set with the chosen answers, and the function that returns the rejected answers.
"""


def problems(kind: str, split: str) -> list[dict[str, Any]]:
    """Return the problems of one set as records ``{"question": "+372=", "answer": "7"}``, in a fixed order. Preferences
    are ``{"question": "+372=", "chosen": "7", "rejected": "3"}``, seeds ``{"question": "17", "answer": "", "seed":
    17}``.

    Args:
        kind: A key of :data:`KINDS` or :data:`PREFERENCES`, or :data:`SEEDS`.
        split: ``test`` is the held-out part (256, at most a fifth of all), ``train`` the rest. They share no question.

    Raises:
        TasksetError: The set or the split is unknown.
    """
    if kind in PREFERENCES:
        source, reject = PREFERENCES[kind]
        return [
            {
                "question": record["question"],
                "chosen": record["answer"],
                "rejected": reject(record["question"], record["answer"]),
            }
            for record in problems(source, split)
        ]
    if kind not in KINDS and kind != SEEDS:
        hint = suggest(kind, [*KINDS, *PREFERENCES, SEEDS])
        raise TasksetError(f"no synthetic problems called {kind!r}; {hint}")
    if split not in {"train", "test"}:
        raise TasksetError(f"synthetic problems have no split {split!r}, wanted 'train' or 'test'")
    if kind == SEEDS:
        numbers = _part(list(range(MANY_SEEDS)), split)
        return [{"question": str(number), "answer": "", "seed": number} for number in numbers]
    pairs = _part(sorted(KINDS[kind]()), split)
    return [{"question": question, "answer": answer} for question, answer in pairs]


def _part(ordered: list[T], split: str) -> list[T]:
    """Return the items of a split, shuffled."""
    random.Random(SHUFFLE_SEED).shuffle(ordered)
    held_out = min(MAX_HELD_OUT, len(ordered) // 5)
    return ordered[:held_out] if split == "test" else ordered[held_out:]
