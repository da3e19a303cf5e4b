"""Thoughts are neither answers nor calls: every reward reads the text after them."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.families.thoughts import after_thoughts, answer_spans
from trinity_mq.rewards import create_reward, parts_of
from trinity_mq.rewards.text import has_form

OPENED = "<|user|>Add 9 and 9.<|assistant|><think>\n"
CLOSED = "<|user|>Add 9 and 9.<|assistant|><think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("text", "prompt", "answer"),
    [
        ("18", None, "18"),
        (" 18 \n", None, " 18 \n"),
        ("", None, ""),
        ("<think>17?</think>\n\n18", None, "18"),
        ("\n<think>17?</think>18", None, "18"),
        ("9 and 9.\n</think>\n18", None, "18"),
        ("9 and 9.\n</think>\n18", OPENED, "18"),
        ("9 and 9.\n</think>\n18", CLOSED, "18"),
        ("18", CLOSED, "18"),
        # cut off
        ("<think>17? Let me", None, ""),
        ("17? Let me", OPENED, ""),
        ("Sure. <think>17? Let me", None, "Sure. "),
        ("<think>a</think>18 <think>no, 17", None, "18 "),
        # tags named in thoughts and in answers
        ("<think>My <think> tag opens.</think>18", None, "18"),
        ("<think>I close with </think>, then 17.</think>18", None, "18"),
        ("<think>I close with `</think>`, then 17.</think>18", None, "18"),
        ('I close with "</think>", then 17.</think>18', OPENED, "18"),
        ("<think>a</think>18. I closed with `</think>`.", None, "18. I closed with `</think>`."),
        ('<think>It is "18"</think>"18"', None, '"18"'),
        # several thoughts
        ("<think>a</think>1<think>b</think>8", None, "1 8"),
        ("The answer is 18. <think>Check: 17?</think>", None, "The answer is 18.  "),
        # a whole call is data
        ('<tool_call>{"a": "<think>b</think>"}</tool_call>', None, '<tool_call>{"a": "<think>b</think>"}</tool_call>'),
        ('<think>a</think><tool_call>{"a": "</think>"}</tool_call>', None, '<tool_call>{"a": "</think>"}</tool_call>'),
        ('<think><tool_call>{"a": 1}</tool_call> no</think>18', None, "18"),
        ('<tool_call>{"a": 1}</tool_call> no</think>18', None, "18"),
        ("I write <tool_call> now.</think>\n<tool_call>{}</tool_call>", None, "<tool_call>{}</tool_call>"),
    ],
)
def test_the_text_after_the_thoughts(text: str, prompt: str | None, answer: str) -> None:
    assert after_thoughts(text, prompt) == answer


def test_a_prompt_that_only_names_the_tag_opens_no_thoughts() -> None:
    assert after_thoughts("18", "Think between <think> and </think>.<|assistant|>") == "18"


@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>{", "</tool_call>", "`", " ", "18"]), max_size=20))
def test_the_parts_are_in_order_and_no_tag_is_left_in_them(pieces: list[str]) -> None:
    text = "".join(pieces)
    spans = answer_spans(text)
    places = [place for span in spans for place in span]
    assert places == sorted(places)
    assert all(0 <= place <= len(text) for place in places)
    if "`" not in text and "{" not in text:
        assert "think>" not in after_thoughts(text)


def test_megabytes_of_tags_take_no_time() -> None:
    started = time.process_time()
    for piece in ("<think>", "</think>", "<think></think>", "<tool_call>{", "<tool_call>{</think>", "<", "`</think>` "):
        after_thoughts(piece * (1_000_000 // len(piece)))
        after_thoughts(piece * (1_000_000 // len(piece)), OPENED)
    assert time.process_time() - started < 10.0


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
GAME = json.dumps({"target": 7, "numbers": [3, 4]})
REWARDS: Mapping[str, tuple[str, str, Callable[[str], str]]] = {
    "math_equal": ("18", "17", "The final answer is {}.".format),
    "math_answer": ("18", "17", "The final answer is {}.".format),
    "math_equal_format": ("18", "17", "#### {}".format),
    "math_dapo": ("18", "17", r"\boxed{{{}}}".format),
    "math_boxed": ("18", "17", r"\boxed{{{}}}".format),
    "exact_match": ("18", "17", "{}".format),
    "char_match": ("18", "17", "{}".format),
    "countdown": ("3 + 4", "3 * 4", "<answer>{}</answer>".format),
    "tool_call": (CALL, CALL.replace("add", "sub"), "{}".format),
}
TRUTHS = {"countdown": GAME, "tool_call": '[{"name": "add", "arguments": {"a": 1}}]'}


def accuracy(name: str, response: str, **how: Any) -> float:
    how.setdefault("finished", True)
    return parts_of(create_reward(name, {}), response, TRUTHS.get(name, "18"), **how)["accuracy"]


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_judges_what_follows_the_thoughts(name: str) -> None:
    right, wrong, form = REWARDS[name]
    drafts = "".join(f"Maybe {mark}? " for mark in (form(right), form(wrong), r"\boxed{18}", "<answer>18</answer>"))
    for before in (f"<think>{drafts}</think>", f"{drafts}</think>\n", f"<think>I end with </think>. {drafts}</think> "):
        assert accuracy(name, before + form(right)) == 1.0, before
        assert accuracy(name, before + form(wrong)) == 0.0, before
        assert accuracy(name, before + form(right), prompt_end=OPENED) == 1.0, before


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", REWARDS)
def test_thoughts_that_were_cut_off_are_no_answer(name: str, finished: bool) -> None:
    right, _, form = REWARDS[name]
    assert accuracy(name, f"<think>{form(right)}", finished=finished) == 0.0
    assert accuracy(name, form(right), finished=finished, prompt_end=OPENED) == 0.0


def test_a_draft_of_a_call_is_not_the_wish_for_no_call() -> None:
    reward = create_reward("tool_call", {})
    for response, finished, right in (
        (f"<think>{CALL}? No.</think>I will not.", True, 1.0),
        (f"<think>{CALL}", True, 0.0),
        (f"<think>{CALL}", False, 0.0),
        (CALL, True, 0.0),
    ):
        assert parts_of(reward, response, "[]", finished=finished)["accuracy"] == right, response


@pytest.mark.parametrize(
    ("response", "prompt", "right"),
    [
        ("<think>hm</think><answer>18</answer>", None, True),
        ("hm</think><answer>18</answer>", None, True),
        ("hm</think><answer>18</answer>", OPENED, True),
        ("hm</think><answer>18</answer>", CLOSED, False),
        ("<think>hm</think><answer>18</answer>", CLOSED, True),
        ("<think>hm</think><answer>18</answer>", OPENED, False),
        ("</think><answer>18</answer>", OPENED, False),
        ("hm<answer>18</answer>", OPENED, False),
        ("hm</think></think><answer>18</answer>", None, False),
        ("<answer>18</answer>", None, False),
    ],
)
def test_the_opening_tag_may_stand_in_the_prompt(response: str, prompt: str | None, right: bool) -> None:
    boxed = response.replace("<answer>", "\\boxed{").replace("</answer>", "}")
    assert has_form(response, "think_answer", prompt) is right
    assert has_form(boxed, "think_boxed", prompt) is right
    for reward, args in (("text_format", {"form": "think_boxed"}), ("math_boxed", {"with_think": True})):
        parts = parts_of(create_reward(reward, args), boxed, "18", finished=True, prompt_end=prompt)
        assert (parts["format_score"] >= 0) is right


def test_a_box_in_the_thoughts_is_not_the_form() -> None:
    for response in (r"<think>\boxed{18}</think> 18", r"<think>\boxed{18}", r"\boxed{18}</think> 18"):
        assert not has_form(response, "boxed")
    assert not has_form(r"\boxed{18}", "boxed", OPENED)
    assert has_form(r"\boxed{18}", "boxed", CLOSED)


def test_a_reward_of_the_user_gets_the_end_of_the_prompt_and_the_whole_response() -> None:
    def told(response: str, truth: str | None, *, finished: bool, prompt_end: str | None = None) -> dict[str, float]:
        assert (response, prompt_end) == ("hm</think>18", OPENED)
        return {"accuracy": float(after_thoughts(response, prompt_end) == truth)}

    assert parts_of(create_reward(told, {}), "hm</think>18", "18", finished=True, prompt_end=OPENED) == {"accuracy": 1}
