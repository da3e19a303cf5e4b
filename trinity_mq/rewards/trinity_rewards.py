"""Rewards under the names of Trinity-RFT, with its parts, sizes and comparisons.

The classes can be called and derived from as in Trinity-RFT: ``MathRewardFn()(response=..., truth=...)`` returns the
parts. They differ from the rewards of this project in the text that counts as an answer
(:mod:`trinity_mq.rewards.math.trinity_answers`) and in the format; :data:`trinity_mq.renamed.CHANGED_NAMES` lists the
project's own rewards.

Differences to Trinity-RFT 0.6.0: a comparison that needs too much time is a wrong answer and not an error, an absent
ground truth is a wrong answer, and a ground truth that is a number is read as its text.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity_mq.rewards.countdown import parse_game
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.rewards.math.answers import compare
from trinity_mq.rewards.math.rewards import overlong_penalty
from trinity_mq.rewards.math.trinity_answers import boxed_equal, tagged_answers

Parts = dict[str, float]
"""Parts of a reward by name."""

FORMAT_SCORE = 0.1
ANSWER_TAGS = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"
"""Pattern of the format that :class:`MathRewardFn` rewards."""
LINE_TAGS = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
"""Pattern of the format that :class:`FormatReward` rewards by default: each tag on a line of its own."""


def simple_answer_parser(response: str) -> list[Any]:
    """Return the answers that math-verify reads in a text, or in the text's first ``<answer></answer>`` within a line.

    As the ``answer_parser`` of a reward, this function selects the comparison ``parsed``, which runs in a child
    process.
    """
    from math_verify import parse

    answers: list[Any] = parse(next(tagged_answers(response), response), parsing_timeout=None)
    return answers


class AccuracyReward:
    """Part ``accuracy``: 1 if math-verify reads equal answers in response and truth, else 0.

    Args:
        answer_parser: Reads the answers of a text. None: math-verify reads the marked formulas alone, a box first.
    """

    def __init__(self, answer_parser: Callable[[str], Any] | None = None) -> None:
        self.answer_parser = answer_parser

    def __call__(self, response: str, prompt: str | None = None, truth: Any = None) -> Parts:
        """Return the part; ``prompt`` is ignored."""
        wanted = truth_text(truth)
        return {"accuracy": float(wanted is not None and self._equal(response or "", wanted))}

    def _equal(self, response: str, truth: str) -> bool:
        if self.answer_parser is None:
            return compare("marked", response, truth).right
        if self.answer_parser is simple_answer_parser:
            return compare("parsed", response, truth).right
        from math_verify import verify

        answers = self.answer_parser(response), self.answer_parser(truth)
        return bool(verify(*answers, timeout_seconds=None))


class FormatReward:
    """Part ``format_score``: 0.1 if the response has the format, else -0.1.

    Args:
        pattern: Regular expression that matches from the beginning of a response. ``.`` matches a line break, and
            ``^`` and ``$`` match at each line. None: :data:`LINE_TAGS`.
    """

    def __init__(self, pattern: str | None = None) -> None:
        self.pattern = pattern or LINE_TAGS
        self._matches = _FORMATS.get(self.pattern) or re.compile(self.pattern, re.DOTALL | re.MULTILINE).match

    def __call__(self, response: str, **_: Any) -> Parts:
        """Return the part."""
        return {"format_score": FORMAT_SCORE if self._matches(response or "") else -FORMAT_SCORE}


def _has_answer_tags(response: str) -> bool:
    """Return whether :data:`ANSWER_TAGS` matches, in linear time."""
    start = response.find("<think>")
    if start < 0:
        return False
    between = re.compile(r"</think>\s*<answer>").search(response, start + len("<think>"))
    return between is not None and bool(re.compile(r"</answer>[^\S\n]*(?:\n|\Z)").search(response, between.end()))


def _has_line_tags(response: str) -> bool:
    """Return whether :data:`LINE_TAGS` matches, in linear time."""
    opening, between = "<think>\n", "\n</think>\n<answer>\n"
    if not response.startswith(opening):
        return False
    place = response.find(between, len(opening))
    return place >= 0 and bool(re.compile(r"\n</answer>(?:\n|\Z)").search(response, place + len(between)))


_FORMATS: dict[str, Callable[[str], Any]] = {ANSWER_TAGS: _has_answer_tags, LINE_TAGS: _has_line_tags}


class MathRewardFn:
    """Parts ``accuracy`` (0 or 1) and ``format_score`` (0.1 or -0.1) for thoughts and an answer in tags.

    Args:
        answer_parser: As in :class:`AccuracyReward`.
        pattern: As in :class:`FormatReward`.
    """

    DEFAULT_FORMAT_PATTERN = ANSWER_TAGS
    DEFAULT_ANSWER_PARSER = staticmethod(simple_answer_parser)

    def __init__(
        self, answer_parser: Callable[[str], Any] | None = simple_answer_parser, pattern: str | None = ANSWER_TAGS
    ) -> None:
        self.accuracy_reward = AccuracyReward(answer_parser)
        self.format_reward = FormatReward(pattern)

    def __call__(self, response: str, prompt: str | None = None, truth: Any = None) -> Parts:
        """Return both parts; ``prompt`` is ignored."""
        return {**self.accuracy_reward(response, prompt, truth), **self.format_reward(response)}


def validate_think_pattern(text: str) -> bool:
    """Return whether a text has ``<think>`` once and ``</think>`` once, in this order."""
    return text.count("<think>") == text.count("</think>") == 1 and text.find("<think>") < text.find("</think>")


def compute_score_v0(solution_str: str, ground_truth: Any) -> float:
    r"""Return 1.0 if the content of the last ``\boxed{}`` has the normal form of the truth, else 0.0."""
    wanted = truth_text(ground_truth)
    return float(wanted is not None and boxed_equal(solution_str or "", wanted).right)


def compute_score(solution_str: Any, ground_truth: Any) -> tuple[float, str]:
    """Return 1.0 if a solution is right by the comparison of :class:`MathDAPORewardFn`, else 0.0, and its answer."""
    result = compare("dapo", str(solution_str), "" if ground_truth is None else str(ground_truth))
    return float(ground_truth is not None and result.right), result.answer or ""


def grade_answer(given_answer: str | None, ground_truth: str) -> tuple[bool, str]:
    """Return whether an extracted answer equals the truth by prm800k's comparisons, and the answer's normal form."""
    result = compare("graded", given_answer, ground_truth) if given_answer is not None else None
    return (False, "") if result is None else (result.right, result.answer or "")


class MathBoxedRewardFn:
    """Parts ``accuracy`` (0 or 1) and ``format_score`` (0, or a penalty for missing thoughts) for a boxed answer.

    Args:
        arguments: Ignored.
    """

    def __init__(self, **arguments: Any) -> None:
        pass

    def __call__(
        self,
        response: str,
        truth: Any = None,
        with_think: bool | None = False,
        format_score_coef: float | None = FORMAT_SCORE,
        **_: Any,
    ) -> Parts:
        """Return both parts.

        Args:
            response: The text of the response.
            truth: The answer, or a text with the answer in a box.
            with_think: Whether a response without thoughts in one pair of tags is penalised.
            format_score_coef: The penalty; None or 0 means 0.1.
        """
        is_formed = not with_think or validate_think_pattern(response or "")
        return {
            "accuracy": compute_score_v0(response, truth),
            "format_score": 0.0 if is_formed else -(format_score_coef or FORMAT_SCORE),
        }


class MathDAPORewardFn:
    """Parts ``accuracy`` (1 or -1) and ``format_score``, the penalty for long responses (arXiv 2503.14476, section
    3.4).

    Args:
        enable_overlong_penalty: Whether long responses are penalised. The other arguments are then required.
        penalty_factor: Size of the full penalty.
        max_response_length: Number of tokens at which the penalty is full.
        cache_length: Number of tokens before ``max_response_length`` over which the penalty grows.

    Raises:
        ValueError: The penalty is on, and an argument is missing or ``cache_length`` is not below
            ``max_response_length``.
    """

    def __init__(
        self,
        enable_overlong_penalty: bool | None = None,
        penalty_factor: float | None = None,
        max_response_length: int | None = None,
        cache_length: int | None = None,
    ) -> None:
        self.enable_overlong_penalty, self.penalty_factor = enable_overlong_penalty, penalty_factor
        self.max_response_length, self.cache_length = max_response_length, cache_length
        if enable_overlong_penalty and (
            penalty_factor is None
            or max_response_length is None
            or cache_length is None
            or not 0 < cache_length < max_response_length
        ):
            raise ValueError(
                f"penalty_factor is {penalty_factor}, max_response_length {max_response_length} and cache_length "
                f"{cache_length}; enable_overlong_penalty needs all three, with cache_length below max_response_length"
            )

    def __call__(
        self, response: str, response_token: Sequence[int] | None = None, truth: Any = None, **more: Any
    ) -> Parts:
        """Return both parts, and store the answers in ``info`` if it is given.

        Args:
            response: The text of the response.
            response_token: Token ids of the response ``[response]``. The penalty needs them.
            truth: The answer.
            more: ``info`` gets ``ground_truth`` and ``extracted_answer``; other arguments are ignored.

        Raises:
            ValueError: The penalty is on, and the tokens are not given.
        """
        result = compare("dapo", response or "", str(truth_text(truth)))
        if more.get("info") is not None:
            more["info"].update(ground_truth=truth, extracted_answer=result.answer)
        penalty = self.compute_overlong_penalty(response_token) if self.enable_overlong_penalty else 0.0
        return {"accuracy": 1.0 if result.right and truth is not None else -1.0, "format_score": penalty}

    def compute_overlong_penalty(self, response_token: Sequence[int] | None) -> float:
        """Return 0 up to ``max_response_length - cache_length`` tokens, then a linear decrease to
        ``-penalty_factor``.

        Raises:
            ValueError: The tokens or the arguments of the penalty are not given.
        """
        if (
            response_token is None
            or self.max_response_length is None
            or self.cache_length is None
            or self.penalty_factor is None
        ):
            raise ValueError(
                "the penalty for long responses needs the response's tokens, which this workflow does not give, and "
                "its three arguments; use math_boxed_workflow, or enable_overlong_penalty: false"
            )
        return self.penalty_factor * overlong_penalty(len(response_token), self.max_response_length, self.cache_length)


# -- confidence

_TAG_NAMES = ("think", "answer", "analysis", "confidence")
_TAG = re.compile(rf"</?(?:{'|'.join(_TAG_NAMES)})>")
_TERMINAL = tuple(tag for name in _TAG_NAMES for tag in (f"<{name}>", f"</{name}>"))
_WEIGHTS = {"format": 0.5, "accuracy": 0.5, "brier": 0.5, "mean_confidence": 1e-5, "confidence_one_or_zero": 1e-5}


class RLCRRewardFn:
    """Weighted parts for a right answer with a calibrated confidence (RLCR, arXiv 2507.16806).

    ``format`` is 1 if the response ends with ``<think>``, ``<answer>``, ``<analysis>`` and ``<confidence>`` in this
    order. With it, ``accuracy`` is 1 for a right answer, and ``brier`` is 1 minus the square of accuracy minus
    confidence. ``mean_confidence`` is the last stated confidence, and ``confidence_one_or_zero`` is 1 if this
    confidence is below 0.01 or above 0.99.

    Args:
        weights: A finite factor for each of the five parts. None: 0.5 for the first three, and 0.00001 for the others.
        answer_parser: As in :class:`AccuracyReward`.

    Raises:
        ValueError: ``weights`` does not have a finite factor for exactly these parts.
    """

    def __init__(
        self, weights: Mapping[str, Any] | None = None, answer_parser: Callable[[str], Any] = simple_answer_parser
    ) -> None:
        self.weights = {**(_WEIGHTS if weights is None else weights)}
        is_number = {name: type(value) in (int, float) and math.isfinite(value) for name, value in self.weights.items()}
        if self.weights.keys() != _WEIGHTS.keys() or not all(is_number.values()):
            raise ValueError(f"weights is {weights!r:.200}, wanted a finite number for each of {', '.join(_WEIGHTS)}")
        self._accuracy = AccuracyReward(answer_parser)

    def __call__(self, response: str, prompt: str | None = None, truth: Any = None, **_: Any) -> Parts:
        """Return the five parts, multiplied by their weights; ``prompt`` is ignored."""
        stated, terminal = _last_confidence(response or ""), _terminal(response or "")
        parts = dict.fromkeys(_WEIGHTS, 0.0)
        if stated is not None:
            parts |= {"mean_confidence": stated, "confidence_one_or_zero": float(not 0.01 <= stated <= 0.99)}
        if terminal is not None:
            answer, confidence = terminal
            parts["format"] = 1.0
            if truth is not None:
                parts |= self._accuracy(answer, truth=truth)
                parts["brier"] = 1.0 - (parts["accuracy"] - confidence) ** 2
        return {name: float(self.weights[name] * value) for name, value in parts.items()}


def _confidence(text: str) -> float | None:
    """Return the number in ``text`` if all of it is a number from 0 to 1, else None."""
    try:
        number = float(text.strip())
    except ValueError:
        return None
    return number if 0.0 <= number <= 1.0 else None


def _last_confidence(response: str) -> float | None:
    start, end = response.rfind("<confidence>"), response.rfind("</confidence>")
    content = response[start + len("<confidence>") : end]
    return _confidence(content) if 0 <= start < end and not _TAG.search(content) else None


def _terminal(response: str) -> tuple[str, float] | None:
    """Return answer and confidence of a response whose tags are closed one after the other and end in the wanted order
    with nothing between or behind them; None for other responses.
    """
    tags = list(_TAG.finditer(response))
    pairs = zip(tags[::2], tags[1::2], strict=False)
    if len(tags) % 2 or any(opening[0].replace("<", "</") != closing[0] for opening, closing in pairs):
        return None
    last = tags[-len(_TERMINAL) :]
    if tuple(tag[0] for tag in last) != _TERMINAL:
        return None
    gaps = [response[last[place].end() : last[place + 1].start()] for place in (1, 3, 5)]
    if any(map(str.strip, (*gaps, response[last[-1].end() :]))):
        return None
    confidence = _confidence(response[last[6].end() : last[7].start()])
    return None if confidence is None else (response[last[2].end() : last[3].start()], confidence)


# -- countdown

MAX_FORMULA = 1000
MAX_BITS = 4096
"""Maximum bits of the result of a power, by an estimate from above. A formula with a larger power has no value."""

_FORMULA = re.compile(r"[\d+\-*/().\s]+")
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class CountDownRewardFn:
    """Part ``score``: 1 for a formula with the target value that uses each number once, 0.1 for any other content of
    the tags, 0 without tags.

    The formula is in the last ``<answer></answer>`` of the last line. It may use ``+ - * / // **`` and parentheses.
    """

    def __call__(self, response: str, prompt: str | None = None, truth: Any = None) -> Parts:
        """Return the part; ``prompt`` is ignored.

        Args:
            response: The text of the response.
            prompt: Ignored.
            truth: JSON ``{"target": 24, "numbers": [1, 2, 3, 4]}``.

        Raises:
            ValueError: ``truth`` does not have this form.
        """
        target, numbers = parse_game(truth_text(truth))
        *_, stated = (None, *tagged_answers((response or "").rpartition("\n")[2]))
        if stated is None:
            return {"score": 0.0}
        formula = stated.strip()
        used = [int(digits) for digits in re.findall(r"\d+", formula[:MAX_FORMULA])]
        if len(formula) > MAX_FORMULA or sorted(used) != sorted(numbers):
            return {"score": FORMAT_SCORE}
        value = _value(formula)
        return {"score": 1.0 if value is not None and abs(value - target) < 1e-5 else FORMAT_SCORE}


def _value(formula: str) -> float | None:
    """Return the value of a formula, computed as Python computes it; None if it has no value."""
    if not _FORMULA.fullmatch(formula):
        return None
    try:
        value = _evaluated(ast.parse(formula, mode="eval").body)
        return value if isinstance(value, int | float) and math.isfinite(value) else None
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_evaluated(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            first, second = _evaluated(left), _evaluated(right)
            bits = first.bit_length() if isinstance(first, int) else 64
            if isinstance(operation, ast.Pow) and bits * abs(second) > MAX_BITS:
                raise OverflowError("the power is too large")
            return _OPERATIONS[type(operation)](first, second)
    raise ValueError(f"{type(node).__name__} is no operation")
