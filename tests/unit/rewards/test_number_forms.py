r"""Truths that are numbers or booleans, and the forms of numbers in answers: powers of ten, groups, signs in words,
Unicode, choices.
"""

from __future__ import annotations

import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.rewards import create_reward, parts_of
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.rewards.math import answers
from trinity_mq.rewards.math.grammar import plain, quantities
from trinity_mq.rewards.math.math_answer import math_answer
from trinity_mq.rewards.math.rewards import accuracy_reward, math_boxed

TABLES = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))
MARKS = (
    r"\boxed{%s}",
    "<answer>%s</answer>",
    "<answer>It is %s.</answer>",
    "#### %s",
    "The answer is %s.",
    "So x = %s.",
)


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        (None, None),
        ("1e-05", "1e-05"),
        (18, "18"),
        (18.0, "18.0"),
        (0.00001, "0.00001"),
        (-2.5e-7, "-0.00000025"),
        (1e16, "10000000000000000"),
        (1e300, "1E+300"),
        (True, "true"),
        (False, "false"),
        (np.float64(0.00001), "0.00001"),
        (np.int64(18), "18"),
        (np.bool_(True), "true"),
        (Decimal("0.00001"), "0.00001"),
        (Decimal("1e999999999"), "1E+999999999"),
        (float("nan"), "NaN"),
        ([1e-05, True], "[1e-05, true]"),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_a_truth_as_text(truth: Any, text: str | None) -> None:
    assert truth_text(truth) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_each_number_is_right_for_itself(number: float) -> None:
    for written in (repr(number), truth_text(number)):
        assert accuracy_reward(rf"\boxed{{{written}}}", number, finished=True) == {"accuracy": 1.0}


FORMS = dict(TABLES["forms"])
OTHERS = (1, 2, 3, 3.2, 5, -5, 10, 12, 16, 234, 345, 567, 12345, 1e-4, 1e5, 1e-6, 1e15, 6.02, 6.02e22, 0.25, 50, -0.5)


@pytest.mark.usefixtures("exact_only")
@pytest.mark.parametrize("truth", FORMS)
def test_each_form_is_right_for_its_number_and_for_no_other(truth: float) -> None:
    verdicts = []
    for form in FORMS[truth]:
        for mark in MARKS:
            response = mark.replace("%s", form)
            for reward in (accuracy_reward, math_answer):
                for other in (truth, *OTHERS):
                    right = reward(response, other, finished=True)["accuracy"]
                    verdicts.append((response, other, right, float(other == truth)))
    assert [verdict for verdict in verdicts if verdict[2] != verdict[3]] == []


@pytest.mark.usefixtures("math_verify_questions")
@pytest.mark.parametrize(("truth", "answer"), TABLES["other_numbers"])
def test_other_numbers_stay_wrong(truth: float, answer: str) -> None:
    for reward in (accuracy_reward, math_answer, math_boxed):
        assert reward(rf"\boxed{{{answer}}}", truth, finished=True)["accuracy"] == 0.0  # type: ignore[operator]


@pytest.mark.usefixtures("math_verify_questions")
@pytest.mark.parametrize("power", ["999999999", "-999999999", "9" * 500, "1000", "-1000"])
def test_a_power_beyond_all_numbers_costs_no_time(power: str) -> None:
    started = time.process_time()
    for written in (f"1e{power}", f"10^{{{power}}}", f"2^{{{power}}}", f"3^{power}", f"(1/3)^{{{power}}}"):
        assert accuracy_reward(rf"\boxed{{{written}}}", "1", finished=True) == {"accuracy": 0.0}
        assert accuracy_reward(r"\boxed{1}", written, finished=True) == {"accuracy": 0.0}
    assert time.process_time() - started < 2.0


def test_no_text_takes_long_to_read() -> None:
    started = time.process_time()
    pieces = ["1 ", "123 ", "1e", "1e5", "√(", "sqrt(", "½", "10⁻", "minus ", "= \n", "(B) ", "(A)\\ ", "1\u2009", "x²"]
    for piece in pieces:
        quantities(plain(piece * (1000 // len(piece))), latex=True)
        answers.read(piece * (1000 // len(piece)), latex=False)
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize(("truth", "answer", "right"), TABLES["booleans"])
@pytest.mark.usefixtures("exact_only")
def test_truths_that_are_booleans(truth: Any, answer: str, right: float) -> None:
    for reward in ("accuracy_reward", "math_answer", "math_boxed", "math_dapo_reward"):
        assert parts_of(create_reward(reward, {}), rf"\boxed{{{answer}}}", truth, finished=True)["accuracy"] == right
    for sentence in (accuracy_reward, math_answer):
        assert sentence(f"The answer is {answer}.", truth, finished=True)["accuracy"] == right


CHOICE = r"\textbf{(B)}\ 12"


@pytest.mark.usefixtures("exact_only")
@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        *((truth, answer, 1.0) for truth in ("12", CHOICE) for answer in (
            "12", CHOICE, r"\textbf{(B) }12", r"\textbf{(B)}~12", r"\text{(B)} 12", "(B) 12", "(B)12", "B. 12", "B) 12",
        )),
        *((truth, answer, 1.0) for truth in ("B", "(B)", CHOICE) for answer in ("B", "(B)", r"\textbf{(B)}", CHOICE)),
        ("12", r"\textbf{(B)}\ 13", 0.0),
        (CHOICE, r"\textbf{(C)}\ 12", 0.0),
        (CHOICE, r"\textbf{(B)}\ 13", 0.0),
        (CHOICE, "13", 0.0),
        (CHOICE, "C", 0.0),
        ("B", r"\textbf{(C)}\ 12", 0.0),
        ("B", "(C)", 0.0),
        ("A", "B", 0.0),
    ],
)  # fmt: skip
def test_a_choice_with_its_letter(truth: str, answer: str, right: float) -> None:
    assert accuracy_reward(rf"\boxed{{{answer}}}", truth, finished=True) == {"accuracy": right}
    assert math_boxed(rf"\boxed{{{answer}}}", truth, finished=True)["accuracy"] == right
    if truth == CHOICE and "12" in answer:
        assert math_answer(rf"\boxed{{{answer}}}", truth, finished=True) == {"accuracy": right}


@pytest.mark.parametrize(("truth", "answer", "right"), TABLES["powers_and_roots"])
def test_powers_and_roots_of_unicode_are_judged(truth: Any, answer: str, right: float) -> None:
    assert accuracy_reward(rf"\boxed{{{answer}}}", truth, finished=True) == {"accuracy": right}
    assert accuracy_reward(f"The answer is {answer}.", truth, finished=True) == {"accuracy": right}
