"""Reward for the countdown game: combine the given numbers into a formula with the target value."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.rewards.ground_truth import accept_any_truth_type
from trinity_mq.rewards.text import last_boxed, last_tagged

LONGEST = 300
"""Maximum characters of a formula."""
MAX_DIGITS = 20

_NODES = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub)
_ALLOWED = re.compile(r"[\d+\-*/() ]+")
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u00b7": "*"})


class FormulaError(ValueError):
    """A text is too long, or is not a formula of whole numbers, + - * / and parentheses."""


@accept_any_truth_type
def countdown_reward(
    response: str,
    truth: str | None,
    *,
    finished: bool,
    format_score: float = 0.1,
    score: float = 1.0,
    prompt_end: str | None = None,
) -> dict[str, float]:
    r"""Return accuracy ``score`` for a formula that uses each number once and evaluates to the target, ``format_score``
    for any other formula, 0 without a formula.

    The default scores follow TinyZero (https://github.com/Jiayi-Pan/TinyZero). Values are compared exactly, as
    fractions.

    Args:
        response: Its formula is in the last ``<answer></answer>`` after the thoughts, else in the last ``\boxed{}``
            there. Text from the first ``=`` in it is ignored.
        truth: JSON ``{"target": 24, "numbers": [1, 2, 3, 4]}``.
        finished: Ignored: a complete formula counts also in a truncated response.
        format_score: The part ``format_score`` for a formula that is not right.
        score: The accuracy of a right formula.
        prompt_end: The prompt, or its last characters, which may open the thoughts. None: unknown.

    Raises:
        ValueError: ``truth`` does not have this form.
    """
    target, numbers = parse_game(truth)
    answer = after_thoughts(response, prompt_end)
    stated = last_tagged(answer) or last_boxed(answer)
    try:
        tree = _parse(stated[1]) if stated else None
    except FormulaError:
        tree = None
    if tree is None:
        return {"accuracy": 0.0, "format_score": 0.0}
    try:
        right = Counter(_numbers(tree)) == Counter(numbers) and _value(tree) == target
    except ZeroDivisionError:
        right = False
    return {"accuracy": score if right else 0.0, "format_score": 0.0 if right else format_score}


def formula_value(text: str) -> Fraction:
    """Return the value of a formula of whole numbers, + - * / and parentheses, without executing code.

    Raises:
        FormulaError: The text is not such a formula.
        ZeroDivisionError: The formula divides by zero.
    """
    return _value(_parse(text))


def parse_game(truth: str | None) -> tuple[float, list[int]]:
    """Return target and numbers of a game.

    Raises:
        ValueError: ``truth`` is not JSON with ``target`` and ``numbers``.
    """
    try:
        game = json.loads(truth or "")
        target, numbers = game["target"], game["numbers"]
        is_list = isinstance(numbers, list) and all(isinstance(number, int) for number in numbers)
        if is_list and isinstance(target, int | float):
            return target, numbers
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    shown = (truth or "")[:80]
    raise ValueError(f'the right answer is {shown!r}, wanted JSON such as {{"target": 24, "numbers": [1, 2, 3, 4]}}')


def _parse(text: str) -> ast.expr:
    """Return the syntax tree of a formula. It is parsed as Python and never executed."""
    if len(text) > LONGEST:
        raise FormulaError(f"{len(text)} characters, wanted at most {LONGEST}")
    text = text.replace("\\times", "*").replace("\\div", "/").replace("\\cdot", "*").translate(_SIGNS)
    text = text.partition("=")[0].strip()
    if not _ALLOWED.fullmatch(text) or re.search(rf"\d{{{MAX_DIGITS}}}", text):
        raise FormulaError(f"{text!r} holds something other than whole numbers, + - * / and parentheses")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise FormulaError(f"{text!r} is not a formula: {error}") from error
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise FormulaError(f"{text!r} uses {type(node).__name__}, wanted + - * / and parentheses only")
    return tree


def _numbers(tree: ast.expr) -> Iterator[object]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))


def _value(tree: ast.expr) -> Fraction:
    match tree:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _value(left), _value(right)
            match op:
                case ast.Add():
                    return first + second
                case ast.Sub():
                    return first - second
                case ast.Mult():
                    return first * second
            return first / second
    raise FormulaError(f"unexpected {type(tree).__name__}")
