"""Rewards for the text and the format of a response."""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from trinity_mq.families.thoughts import FORMATS, after_thoughts, opening_tag_of
from trinity_mq.rewards.ground_truth import BOOLEANS, accept_any_truth_type

EXACT_WEIGHT = 0.5
POSITION_WEIGHT = 0.8
LENGTH_WEIGHT = 0.2
LONGEST_BOXED = 2000
"""Maximum characters after ``\\boxed{`` that are searched for its closing brace."""
MARKS = 8
"""Maximum boxes, or tags, that are examined from the end of a text until a non-empty box or tag is found."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s?\{")

Form = Literal["boxed", "think_answer", "think_boxed"]


@accept_any_truth_type
def exact_match(response: str, truth: str | None, *, finished: bool, prompt_end: str | None = None) -> dict[str, float]:
    """Return accuracy 1 if ``response`` ended by itself and its text after the thoughts equals ``truth``, ignoring
    surrounding white space and, if ``truth`` is ``true`` or ``false``, capital letters; else 0.
    """
    answer = after_thoughts(response, prompt_end).strip()
    answers = {answer, answer.lower()} if truth in BOOLEANS else {answer}
    return {"accuracy": float(finished and truth is not None and truth.strip() in answers)}


@accept_any_truth_type
def char_match(response: str, truth: str | None, *, finished: bool, prompt_end: str | None = None) -> dict[str, float]:
    """Return accuracy (exact text after the thoughts of a response that ended by itself) and, if it is 0, partial
    credit.

    Their sum is ``0.5 exact + 0.5 (0.8 share of right positions + 0.2 right length and end)``: an exact answer has
    reward 1, any other answer at most 0.5. The weights were measured on the arithmetic examples against 0/1 rewards.
    """
    if not truth:
        return {"accuracy": 0.0, "partial_credit": 0.0}
    response = after_thoughts(response, prompt_end)
    if finished and response == truth:
        return {"accuracy": 1.0, "partial_credit": 0.0}
    right = sum(actual == expected for actual, expected in zip(response, truth, strict=False)) / len(truth)
    ended = finished and len(response) == len(truth)
    return {"accuracy": 0.0, "partial_credit": (1 - EXACT_WEIGHT) * (POSITION_WEIGHT * right + LENGTH_WEIGHT * ended)}


def format_reward(
    response: str,
    truth: str | None,
    *,
    finished: bool,
    score: float = 0.1,
    form: Form = "boxed",
    prompt_end: str | None = None,
) -> dict[str, float]:
    r"""Return the part ``format_score``: ``score`` if ``response`` ended by itself and has the format, else ``-score``.

    Alone it trains only the format and reports no accuracy: add it to another reward in your own function.

    Args:
        response: The text of the response.
        truth: Ignored.
        finished: Whether the response ended by itself.
        score: Size of the reward.
        form: ``boxed``: a non-empty ``\boxed{}`` after the thoughts. ``think_answer``: ``<think>...</think>`` and then
            ``<answer>...</answer>``, each once, and no other text (DeepSeek-R1, arXiv 2501.12948, table 1).
            ``think_boxed``: ``<think>...</think>`` once and first, followed by a ``\boxed{}``.
        prompt_end: The prompt, or its last characters. If it ends with ``<think>``, the response does not repeat that
            tag. None: unknown; then a response without that tag also has the format.
    """
    return {"format_score": score if finished and has_form(response, form, prompt_end) else -score}


def has_form(response: str, form: Form, prompt_end: str | None = None) -> bool:
    """Return whether ``response`` has the format; see :func:`format_reward`.

    Raises:
        ValueError: The format does not exist.
    """
    if form == "boxed":
        return last_boxed(after_thoughts(response, prompt_end)) is not None
    if form not in {"think_answer", "think_boxed"}:
        raise ValueError(f"form is {form!r}, wanted boxed, think_answer or think_boxed")
    opening, _ = FORMATS[0]
    is_opened = bool(opening_tag_of(prompt_end)) or (prompt_end is None and opening not in response)
    thought = _enclosed((opening if is_opened else "") + response.strip(), "think")
    if thought is None:
        return False
    rest = thought.strip()
    if form == "think_boxed":
        return last_boxed(rest) is not None
    return _enclosed(rest, "answer") == ""


def _enclosed(text: str, tag: str) -> str | None:
    """Return the text after the pair of tags at the beginning of ``text``. Return None if ``text`` does not begin with
    the tag, repeats a tag, or has nothing between the tags.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return None
    inside, _, rest = text.removeprefix(opening).partition(closing)
    return rest if inside.strip() else None


def last_tagged(text: str) -> tuple[int, str] | None:
    """Return the position and the content of the last non-empty ``<answer></answer>``, or None."""
    end = len(text)
    for _ in range(MARKS):
        end = text.rfind("</answer>", 0, end)
        start = text.rfind("<answer>", 0, max(end, 0))
        if start < 0:
            return None
        if text[start + len("<answer>") : end].strip():
            return start, text[start + len("<answer>") : end]
    return None


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Return the position and the content of the last non-empty ``\boxed{}`` or ``\fbox{}``; None without a box."""
    for opening in reversed(deque(_BOX.finditer(text), maxlen=MARKS)):
        depth = 1
        for place, character in enumerate(text[opening.end() : opening.end() + LONGEST_BOXED], opening.end()):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                if content := text[opening.end() : place].strip():
                    return opening.start(), content
                break
    return None
