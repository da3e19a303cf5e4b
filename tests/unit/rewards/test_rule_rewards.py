"""Rewards of form, of the countdown game, of length and of tool calls."""

import itertools
import json
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.families.thoughts import FORMATS, HARMONY
from trinity_mq.rewards import RewardError, create_reward, parts_of
from trinity_mq.rewards.countdown import countdown_reward
from trinity_mq.rewards.math.rewards import math_boxed, math_reward, overlong_penalty
from trinity_mq.rewards.text import char_match, exact_match, has_form
from trinity_mq.rewards.tool_call import tool_call

THOUGHT = "<think>hm</think> <answer>7</answer>"
HOSTILE = [
    "<think>" * 100_000,
    "</think><answer>" * 100_000,
    "<tool_call>" * 100_000,
    "<tool_call>" + "[" * 15_000 + "</tool_call>",
    '<tool_call>{"name":"f","arguments":{"a":' + "[" * 900 + "]" * 900 + "}}</tool_call>",
    "<tool_call>" + "{" * 1_000_000 + "</tool_call>",
    '<tool_call>{"name":"f","arguments":' + json.dumps('"' * 15_000) + "}</tool_call>",
    '<tool_call>{"name":"f","arguments":{"a":' + "9" * 15_000 + "}}</tool_call>",
    "<answer>" + "(" * 290 + "</answer>",
    "<answer>" + "-" * 291 + "1</answer>",
    "<answer>" + "9" * 290 + "</answer>",
    "<answer>9**9**9**9</answer>",
    "<answer>1/0</answer>",
    "<answer>()</answer>",
    "<answer>1(2)</answer>",
    "<answer>__import__('os')</answer>",
    "<answer>True</answer>",
    "\\boxed{" * 200_000,
    "{" * 2_000_000,
    *(piece * (1_000_000 // len(piece)) for piece in ("1,234", "9", "1/", ".", "-$")),
    "#### " + "\\frac{" * 150_000,
    "\\boxed{" + "\\text{" * 150_000,
    "1e999999999",
    "\x00\ud800",
]
TRUTHS = {"countdown": '{"target": 1, "numbers": [1]}', "tool_call": '[{"name": "f", "arguments": {"a": 1}}]'}


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: text[:12])
@pytest.mark.parametrize("name", ["text_format", "math_boxed", "countdown", "tool_call", "math_dapo", "math_answer"])
def test_hostile_responses_are_wrong_in_bounded_time(name: str, hostile: str) -> None:
    assert parts_of(create_reward(name, {}), hostile, TRUTHS.get(name, "5"), finished=True).get("accuracy", 0.0) == 0.0


# -- form


@pytest.mark.parametrize(
    ("response", "form", "right"),
    [
        (THOUGHT, "think_answer", True),
        (f"\n{THOUGHT}\n", "think_answer", True),
        ("<answer>7</answer><think>hm</think>", "think_answer", False),
        (f"{THOUGHT} so", "think_answer", False),
        (f"so {THOUGHT}", "think_answer", False),
        ("<think>hm</think> so <answer>7</answer>", "think_answer", False),
        ("<think></think><answer>7</answer>", "think_answer", False),
        ("<think>hm</think><answer> </answer>", "think_answer", False),
        (f"<think>a</think>{THOUGHT}", "think_answer", False),
        (f"{THOUGHT}<answer>8</answer>", "think_answer", False),
        ("<think>hm</think> so \\boxed{7}", "think_boxed", True),
        ("<think>\\boxed{7}</think> so", "think_boxed", False),
        ("\\boxed{7}", "think_boxed", False),
        ("\\boxed{7}", "boxed", True),
        ("\\boxed{}", "boxed", False),
        ("so \\boxed{ }", "boxed", False),
        ("so 7", "boxed", False),
        ("\\boxed{\\frac{1}{2}}", "boxed", True),
    ],
)
def test_forms(response: str, form: str, right: bool) -> None:
    assert has_form(response, form) is right  # type: ignore[arg-type]
    reward = create_reward("text_format", {"form": form})
    assert parts_of(reward, response, None, finished=True) == {"format_score": 0.1 if right else -0.1}
    assert parts_of(reward, response, None, finished=False) == {"format_score": -0.1}


def test_math_reward_adds_form_on_request() -> None:
    assert math_reward(THOUGHT, "7", finished=True) == {"accuracy": 1.0}
    assert math_reward(THOUGHT, "7", finished=True, format_score=0.1) == {"accuracy": 1.0, "format_score": 0.1}
    assert math_reward(THOUGHT, "8", finished=False, format_score=0.1) == {"accuracy": 0.0, "format_score": -0.1}
    assert math_reward("\\boxed{7}", "7", finished=True, format_score=0.2, form="boxed")["format_score"] == 0.2
    with pytest.raises(ValueError, match="form is 'round', wanted boxed"):
        has_form("", "round")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "how", "parts"),
    [
        ("so \\boxed{7}", {}, (1.0, 0.0)),
        ("so 7", {}, (0.0, -0.1)),
        ("so \\boxed{8}", {}, (0.0, 0.0)),
        ("#### 7", {}, (0.0, -0.1)),
        ("so \\boxed{7}", {"finished": False}, (1.0, -0.1)),
        ("so \\boxed{7}", {"with_think": True}, (1.0, -0.1)),
        ("<think>hm</think>\\boxed{7}", {"with_think": True}, (1.0, 0.0)),
        ("so 7", {"format_score_coef": 1.0}, (0.0, -1.0)),
    ],
)
def test_math_boxed(response: str, how: dict[str, object], parts: tuple[float, float]) -> None:
    assert {math_boxed("\\boxed{}", empty, finished=True)["accuracy"] for empty in (None, "")} == {0.0}
    for truth in ("7", "because\n#### 7", "\\boxed{7}"):
        found = math_boxed(response, truth, **{"finished": True, **how})  # type: ignore[arg-type]
        assert (found["accuracy"], found["format_score"]) == parts


# -- text


@pytest.mark.parametrize(
    ("response", "truth", "finished", "accuracy"),
    [
        ("7", "7", True, 1.0),
        (" 7\n", "7", True, 1.0),
        ("7", "7", False, 0.0),
        ("77", "7", True, 0.0),
        ("7", None, True, 0.0),
    ],
)
def test_exact_match(response: str, truth: str | None, finished: bool, accuracy: float) -> None:
    assert exact_match(response, truth, finished=finished) == {"accuracy": accuracy}


@pytest.mark.parametrize("response", ["", "2", "23", "237", "273", "2378", "999", "732"])
@pytest.mark.parametrize("finished", [True, False])
def test_char_match_is_the_measured_reward(response: str, finished: bool) -> None:
    truth = "237"
    exact = response == truth and finished
    right = sum(i < len(response) and response[i] == c for i, c in enumerate(truth)) / len(truth)
    measured = 0.5 * exact + 0.5 * (0.8 * right + 0.2 * (finished and len(response) == len(truth)))
    parts = char_match(response, truth, finished=finished)
    assert sum(parts.values()) == pytest.approx(measured, abs=1e-12)
    assert parts["accuracy"] == float(exact)
    assert char_match(response, None, finished=finished) == {"accuracy": 0.0, "partial_credit": 0.0}


# -- countdown


@pytest.mark.parametrize(
    ("response", "total"),
    [
        ("<answer>(1 + 2 + 3) * 4</answer>", 1.0),
        ("<answer>(1+2+3)*4 = 24</answer>", 1.0),
        ("so \\boxed{(1+2+3) \\times 4}", 1.0),
        ("<answer>4 \u00d7 (3+2+1)</answer>", 1.0),
        ("<answer>1 / (1 / 4 / (1 + 2 + 3))</answer>", 0.1),
        ("<answer>24</answer>", 0.1),
        ("<answer>4 * 3 * 2</answer>", 0.1),
        ("<answer>(1 + 2 + 3) * 4 * 1</answer>", 0.1),
        ("<answer>4 / (3 - 2 - 1)</answer>", 0.1),
        ("<answer>4 ** 2 + 3 - 1</answer>", 0.0),
        ("<answer>1 + 2 +</answer>", 0.0),
        ("<answer>I give up</answer>", 0.0),
        ("(1 + 2 + 3) * 4", 0.0),
    ],
)
def test_countdown(response: str, total: float) -> None:
    parts = countdown_reward(response, '{"target": 24, "numbers": [1, 2, 3, 4]}', finished=True)
    assert sum(parts.values()) == total
    assert parts["accuracy"] == (total == 1.0)


@pytest.mark.parametrize("truth", [None, "", "24", "[]", "{}", '{"target": "x", "numbers": []}', "[" * 5000])
def test_a_game_that_is_none_is_shown(truth: str | None) -> None:
    with pytest.raises(ValueError, match="wanted JSON such as"):
        countdown_reward("<answer>1</answer>", truth, finished=True)


@given(numbers=st.lists(st.integers(1, 99), min_size=1, max_size=5), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_any_formula_of_all_numbers_that_gives_the_target_is_right(numbers: list[int], seed: int) -> None:
    chance = random.Random(seed)
    terms = [(str(number), Fraction(number)) for number in numbers]
    while len(terms) > 1:
        (left, a), (right, b) = (terms.pop(chance.randrange(len(terms))) for _ in range(2))
        results = [("+", a + b), ("-", a - b), ("*", a * b), *([("/", a / b)] if b else [])]
        sign, value = chance.choice(results)
        terms.append((f"({left}{sign}{right})", value))
    formula, value = terms[0]
    response = f"<answer>{formula}</answer>"
    if value.denominator == 1:
        game = {"target": int(value), "numbers": numbers}
        assert countdown_reward(response, json.dumps(game), finished=True)["accuracy"] == 1.0
    other = {"target": int(value) + 1, "numbers": numbers}
    assert countdown_reward(response, json.dumps(other), finished=True) == {"accuracy": 0.0, "format_score": 0.1}
    less = {"target": int(value), "numbers": numbers[1:]}
    assert countdown_reward(response, json.dumps(less), finished=True)["accuracy"] == 0.0


# -- DAPO


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (500, -1.0)]
)
def test_the_overlong_penalty_is_that_of_the_paper(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(penalty)
    args = {"max_response_length": 100, "cache_length": 20, "penalty_factor": 2.0}
    reward = create_reward("math_dapo", args)
    parts = parts_of(reward, "\\boxed{7}", "7", finished=True, tokens=tokens)
    assert parts == {"accuracy": 1.0, "wrong": 0.0, "overlong": pytest.approx(2.0 * penalty)}
    parts = parts_of(reward, "\\boxed{8}", "7", finished=True, tokens=tokens)
    assert parts == {"accuracy": 0.0, "wrong": -1.0, "overlong": pytest.approx(2.0 * penalty)}


@pytest.mark.parametrize("lengths", [(100, None), (None, 20), (100, 0), (100, 101)])
def test_lengths_that_do_not_fit_are_refused(lengths: tuple[int | None, int | None]) -> None:
    with pytest.raises(RewardError, match=r"max_response_length.*cache_length|cache_length.*max_response_length"):
        create_reward("math_dapo", {"max_response_length": lengths[0], "cache_length": lengths[1]})


def test_a_penalty_without_a_length_says_what_to_do() -> None:
    reward = create_reward("math_dapo", {"max_response_length": 100, "cache_length": 20})
    with pytest.raises(ValueError, match="use the operator length_penalty"):
        parts_of(reward, "\\boxed{7}", "7", finished=True)


# -- tool calls

WANTED = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "say", "arguments": {"text": "hi"}}]


def written(*calls: object) -> str:
    return "let me see " + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("response", "share"),
    [
        (written(*WANTED[:1]), (1 / 2 + 1 + 2) / 6),
        (written(WANTED[0], {"name": "say", "arguments": {"text": "ho"}}), (1 + 3 + 1) / 6),
        (written(WANTED[0], {"name": "say", "arguments": {"word": "hi"}}), (1 + 3 + 0) / 6),
        (written(WANTED[0], {"name": "shout", "arguments": {"text": "hi"}}), (1 / 3 + 3) / 6),
        (written(*WANTED, *WANTED[:1]), (2 / 3 + 3 + 2) / 6),
        (written({"name": "add", "arguments": {"a": 9, "b": 9}}, *WANTED), (2 / 3 + 3 + 2) / 6),
        (written(WANTED[0]) + "<tool_call>{</tool_call>", (1 / 2 + 3) / 6),
        (written(*WANTED) + "<tool_call>{}", 1.0),
        ("no call", 0.0),
        ("<tool_call>{}</tool_call>", 0.0),
    ],
)
def test_partial_tool_calls_earn_their_share(response: str, share: float) -> None:
    parts = tool_call(response, json.dumps(WANTED), finished=True)
    assert parts == {"accuracy": 0.0, "partial_credit": pytest.approx(0.5 * share)}
    assert tool_call(response, json.dumps(WANTED), finished=True, partial_weight=0.0)["partial_credit"] == 0.0


ADDED = [{"name": "add", "arguments": {"a": 1, "b": "2"}}]
DEEPSEEK_CALL = (
    "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>{}"
    "<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>"
)
ANSWERS = {
    "Qwen3.5": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "GLM": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "DeepSeek V3": DEEPSEEK_CALL.replace("{}", 'function<\uff5ctool▁sep\uff5c>add\n```json\n{"a": 1, "b": "2"}\n```'),
    "DeepSeek V3.1": DEEPSEEK_CALL.replace("{}", 'add<\uff5ctool▁sep\uff5c>{"a": 1, "b": "2"}'),
    "Mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "2"}, "id": "abcdefghi"}]',
    "Mistral with ARGS": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "2"}',
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1, "b": "2"}<|call|>',
}


@pytest.mark.parametrize("family", ANSWERS)
def test_calls_of_each_family_are_read_and_its_drafts_are_not(family: str) -> None:
    opening, closing = HARMONY if family == "gpt-oss" else FORMATS[0]
    answer = ANSWERS[family]
    other = [{"name": "add", "arguments": {"a": 1, "b": "3"}}]
    for response in (answer, f"{opening}I add.{closing}{answer}"):
        assert tool_call(response, json.dumps(ADDED), finished=True) == {"accuracy": 1.0, "partial_credit": 0.0}
        assert tool_call(response, json.dumps(ADDED), finished=False)["accuracy"] == 0.0
        assert tool_call(response, json.dumps(other), finished=True) == {"accuracy": 0.0, "partial_credit": 0.375}
        assert tool_call(response, "[]", finished=True)["accuracy"] == 0.0
    assert sum(tool_call(opening + answer, json.dumps(ADDED), finished=True).values()) == 0.0


def test_right_tool_calls_in_any_order_and_writing() -> None:
    for calls in itertools.permutations(WANTED):
        assert tool_call(written(*calls), json.dumps(WANTED), finished=True)["accuracy"] == 1.0
    texts = [{**call, "arguments": json.dumps(call["arguments"])} for call in WANTED]
    assert tool_call(written(*texts), json.dumps(WANTED), finished=True)["accuracy"] == 1.0
    assert tool_call(written(*WANTED), json.dumps(texts), finished=True)["accuracy"] == 1.0
    assert tool_call(written(*WANTED), json.dumps(WANTED), finished=False) == {"accuracy": 0.0, "partial_credit": 0.5}
    assert tool_call("I know it", "[]", finished=True)["accuracy"] == 1.0
    assert tool_call(written(*WANTED), "[]", finished=True) == {"accuracy": 0.0, "partial_credit": 0.0}


def test_values_are_compared_as_json_has_them() -> None:
    def right(wanted: object, given: object) -> bool:
        truth, response = ({"name": "f", "arguments": {"x": value}} for value in (wanted, given))
        return tool_call(written(response), json.dumps([truth]), finished=True)["accuracy"] == 1.0

    assert right(1, 1.0)
    assert right({"a": [1, None], "b": "x"}, {"b": "x", "a": [1, None]})
    assert not right(1, True)
    assert not right(1, "1")
    assert not right([1, 2], [2, 1])


@pytest.mark.parametrize("truth", [None, "", "{}", "[1]", '[{"name": 1}]', json.dumps(WANTED * 9), "[" * 5000])
def test_calls_that_are_none_are_shown(truth: str | None) -> None:
    with pytest.raises(ValueError, match="wanted a JSON list of at most 16 calls"):
        tool_call("", truth, finished=True)
