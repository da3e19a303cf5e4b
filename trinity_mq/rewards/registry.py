"""Reward functions by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol

from trinity_mq.rewards.lookup import lookup

REWARDS: Mapping[str, str] = {
    "char_match": "trinity_mq.rewards.char_match:char_match",
    "exact_match": "trinity_mq.rewards.exact_match:exact_match",
    "format_reward": "trinity_mq.rewards.format_reward:format_reward",
    "gsm8k": "trinity_mq.rewards.math_answer:math_answer",
    "math_answer": "trinity_mq.rewards.math_answer:math_answer",
}
"""Built-in reward functions."""

ACCURACY = "accuracy"
"""The part that evaluation reports: 1.0 for a right answer, else 0.0."""


class RewardFn(Protocol):
    """Judges one response. Pure: the same arguments give the same parts, whatever ran before."""

    def __call__(self, response: str, truth: str | None, *, finished: bool) -> Mapping[str, float]:
        """Return the parts of the reward by name; the reward is their sum, and each becomes a metric.

        Args:
            response: The text of the response.
            truth: What the dataset gives as the right answer.
            finished: The response ended by itself, and was not cut at a limit.
        """
        ...


class RewardError(ValueError):
    """A reward function cannot be called, or gave no parts."""


def create_reward(reward: str | Any, args: Mapping[str, Any]) -> RewardFn:
    """Return ``reward`` (a registered name, a dotted path, a function or a class) with ``args`` filled in.

    A class is made with ``args`` and its instance called; a function gets them as keywords.

    Raises:
        UnknownNameError: The name means nothing.
        RewardError: It does not take these arguments.
    """
    found = lookup("reward function", reward, REWARDS) if isinstance(reward, str) else reward
    label = reward if isinstance(reward, str) else getattr(found, "__qualname__", repr(found))
    if not callable(found):
        raise RewardError(f"reward function {label!r} is a {type(found).__name__}, wanted a function or a class")
    try:
        fn: Any
        if inspect.isclass(found):
            fn = found(**args)
            inspect.signature(fn).bind("response", "truth", finished=True)
        else:
            fn = functools.partial(found, **args)
            inspect.signature(found).bind("response", "truth", finished=True, **args)
    except TypeError as error:
        raise RewardError(
            f"reward function {label!r} cannot be called as reward(response, truth, *, finished) with "
            f"reward_fn_args {dict(args)!r}: {error}"
        ) from error
    result: RewardFn = fn
    return result


def parts_of(reward_fn: RewardFn, response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    """Call ``reward_fn`` and return its parts.

    Raises:
        RewardError: It gave something other than numbers by name.
    """
    parts = reward_fn(response, truth, finished=finished)
    if not isinstance(parts, Mapping) or not parts or not all(isinstance(value, Real) for value in parts.values()):
        raise RewardError(f"reward function gave {parts!r}, wanted its parts by name, such as {{'accuracy': 1.0}}")
    return {str(key): float(value) for key, value in parts.items()}
