"""Which answer a text states, and whether it is right: exactly for numbers, by math-verify for the rest."""

import json
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinity_mq.rewards import create_reward, parts_of
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.rewards.math import answers
from trinity_mq.rewards.math.answers import LONGEST, equal, extract_answer, is_correct, read
from trinity_mq.rewards.math.grammar import plain, quantities
from trinity_mq.rewards.math.math_answer import math_answer
from trinity_mq.rewards.math.rewards import accuracy_reward, math_boxed

TABLES = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))
GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(("text", "answer"), TABLES["stated"])
def test_what_is_stated(text: str, answer: str | None) -> None:
    found = extract_answer(text, finished=True)
    assert (found and found.text) == answer


@pytest.mark.parametrize(("text", "number"), [*TABLES["numbers"], ("9" * 1000, None)])
def test_the_number_that_is_stated(text: str, number: str | None) -> None:
    found = extract_answer(text, finished=True)
    assert (found and found.number) == (None if number is None else Fraction(number))


def test_without_its_end_a_response_states_only_what_it_marks() -> None:
    for text in ("2", "The answer is 2.", "\\boxed{2", "<answer>2", "#### Step 2\nIt is"):
        assert extract_answer(text, finished=False) is None


TOO_LONG = "1" * (LONGEST + 1)


@pytest.mark.parametrize(
    ("response", "truth", "right"), [*TABLES["exact"], (f"\\boxed{{{TOO_LONG}}}", "1", False), ("5", TOO_LONG, False)]
)
@pytest.mark.usefixtures("exact_only")
def test_ordinary_answers_cost_no_second_process(response: str, truth: str | None, right: bool) -> None:
    assert is_correct(response, truth, finished=True) is right


@pytest.mark.parametrize(("response", "truth", "right"), TABLES["judged"])
def test_the_rest_is_judged_mathematically(response: str, truth: str, right: bool) -> None:
    assert is_correct(response, truth, finished=True) is right


def accuracy(response: str, truth: str | None) -> float:
    return math_answer(response, truth, finished=True)["accuracy"]


@pytest.mark.parametrize("truth", ["\\sqrt{2}", "(1,2)", "x+1", "10:30", "$\\frac{\\sqrt{3}}{2}$"])
def test_a_truth_that_is_no_number_is_not_reduced_to_one(truth: str) -> None:
    for number in ("1", "2", "30"):
        assert accuracy(f"The answer is {number}.", truth) == 0
        assert accuracy(f"\\boxed{{{number}}}", truth) == 0
    assert accuracy(f"\\boxed{{{truth}}}", truth) == 1
    assert accuracy("no number", "no number") == 0


CALCULATIONS = ["2 + 16", "The answer is 2 + 16.", "20 - 2", "2 * 9", "(2)(9)", "36/2", "2 + 16 ="]
CALCULATIONS += [f"\\boxed{{{formula}}}" for formula in ("2 \\cdot 9", "\\frac{36}{2}", "x = 2 \\cdot 9", "3^2 + 9")]


@pytest.mark.parametrize("text", CALCULATIONS)
def test_a_calculation_that_is_left_to_do_is_no_number(text: str) -> None:
    found = extract_answer(text, finished=True)
    assert found is not None
    assert found.number == 18, "it has the value"
    assert accuracy(text, "18") == 0
    assert accuracy(text, "20 - 2") == 1, "the right answer is a calculation itself"


def test_a_cut_response_counts_only_with_a_marked_answer() -> None:
    assert not is_correct("3 + 4 = 7", "7", finished=False)
    assert is_correct("#### 7\nand then", "7", finished=False)
    assert is_correct("\\boxed{7} and", "7", finished=False)


def same_number(one: str, other: str) -> bool:
    return equal(read(one, latex=True), read(other, latex=True))


NUMBERS = st.integers(-(10**12), 10**12)


@given(top=NUMBERS, bottom=st.integers(1, 10**6), other=NUMBERS)
@settings(deadline=None)
def test_numbers_are_compared_exactly(top: int, bottom: int, other: int) -> None:
    sign = "-" if top < 0 else ""
    written = [f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}", f"{top}/{bottom}"]
    for one in written[int(top < 0) :]:
        assert same_number(f"{top}/{bottom}", one)
        assert same_number(f"{other}/{bottom}", one) == (other == top)
    assert same_number(f"{top:,}", str(top))


@given(response=st.text(max_size=60), truth=st.text(max_size=20))
@settings(max_examples=40, deadline=None)
def test_no_text_makes_it_fail(response: str, truth: str) -> None:
    assert is_correct(f"\\boxed{{{response}}}", truth, finished=True) in {True, False}
    assert is_correct(response, truth, finished=True) in {True, False}


@example(truth="*\x1f")  # white space, if a rare one
@given(truth=st.text(min_size=1, max_size=40).filter(lambda text: text.strip() and not set("{}\\<#") & set(text)))
@settings(deadline=None)
def test_the_right_answer_is_right(truth: str) -> None:
    assert is_correct(f"I say \\boxed{{{truth}}}", truth, finished=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "split", "count"),
    [("math_equal_format", "train", 7473), ("math_equal_format", "test", 1319), ("math_equal", "test", 1319)],
)
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not beside this checkout")
@pytest.mark.usefixtures("exact_only")
def test_every_reference_solution_is_right_and_no_changed_one(name: str, split: str, count: int) -> None:
    reward = create_reward(name, {})
    lines = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == count
    for number, solution in enumerate(json.loads(line)["answer"] for line in lines):
        assert parts_of(reward, solution, solution, finished=True) == {"accuracy": 1.0}, solution
        steps, answer = solution.rsplit("#### ", 1)
        forms = (f"{steps}#### %s", "Therefore \\boxed{%s}.", "The answer is %s.")
        assert parts_of(reward, forms[1 + number % 2].replace("%s", answer), solution, finished=True) == {
            "accuracy": 1.0
        }, solution
        for place, wrong in enumerate(changed(answer), number):
            response = forms[place % 3].replace("%s", wrong)
            assert parts_of(reward, response, solution, finished=True) == {"accuracy": 0.0}, (response, solution)


def changed(answer: str) -> tuple[str, ...]:
    """Other numbers, made from one."""
    digits, sign = answer.replace(",", "").lstrip("-"), "-" if answer.startswith("-") else ""
    turned = "1" if digits == "0" else f"{'' if sign else '-'}{digits}"
    return f"{sign}{digits}1", f"{sign}1{digits}", f"{answer}.5", str(int(sign + digits) + 1), turned


def test_the_second_process_starts_with_the_first_question_only() -> None:
    code = (
        "import psutil\n"
        "from trinity_mq.rewards.math import answers\n"
        "from trinity_mq.rewards.math.answers import same\n"
        "assert answers.is_correct('#### 5', '5', finished=True)\n"
        "assert not same('x', 'x' * 1000) and not same('{' * 10**6, 'x')\n"
        "assert psutil.Process().children() == []\n"
        "assert answers.is_correct('\\\\boxed{x+1}', '1+x', finished=True)\n"
        "assert len(psutil.Process().children()) == 1\n"
        "import sys; assert 'sympy' not in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- truths that are numbers or booleans, and the forms of numbers in answers


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


@pytest.mark.parametrize(("truth", "answer"), TABLES["other_numbers"])
def test_other_numbers_stay_wrong(truth: float, answer: str) -> None:
    for reward in (accuracy_reward, math_answer, math_boxed):
        assert reward(rf"\boxed{{{answer}}}", truth, finished=True)["accuracy"] == 0.0  # type: ignore[operator]


@pytest.mark.parametrize("power", ["999999999", "-999999999", "9" * 500, "1000", "-1000"])
def test_a_power_beyond_all_numbers_costs_no_time(power: str) -> None:
    started = time.process_time()
    for written in (f"1e{power}", f"10^{{{power}}}", f"2^{{{power}}}", f"3^{power}", f"(1/3)^{{{power}}}"):
        assert read(written, latex=True).number != 1
        assert accuracy(rf"\boxed{{{written}}}", "1") == accuracy(r"\boxed{1}", written) == 0
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
    for reward in ("math_equal", "math_answer", "math_boxed", "math_dapo"):
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
