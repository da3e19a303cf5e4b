"""Ground truths as text: records also hold numbers, lists and maps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeVar, cast

from trinity_mq.messages.tasks import MOST_TRUTH

F = TypeVar("F", bound=Callable[..., Any])

BOOLEANS = ("false", "true")
"""The texts of truths that are booleans. An answer may have small or capital letters."""
MOST_ZEROS = 50
"""Maximum power of ten at which a number is still written with all its digits."""


def truth_text(truth: Any) -> str | None:
    """Return a ground truth as text: a number with all its digits (up to :data:`MOST_ZEROS`), any other value that is
    not a text as JSON. None remains None.

    >>> truth_text(18), truth_text(0.00001), truth_text(1e16), truth_text(True)
    ('18', '0.00001', '10000000000000000', 'true')
    """
    if truth is None or isinstance(truth, str):
        return truth
    if getattr(truth, "ndim", None) == 0:  # a number of NumPy or torch
        truth = truth.item()
    if isinstance(truth, float | Decimal):
        number = truth if isinstance(truth, Decimal) else Decimal(repr(float(truth)))
        if number.is_finite():
            return f"{number:f}" if abs(number.adjusted()) <= MOST_ZEROS else str(number)
    return json.dumps(truth, ensure_ascii=False, default=str)


def expected_answer(truth: Any) -> str | None:
    """Return the expected answer to show to a person, as short text that can be sent. Return None if ``truth`` is None
    or an empty text.
    """
    text = truth_text(truth)
    return truncate_middle(text, MOST_TRUTH) if text else None


def truncate_middle(text: str, most: int) -> str:
    """Return ``text`` with at most ``most`` characters, which UTF-8 can encode. A longer text loses its
    middle, because its end holds the answer.

    >>> truncate_middle("0123456789", 5), truncate_middle("01234", 5)
    ('0…789', '01234')
    """
    head = (most - 1) // 4
    short = text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most :]}"
    return short.encode(errors="replace").decode()  # half a surrogate pair cannot be sent


def accept_any_truth_type(reward: F) -> F:
    """Decorate a reward function, so that a ground truth of any type is converted to text before the function is
    called.
    """

    @functools.wraps(reward)
    def judge(response: str, truth: Any, **more: Any) -> Any:
        return reward(response, truth_text(truth), **more)

    return cast(F, judge)
