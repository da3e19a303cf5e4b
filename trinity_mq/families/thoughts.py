r"""The text after the thoughts: the part of a response that rewards and parsers read.

Tool calls, boxes and moves inside thoughts are drafts. They are neither carried out nor rewarded.

A chat template may end the prompt with the opening tag. The response then begins inside the thoughts, which only the
caller can tell, from the prompt. A closing tag without an opening tag ends thoughts too: all text before it is
thoughts.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class ThoughtFormat(NamedTuple):
    """The two tags around the thoughts of a model family."""

    opening: str
    closing: str


HARMONY = ThoughtFormat("<|channel|>analysis<|message|>", "<|end|>")
"""Tags of gpt-oss: its thoughts are a message in the channel ``analysis``."""
MISTRAL = ThoughtFormat("[THINK]", "[/THINK]")
GEMMA4 = ThoughtFormat("<|channel>thought\n", "<channel|>")
FORMATS = (ThoughtFormat("<think>", "</think>"), MISTRAL, HARMONY, GEMMA4)
"""Formats by model family; the first format is DeepSeek's, Qwen's and most others'. Add a row for a family with other
tags.
"""
HARMONY_START, HARMONY_CHANNEL = "<|start|>assistant", "<|channel|>"
HARMONY_HEADERS = (
    *(
        f"{start}{HARMONY_CHANNEL}{channel}<|message|>"
        for start in (HARMONY_START, "")
        for channel in ("final", "commentary")
    ),
    HARMONY_START,
    "<|end|>",
    "<|return|>",
)
"""Texts of gpt-oss around the content of an answer, longer texts first."""
_HEADERS = re.compile("|".join(map(re.escape, HARMONY_HEADERS)))

PROMPT_END = 100
"""Number of characters at the end of a prompt that are searched for an opening tag."""
_CALL = r"<tool_call>\s*\{(?:(?!<tool_call>).)*?</tool_call>"
"""A complete tool call. Its arguments are data: a tag in them neither begins nor ends thoughts."""


def written(tag: str) -> str:
    """Return a pattern that matches a tag unless it is quoted, as in: I close with `</think>`."""
    return rf"(?!(?<=[\s(:][\"'`]){re.escape(tag)}[\"'`]){re.escape(tag)}"


_CLOSING = {thoughts.opening: re.compile(written(thoughts.closing)) for thoughts in FORMATS}
_TAG = re.compile(
    f"(?P<opening>{'|'.join(written(thoughts.opening) for thoughts in FORMATS)})"
    # gpt-oss also ends other messages with the closing tag of its thoughts
    f"|(?P<closing>{'|'.join(written(thoughts.closing) for thoughts in FORMATS if thoughts != HARMONY)})"
    f"|{_CALL}",
    re.DOTALL,
)


def opens_thoughts(prompt_end: str | None, thoughts: ThoughtFormat | None) -> bool:
    """Return whether a prompt ends with the opening tag of this format."""
    if thoughts is None or not thoughts.opening:
        return False
    return (prompt_end or "")[-PROMPT_END:].rstrip().endswith(thoughts.opening.rstrip())


def opening_tag_of(prompt_end: str | None) -> str:
    """Return the opening tag at the end of a prompt; an empty text if the prompt does not end with one."""
    return next((thoughts.opening for thoughts in FORMATS if opens_thoughts(prompt_end, thoughts)), "")


def answer_spans(text: str, prompt_end: str | None = None) -> list[tuple[int, int]]:
    """Return start and end of each part of a response outside thoughts, in order. Takes time linear in the length of
    the text.

    Args:
        text: The response.
        prompt_end: The prompt, or its last characters. None: unknown.
    """
    spans: list[tuple[int, int]] = []
    start, opening = 0, opening_tag_of(prompt_end)
    place = 0
    while tag := (_CLOSING[opening] if opening else _TAG).search(text, place):
        place = tag.end()
        if opening:
            start, opening = place, ""
        elif tag.lastgroup == "opening":
            spans.append((start, tag.start()))
            opening = tag[0]
        elif tag.lastgroup == "closing":
            spans, start = [], place
    return spans if opening else [*spans, (start, len(text))]


def after_thoughts(text: str, prompt_end: str | None = None) -> str:
    r"""Return the text after the thoughts of a response, without white space before it.

    Returns the whole response if it does not contain thoughts. Returns an empty text if its thoughts do not end,
    because the answer is missing.

    Args:
        text: The response.
        prompt_end: The prompt, or its last characters. Some chat templates end it with the opening tag. None: unknown.

    >>> after_thoughts(r"<think>Maybe \boxed{17}? No.</think> \boxed{18}")
    '\\boxed{18}'
    >>> after_thoughts("9 and 9 make 18, but", "Add 9 and 9.<think>")
    ''
    """
    spans = answer_spans(text, prompt_end)
    if spans == [(0, len(text))]:
        return text
    answer = " ".join(text[start:end] for start, end in spans).lstrip()
    return _HEADERS.sub("", answer) if HARMONY.opening in text else answer
