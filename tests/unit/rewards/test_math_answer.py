from fractions import Fraction

import pytest

from trinity_mq.rewards.math.answers import extract_answer
from trinity_mq.rewards.math.math_answer import math_answer


def accuracy(response, truth):
    return math_answer(response, truth, finished=True)["accuracy"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7", 7),
        ("#### 18", 18),
        ("#### $1,234.50 a day", Fraction("1234.5")),
        ("\\boxed{\\frac{1}{2}}", Fraction(1, 2)),
        ("\\boxed{\\dfrac{3}{4}}", Fraction(3, 4)),
        ("\\boxed{0.5}", Fraction(1, 2)),
        ("\\boxed{1{,}234}", 1234),
        ("\\boxed{1\\,234}", 1234),
        ("\\boxed{18 \\text{ dollars}}", 18),
        ("\\boxed{x = -5}", -5),
        ("\\boxed{\\frac{\\$8}{2}} 3", 4),
        ("1 1/2 or $1\\frac{1}{2}$", Fraction(3, 2)),
        ("so 5 x 3 = 15", 15),
        ("She has 5 eggs * 3 = 15 eggs, an 18-year-old", 18),
        ("it is 9*2=$<<9*2=18>>18 a day", 18),
        ("it takes 50% * 20 = 10", 10),
        ("5km or 18 m^2", 18),
        ("The answer is between 17 and 18.", None),
        ("<answer>not 18</answer>", None),
        ("<answer>17 or 18</answer>", None),
        ("12*3 = 38", 38),
        ("it is \u22125 degrees", -5),
        ("-$5 or $-6", -6),
        ("16-3", 13),
        ("50%", 50),
        ("half: 1/2.", Fraction(1, 2)),
        ("1,2", None),
        ("12,345,678", 12_345_678),
        (".5 is 0.5.", Fraction(1, 2)),
        ("#### Final answer\n\\boxed{42}", 42),
        ("\\boxed{41}\n#### 42", 41),
        ("#### 41\nno: \\boxed{42}", 42),
        ("#### 3 or 4\nthe end 5", None),
        ("at 10:30", None),
        ("$x^7$", None),
        ("so $8=7$", None),
        ("so $2x = 7$", None),
        ("so 60 \u2013 .75 x 80 = 0, \u221a(144) = 12", 12),
        ("from 25 blocks \u2013 5 = 20 blocks", 20),
        ("he bakes 400g / 200g = 2 loaves, 3*4m = 12m from the end", 12),
        ("the answer as a percentage: 3 pins / 12 * 100% = 25%", 25),
        ("\\boxed{7", 7),
        ("3/0", None),
        ("none", None),
        ("", None),
        ("9" * 1000, None),
    ],
)
def test_the_number_that_is_stated(text, number):
    found = extract_answer(text, finished=True)
    assert (found and found.number) == number


def test_without_a_truth_nothing_is_right():
    assert accuracy("7", None) == 0
    assert accuracy("7", "no number") == 0
    assert accuracy("no number", "no number") == 0


@pytest.mark.parametrize("truth", ["\\sqrt{2}", "(1,2)", "x+1", "10:30", "$\\frac{\\sqrt{3}}{2}$"])
def test_a_truth_that_is_no_number_is_not_reduced_to_one(truth):
    for number in ("1", "2", "30"):
        assert accuracy(f"The answer is {number}.", truth) == 0
        assert accuracy(f"\\boxed{{{number}}}", truth) == 0
    assert accuracy(f"\\boxed{{{truth}}}", truth) == 1


@pytest.mark.parametrize(
    "text",
    [
        "2 + 16",
        "The answer is 2 + 16.",
        "20 - 2",
        "2 * 9",
        "\\boxed{2 \\cdot 9}",
        "(2)(9)",
        "36/2",
        "\\boxed{\\frac{36}{2}}",
        "\\boxed{x = 2 \\cdot 9}",
        "2 + 16 =",
        "\\boxed{3^2 + 9}",
    ],
)
def test_a_calculation_that_is_left_to_do_is_no_number(text):
    assert extract_answer(text, finished=True).number == 18, "it has the value"
    assert accuracy(text, "18") == 0
    assert accuracy(text, "20 - 2") == 1, "the right answer is a calculation itself"


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("2 + 16 = 18", "18"),
        ("18 = 2 + 16", "18"),
        ("\\boxed{x = 2 \\cdot 9 = 18}", "18"),
        ("3/4", "0.75"),
        ("\\boxed{\\frac{6}{8}}", "3/4"),
        ("1 3/4", "1.75"),
        ("\\boxed{3 \\times 10^{5}}", "300000"),
        ("10^3", "1000"),
        ("-5", "-5"),
    ],
)
def test_fractions_and_powers_of_ten_are_numbers(text, truth):
    assert accuracy(text, truth) == 1


def test_equal_numbers_written_differently():
    assert accuracy("\\boxed{\\frac{7}{2}}", "#### 3.50") == 1
    assert accuracy("3.5000001", "3.5") == 0
