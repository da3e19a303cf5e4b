r"""Rewards for a mathematically right answer, with optional credit for format and length."""

from __future__ import annotations

from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.rewards.ground_truth import accept_any_truth_type
from trinity_mq.rewards.math.answers import equal, is_correct, read, truth_answer
from trinity_mq.rewards.text import Form, has_form, last_boxed


def accuracy_reward(
    response: str, truth: str | None, *, finished: bool, prompt_end: str | None = None
) -> dict[str, float]:
    r"""Return accuracy 1 if ``response`` states the answer of ``truth`` after its thoughts, else 0.

    A response states its answer in the last ``\boxed{}`` or ``<answer></answer>``; else in the last ``####`` whose line
    reads as an answer; else in the last sentence "the answer is"; else in the last quantity or formula of the text. In
    a response cut at a limit only the first two count. :mod:`answers` has the details.
    """
    return {"accuracy": float(is_correct(after_thoughts(response, prompt_end), truth, finished=finished))}


def math_reward(
    response: str,
    truth: str | None,
    *,
    finished: bool,
    format_score: float = 0.0,
    form: Form = "think_answer",
    prompt_end: str | None = None,
) -> dict[str, float]:
    """Return accuracy 1 or 0 and, unless ``format_score`` is 0, the part ``format_score``: this value for a finished
    response in the expected ``form``, else minus this value.

    The two parts follow Trinity-RFT's ``math_reward``, where ``format_score`` is 0.1 by default.
    """
    parts = accuracy_reward(response, truth, finished=finished, prompt_end=prompt_end)
    if format_score:
        parts["format_score"] = format_score if finished and has_form(response, form, prompt_end) else -format_score
    return parts


@accept_any_truth_type
def math_boxed(
    response: str,
    truth: str | None,
    *,
    finished: bool,
    with_think: bool = False,
    format_score_coef: float = 0.1,
    prompt_end: str | None = None,
) -> dict[str, float]:
    r"""Return accuracy 1 if the last ``\boxed{}`` after the thoughts holds the answer of ``truth``, else 0, and a score
    for the format.

    Args:
        response: The text of the response.
        truth: The bare answer, or a text that marks it (:func:`answers.truth_answer`).
        finished: Whether the response ended by itself. A truncated response fails the format, but its box counts.
        with_think: True: the expected format is ``<think>...</think>`` followed by a box. False: a box alone.
        format_score_coef: Penalty of a response without the expected format: the format score is 0 or minus this value,
            as in Trinity-RFT's reward of this name.
        prompt_end: The prompt, or its last characters, which may open the thoughts. None: unknown.
    """
    box = last_boxed(after_thoughts(response, prompt_end))
    right = box is not None and bool(truth) and equal(truth_answer(truth or ""), read(box[1], latex=True))
    formed = finished and has_form(response, "think_boxed" if with_think else "boxed", prompt_end)
    return {"accuracy": float(right), "format_score": 0.0 if formed else -format_score_coef}


def overlong_penalty(length: int, max_length: int, cache_length: int) -> float:
    """Return the soft penalty for the length of a response (DAPO, arXiv 2503.14476, equation 13).

    It is 0 up to ``max_length - cache_length`` tokens, falls linearly to -1 at ``max_length``, and stays -1 beyond.
    """
    expected = max_length - cache_length
    return max(-1.0, min(0.0, (expected - length) / cache_length))


def check_lengths(max_length: int | None, cache_length: int | None) -> None:
    """Raise ValueError unless both are None, or 0 < ``cache_length`` <= ``max_length``."""
    if (max_length is None) != (cache_length is None):
        raise ValueError(
            f"max_response_length is {max_length} and cache_length is {cache_length}; give both, in tokens, or neither"
        )
    if max_length is not None and cache_length is not None and not 0 < cache_length <= max_length:
        raise ValueError(f"cache_length is {cache_length}, wanted 1 to max_response_length {max_length}")


class MathDapoReward:
    """Reward 1 for a right answer and -1 for a wrong answer (DAPO, section 2.4), plus the overlong penalty.

    Args:
        max_response_length: Number of tokens at which the penalty is full. None: no penalty.
        cache_length: Number of tokens before ``max_response_length`` over which the penalty grows.
        penalty_factor: Size of the full penalty.

    Raises:
        ValueError: The lengths do not fit; see :func:`check_lengths`.
    """

    def __init__(
        self, max_response_length: int | None = None, cache_length: int | None = None, penalty_factor: float = 1.0
    ) -> None:
        check_lengths(max_response_length, cache_length)
        self.max_response_length, self.cache_length = max_response_length, cache_length
        self.penalty_factor = penalty_factor

    def __call__(
        self,
        response: str,
        truth: str | None,
        *,
        finished: bool,
        tokens: int | None = None,
        prompt_end: str | None = None,
    ) -> dict[str, float]:
        """Return accuracy (1 or 0), ``wrong`` (0 or -1), and, if the lengths are set, ``overlong`` (0 to
        -``penalty_factor``).

        Raises:
            ValueError: The penalty is on, and the number of response ``tokens`` is unknown.
        """
        right = is_correct(after_thoughts(response, prompt_end), truth, finished=finished)
        parts = {"accuracy": float(right), "wrong": 0.0 if right else -1.0}
        if self.max_response_length is not None and self.cache_length is not None:
            if tokens is None:
                raise ValueError(
                    "the overlong penalty needs the number of response tokens, which this workflow does not give: "
                    "use the operator length_penalty instead, and no max_response_length here"
                )
            penalty = overlong_penalty(tokens, self.max_response_length, self.cache_length)
            parts["overlong"] = self.penalty_factor * penalty
        return parts
