"""Which answer a text states, and whether it is right: exactly for numbers, by math-verify for the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinity_mq.rewards import create_reward, parts_of
from trinity_mq.rewards.math.answers import LONGEST, equal, extract_answer, is_correct, read

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 18", "18"),
        ("#### 18\nmore", "18"),
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("so \\boxed {7} or \\fbox{8}", "8"),
        ("<answer> x + 1 </answer>", "x + 1"),
        ("<answer>#### 5</answer>", "5"),
        ("<answer>\\boxed{7}</answer>", "7"),
        ("<answer>16 - 3 - 4 = 9 eggs, times 2. The answer is 18.</answer>", "18"),
        ("\\boxed{1} no: <answer>2</answer>", "2"),
        ("<answer>2</answer> no: \\boxed{1}", "1"),
        ("\\boxed{1} #### 2", "1"),
        ("#### 1\nno: \\boxed{2}", "2"),
        ("#### 1\nThe answer is 2.", "1"),
        ("The answer is 1. It has 2 digits.", "1"),
        ("I put it in \\boxed{}.\n#### 3", "3"),
        ("\\boxed{1} and \\boxed{", "1"),
        ("<answer>2", "2"),
        ("</answer>2<answer>", "2"),
        ("\\boxed{2", "2"),
        ("#### Check\n#### Step 2\nSo it is 18.\n#### 2. Conclusion", "18"),
        ("Answer: 18\nHave 1 nice day", "18"),
        ("The answer is below.\nIt is 18.", "18"),
        ("The answer is not 5. It is 18.", "18"),
        ("The answer is in step 2. It is 18.", "18"),
    ],
)
def test_what_is_stated(text: str, answer: str) -> None:
    found = extract_answer(text, finished=True)
    assert found is not None
    assert found.text == answer


@pytest.mark.parametrize("text", ["nothing", "", "#### Check", "\\boxed{}", "<answer> </answer>"])
def test_nothing_is_stated(text: str) -> None:
    assert extract_answer(text, finished=True) is None


def test_without_its_end_a_response_states_only_what_it_marks() -> None:
    for text in ("2", "The answer is 2.", "\\boxed{2", "<answer>2", "#### Step 2\nIt is"):
        assert extract_answer(text, finished=False) is None


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("\\boxed{18}", "18", True),
        ("\\boxed{$18}", "18", True),
        ("\\boxed{$18$}", "18.0", True),
        ("\\boxed{\\$1{,}234}", "1234", True),
        ("\\boxed{18 \\text{ dollars}}.", "18", True),
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{50\\%}", "50%", True),
        ("\\boxed{19}", "18", False),
        ("\\boxed{0.33}", "1/3", False),
        ("reasons\n#### 18", "so it is\n#### 18", True),
        ("It makes 3 + 4 = 7.", "7", True),
        ("It costs $18 and then $23.", "23", True),
        ("so $x=\\frac{1}{2}$", "1/2", True),
        ("So $3 + 4 = 8$ dollars", "7", False),
        ("It costs $5.", "6", False),
        ("\\boxed{18 dollars}", "18", True),
        ("\\boxed{50\\%}", "0.5", True),
        ("\\boxed{50\\%}", "0.6", False),
        ("\\boxed{8=7}", "7", False),
        ("\\boxed{3+4=8}", "8", False),
        ("\\boxed{10/3=3.33}", "3.33", True),
        ("\\boxed{3+4=7}", "7", True),
        ("\\boxed{f(2) = 7}", "7", True),
        ("\\boxed{7 = x}", "7", True),
        ("x + 1", "x + 1", True),
        ("\\boxed{ B }", "B", True),
        ("\\boxed{}", "", False),
        ("\\boxed{}", "5", False),
        ("", "5", False),
        ("5", None, False),
        ("\\boxed{" + "1" * (LONGEST + 1) + "}", "1", False),
        ("5", "1" * (LONGEST + 1), False),
    ],
)
@pytest.mark.usefixtures("exact_only")
def test_ordinary_answers_cost_no_second_process(response: str, truth: str | None, right: bool) -> None:
    assert is_correct(response, truth, finished=True) is right


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("\\boxed{\\frac{1}{\\sqrt{3}}}", "\\frac{\\sqrt{3}}{3}", True),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", True),
        ("\\boxed{x=5}", "5", True),
        ("\\boxed{2x}", "2", False),
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", True),
        ("\\boxed{(2,1)}", "(1,2)", False),
        ("\\boxed{\\text{Monday}}", "Monday", True),
        ("#### Check\nThe answer is Monday.", "Monday", True),
        ("#### Monday", "Monday", True),
        ("#### Tuesday", "Monday", False),
        ("\\boxed{\\text{Tuesday}}", "Monday", False),
        ("So the roots are $\\{2,1\\}$.", "\\{1,2\\}", True),
        ("\\boxed{__import__('os')}", "5", False),
        ("\\boxed{1 or 2}", "1", False),
        ("\\boxed{8, 7}", "7", False),
        ("\\boxed{8, 7}", "7, 8", True),
        ("\\boxed{2x = 18}", "18", False),
        ("\\boxed{x = 2\\sqrt{2}}", "\\sqrt{8}", True),
        ("\\boxed{y = 3 + 2x}", "y = 2x + 3", True),
        ("\\boxed{abc + 3}", "3", False),
        ("<answer>abc + 3</answer>", "3", False),
        ("\\boxed{5!}", "5", False),
        ("\\boxed{5!}", "120", True),
        ("\\boxed{|-5|}", "-5", False),
        ("So $3\\sqrt{2}$", "2", False),
        ("So $3\\sqrt{2}$", "\\sqrt{18}", True),
        ("$x^7$", "7", False),
        ("$(3, 5)$", "5", False),
        ("$8, 7$", "7", False),
    ],
)
def test_the_rest_is_judged_mathematically(response: str, truth: str, right: bool) -> None:
    assert is_correct(response, truth, finished=True) is right


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
