"""Rewards under the names of Trinity-RFT. The expected values were computed with its release 0.6.0."""

import json
import time

import pytest

from trinity_mq.rewards import (
    compute_score,
    create_reward,
    fix_fracs,
    grade_answer,
    match_answer,
    parts_of,
    remove_right_units,
)
from trinity_mq.rewards.math.answers import compare
from trinity_mq.rewards.math.trinity_answers import number_in_words, tagged_answers
from trinity_mq.rewards.trinity_rewards import (
    ANSWER_TAGS,
    AccuracyReward,
    CountDownRewardFn,
    FormatReward,
    MathBoxedRewardFn,
    MathDAPORewardFn,
    MathRewardFn,
)

RULES = ("boxed", "qwen", "dapo", "parsed", "marked")
VERDICTS = [
    ("\\boxed{18}", "18", "11111"),
    ("\\boxed{18.0}", "18", "11110"),
    ("so \\boxed{\\frac{1}{2}}", "0.5", "00110"),
    ("\\boxed{1/2}", "\\frac12", "10100"),
    ("\\boxed{\\dfrac{1}{2}}", "\\boxed{\\frac{1}{2}}", "11111"),
    ("\\boxed{12\\text{ cm}}", "12", "11111"),
    ("\\boxed{12 apples}", "12", "11011"),
    ("\\boxed{twenty one}", "21", "11000"),
    ("\\boxed{(1, 2)}", "(1,2)", "11100"),
    ("\\boxed{x=5}", "5", "11110"),
    ("\\boxed{50\\%}", "50", "00110"),
    ("\\boxed{0.18}", "18%", "01110"),
    ("\\boxed{\\sqrt2}", "\\sqrt{2}", "10100"),
    ("\\boxed{2\\sqrt{3}}", "\\sqrt{12}", "00100"),
    ("\\boxed 7$ and more", "7", "11010"),
    ("\\fbox{7}", "7", "01100"),
    ("\\boxed{7", "7", "01100"),
    ("the final answer is 7.", "7", "01010"),
    ("The answer is $1,234$.", "1234", "01010"),
    ("I got 3 and 7", "7", "01010"),
    ("<answer>7</answer>", "7", "01010"),
    ("<answer>\\frac{14}{2}</answer>", "7", "00010"),
    ("<think>8</think> 7", "7", "01110"),
    ("\\boxed{x^2+2x+1}", "(x+1)^2", "00100"),
    ("\\boxed{2x+1}", "1+2x", "00100"),
    ("\\boxed{\\pi}", "3.14159", "00000"),
    ("\\boxed{[1,2)}", "[1, 2)", "10100"),
    ("\\boxed{90^\\circ}", "90", "11110"),
    ("\\boxed{1,234}", "1234", "01110"),
    ("\\boxed{5 million}", "5000000", "00000"),
    (
        "\\boxed{\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}}",
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "10100",
    ),
    ("\\boxed{}", "7", "00000"),
    ("", "7", "00000"),
    ("\\boxed{yes}", "Yes", "00100"),
    ("\\boxed{\\text{(B)}}", "(B)", "10100"),
    ("\\boxed{6/4}", "3/2", "00110"),
    ("\\boxed{.5}", "0.5", "11110"),
    ("\\boxed{3, 4}", "4, 3", "00000"),
    ("7 \\boxed{8} \\boxed{7}", "7", "11100"),
    ("\\boxed{2*3}", "6", "01110"),
    ("\\boxed{1e3}", "1000", "01100"),
    ("\\boxed{10_{2}}", "10", "00110"),
]
"""Response, truth, and the verdict of each rule."""


@pytest.mark.parametrize(("response", "truth", "verdicts"), VERDICTS)
def test_each_rule_gives_the_verdict_of_trinity(response: str, truth: str, verdicts: str) -> None:
    assert "".join(str(int(compare(rule, response, truth).right)) for rule in RULES) == verdicts


@pytest.mark.parametrize("rule", RULES)
def test_hostile_answers_are_wrong_and_cost_little(rule: str) -> None:
    hostile = [
        "\\boxed{__import__('os').system('exit 3')}",
        "\\boxed{9**9**9**9}",
        "\\boxed{" + "(" * 900 + ")" * 900 + "}",
        "\\boxed{" * 20_000,
        "\\boxed{" + "\\frac" * 5_000 + "}",
        "<answer>" * 20_000,
        "\\boxed{" + "1," * 900 + "}",
        "\ud800",
    ]
    begin = time.process_time()
    assert not any(compare(rule, text, "7").right for text in hostile)
    assert time.process_time() - begin < 5, "the limit of the child's processor time does not count here"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("two", 2),
        ("twenty one", 21),
        ("three hundred and five", 305),
        ("two million three thousand", 2004003),
        ("one hundred thousand", 100000),
        ("point five", 0.5),
        ("two point five", 2.5),
        ("five apples and two", 7),
        ("nineteen hundred", 1900),
        ("thousand", 1000),
        ("seven-teen", 7),
        ("two two", 4),
        ("007", 7),
        ("three hundred sixty five thousand", 365000),
    ],
)
def test_numbers_in_words_are_those_of_word2number(text: str, number: float) -> None:
    assert number_in_words(text) == number


@pytest.mark.parametrize(
    ("text", "reason"), [("no words", "no number"), ("one thousand thousand", "twice"), ("", "no")]
)
def test_texts_without_a_number_in_words(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        number_in_words(text)


@pytest.mark.parametrize(
    ("formula", "score"),
    [
        ("<answer>3 + 4</answer>", 1.0),
        ("x\n<answer>3*4</answer>", 0.1),
        ("<answer>3+4</answer>\nend", 0.0),
        ("<answer>3+4+0</answer>", 0.1),
        ("<answer>(4)--3</answer>", 1.0),
        ("<answer>4+3=7</answer>", 0.1),
        ("<answer>4**3</answer>", 0.1),
        ("<answer>1</answer><answer> (3)+(4) </answer>", 1.0),
        ("<answer>3 4</answer>", 0.1),
        ("<answer>3+4.0</answer>", 0.1),
        ("no", 0.0),
        ("<answer></answer>", 0.1),
        ("<answer>3(4)</answer>", 0.1),
    ],
)
def test_countdown(formula: str, score: float) -> None:
    reward = create_reward("countdown_reward", {})
    truth = json.dumps({"target": 7, "numbers": [3, 4]})
    assert parts_of(reward, formula, truth, finished=True) == {"score": score}


@pytest.mark.parametrize("formula", ["99**98**97**96", "99**98*97**96", "99/98**-97**96", "(0-99)**(98/97)//96"])
def test_a_countdown_power_ends_at_once(formula: str) -> None:
    truth = json.dumps({"target": 7, "numbers": [99, 98, 97, 96]})
    reward = create_reward("countdown_reward", {})
    assert parts_of(reward, f"<answer>{formula}</answer>", truth, finished=True)["score"] == 0.1
    with pytest.raises(ValueError, match="wanted JSON such as"):
        parts_of(reward, "<answer>7</answer>", "7", finished=True)


LINES = "<think>\na\n</think>\n<answer>\nb\n</answer>"


@pytest.mark.parametrize(
    ("response", "lines", "tags"),
    [
        (LINES, 0.1, 0.1),
        ("<think>a</think><answer>b</answer>", -0.1, 0.1),
        ("x <think>a</think> <answer>b</answer> \n", -0.1, 0.1),
        ("<think>a</think><answer>b</answer> c", -0.1, -0.1),
        ("<think>a</think><answer>b</answer>\nc", -0.1, 0.1),
        ("<answer>b</answer><think>a</think>", -0.1, -0.1),
        ("<think>a</think> x <answer>b</answer>", -0.1, -0.1),
        ("<think></think><answer></answer>", -0.1, 0.1),
        ("<think>\n\n</think>\n<answer>\n\n</answer>\nmore", 0.1, 0.1),
        ("<think>a<think>b</think><answer>c</answer>", -0.1, 0.1),
    ],
)
def test_formats(response: str, lines: float, tags: float) -> None:
    assert FormatReward()(response) == {"format_score": lines}
    assert FormatReward(ANSWER_TAGS)(response) == {"format_score": tags}


def test_formats_and_answers_cost_linear_time() -> None:
    begin = time.process_time()
    for text in ("<think>" * 50_000, "<think></think>" * 30_000, "<think></think><answer>" + "</answer> x" * 30_000):
        assert FormatReward(ANSWER_TAGS)(text) == {"format_score": -0.1}
    countdown, boxed = CountDownRewardFn(), MathBoxedRewardFn()
    game = '{"target": 3, "numbers": [1, 2]}'
    for text in ("<answer>" * 50_000, "<answer>1" * 50_000):
        assert countdown(text, truth=game) == {"score": 0.0}
        assert list(tagged_answers(text)) == []
    for piece in ("\\begin{array}{", "{", "degree "):
        assert boxed("\\boxed{3}", truth=piece * 50_000)["accuracy"] == 0.0
    assert countdown("<answer>9</answer><answer>1 + 2</answer><answer>", truth=game) == {"score": 1.0}
    assert time.process_time() - begin < 5


def test_math_reward_adds_accuracy_and_format() -> None:
    response = "<think>3*4</think>\n<answer>12.0</answer>"
    assert parts_of(create_reward("math_reward", {}), response, "12", finished=True) == {
        "accuracy": 1.0,
        "format_score": 0.1,
    }
    loose = create_reward("math_reward", {"pattern": "<think>"})
    assert parts_of(loose, "<think> 12", 12, finished=True) == {"accuracy": 1.0, "format_score": 0.1}
    assert parts_of(loose, "12", None, finished=True) == {"accuracy": 0.0, "format_score": -0.1}


def test_own_parsers_are_called() -> None:
    class Shouting(MathRewardFn):
        def __init__(self) -> None:
            super().__init__(answer_parser=lambda text: [text.lower()], pattern=None)

    assert Shouting()(response="YES", truth="yes") == {"accuracy": 1.0, "format_score": -0.1}
    assert AccuracyReward()(response="$\\boxed{3}$", truth="$3$") == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("response", "with_think", "coef", "parts"),
    [
        ("\\boxed{12}", False, 0.25, (1.0, 0.0)),
        ("\\boxed{12}", True, 0.25, (1.0, -0.25)),
        ("<think>a</think> \\boxed{13}", True, 0.25, (0.0, 0.0)),
        ("</think> <think> \\boxed{12}", True, 0.25, (1.0, -0.25)),
        ("<think><think></think> \\boxed{12}", True, 0.0, (1.0, -0.1)),
    ],
)
def test_boxed_reward(response: str, with_think: bool, coef: float, parts: tuple[float, float]) -> None:
    reward = create_reward("math_boxed_reward", {})
    named = {"with_think": with_think, "format_score_coef": coef}
    assert tuple(parts_of(reward, response, "12", finished=True, **named).values()) == parts


@pytest.mark.parametrize(("tokens", "penalty"), [(10, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (200, -1.0)])
def test_dapo_reward(tokens: int, penalty: float) -> None:
    args = {"enable_overlong_penalty": True, "penalty_factor": 1.0, "max_response_length": 100, "cache_length": 20}
    reward, info = create_reward("math_dapo_reward", args), dict[str, str]()
    parts = parts_of(reward, "\\boxed{6/2}", "3", finished=True, response_token=[0] * tokens, info=info)
    assert parts == {"accuracy": 1.0, "format_score": penalty}
    assert info == {"ground_truth": "3", "extracted_answer": "6/2"}


def test_dapo_reward_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="needs all three, with cache_length below"):
        MathDAPORewardFn(enable_overlong_penalty=True, max_response_length=5)
    assert MathDAPORewardFn()(response="3", truth="4") == {"accuracy": -1.0, "format_score": 0.0}
    assert MathDAPORewardFn()(response="\\boxed{None}", truth=None)["accuracy"] == -1.0, "an absent truth is wrong"
    needs = MathDAPORewardFn(True, 1.0, 5, 2)
    with pytest.raises(ValueError, match="needs the response's tokens"):
        needs(response="3", truth="4")


@pytest.mark.parametrize(
    ("response", "matched"),
    [
        ("\\boxed{7}", (True, "7")),
        ("<think>\\boxed{8}</think> 7", (False, " 7")),
        ("\\boxed{1} \\boxed{}", (False, "\\boxed{1} \\boxed{}")),
        ("\\fbox{3} x", (True, "3")),
        ("\\boxed{7", (False, "\\boxed{7")),
    ],
)
def test_plug_ins_can_match_an_answer(response: str, matched: tuple[bool, str]) -> None:
    assert match_answer(response) == matched


def test_plug_ins_can_grade_an_answer() -> None:
    assert compute_score("\\boxed{\\frac12}", "0.5") == (1.0, "\\frac12")
    assert compute_score("no", 7) == (0.0, "no")
    assert compute_score("\\boxed{None}", None) == (0.0, "None")
    assert grade_answer("2x+1", "1+2x") == (True, "2x+1")
    assert grade_answer("12\\text{ cm}", "12") == (True, "12")
    assert [grade_answer(answer, "7")[0] for answer in ("8", None, "9" * 100_000)] == [False] * 3
    assert (fix_fracs("x\\frac12"), fix_fracs("\\frac3")) == ("x\\frac{1}{2}", "\\frac3")
    assert remove_right_units("12\\text{ cm}") == "12"
    with pytest.raises(ValueError, match="two units"):
        remove_right_units("1\\text{ m} 2\\text{ cm}")


CHAIN = "<think>a</think><answer>{}</answer> <analysis>b</analysis>\n<confidence>{}</confidence>"


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        (CHAIN.format(12, 0.8), (0.5, 0.5, 0.48, 0.8e-5, 0.0)),
        (CHAIN.format(13, 0.8), (0.5, 0.0, 0.18, 0.8e-5, 0.0)),
        (CHAIN.format(12, 1), (0.5, 0.5, 0.5, 1e-5, 1e-5)),
        (CHAIN.format(12, 2), (0.0, 0.0, 0.0, 0.0, 0.0)),
        (CHAIN.format(12, 0.8) + " more", (0.0, 0.0, 0.0, 0.8e-5, 0.0)),
        ("x <confidence>0.5</confidence>", (0.0, 0.0, 0.0, 0.5e-5, 0.0)),
        ("<think>" + CHAIN.format(12, 0.8), (0.0, 0.0, 0.0, 0.8e-5, 0.0)),
        ("", (0.0, 0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_rlcr_reward(response: str, parts: tuple[float, ...]) -> None:
    found = parts_of(create_reward("rlcr_reward", {}), response, "12", finished=True)
    assert list(found) == ["format", "accuracy", "brier", "mean_confidence", "confidence_one_or_zero"]
    assert tuple(found.values()) == pytest.approx(parts)
