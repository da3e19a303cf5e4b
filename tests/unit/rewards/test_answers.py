"""Which answer a text states, and whether it is right: exactly for numbers, by math-verify for the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinity_mq.rewards import create_reward, parts_of
from trinity_mq.rewards.math.answers import equal, extract_answer, is_correct, read
from trinity_mq.rewards.math.judge import LONGEST
from trinity_mq.rewards.math.math_answer import math_answer

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
    ("response", "truth", "right"),
    [*TABLES["exact"], (f"\\boxed{{{TOO_LONG}}}", "1", False), ("5", TOO_LONG, False)],
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
    [("math_reward", "train", 7473), ("math_reward", "test", 1319), ("accuracy_reward", "test", 1319)],
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
        "from trinity_mq.rewards.math.judge import same\n"
        "assert answers.is_correct('#### 5', '5', finished=True)\n"
        "assert not same('x', 'x' * 1000) and not same('{' * 10**6, 'x')\n"
        "assert psutil.Process().children() == []\n"
        "assert answers.is_correct('\\\\boxed{x+1}', '1+x', finished=True)\n"
        "assert len(psutil.Process().children()) == 1\n"
        "import sys; assert 'sympy' not in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
