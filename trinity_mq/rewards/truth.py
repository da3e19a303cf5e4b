"""Right answers as text: records hold numbers, lists and maps too."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def truth_text(truth: Any) -> str | None:
    """Return a right answer as text: what is no text, as JSON, so that 18 is ``"18"``."""
    return truth if truth is None or isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def takes_any_truth(reward: F) -> F:
    """Have a reward function get the right answer as text, of whatever type it is given."""

    @functools.wraps(reward)
    def judge(response: str, truth: Any, **more: Any) -> Any:
        return reward(response, truth_text(truth), **more)

    return cast(F, judge)
