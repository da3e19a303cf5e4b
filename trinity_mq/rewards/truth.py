"""Right answers as text: records hold numbers, lists and maps too."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeVar, cast

from trinity_mq.messages.tasks import MOST_TRUTH

F = TypeVar("F", bound=Callable[..., Any])

BOOLEANS = ("false", "true")
"""The texts of truths that are booleans. An answer may begin with a capital letter."""
MOST_ZEROS = 50
"""Upper bound of the power of ten up to which a number is written with all its digits."""


def truth_text(truth: Any) -> str | None:
    """Return a right answer as text: a number with all its digits, anything else that is no text as JSON.

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
    """Return the expected answer for a person, as short text that is fit to travel; None: unknown."""
    text = truth_text(truth)
    return shortened(text, MOST_TRUTH) if text else None


def shortened(text: str, most: int) -> str:
    """Return text that is fit to travel, without the middle of a longer one: its end has the answer.

    >>> shortened("0123456789", 5), shortened("01234", 5)
    ('0…789', '01234')
    """
    head = (most - 1) // 4
    short = text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most :]}"
    return short.encode(errors="replace").decode()  # half a surrogate pair does not travel


def takes_any_truth(reward: F) -> F:
    """Have a reward function get the right answer as text, of whatever type it is given."""

    @functools.wraps(reward)
    def judge(response: str, truth: Any, **more: Any) -> Any:
        return reward(response, truth_text(truth), **more)

    return cast(F, judge)
