"""Table of the model families."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trinity_mq.families import deepseek, harmony, hermes, llama, mistral, phi
from trinity_mq.families.division import CallReader, Marks, no_calls
from trinity_mq.families.family import PARTS, Family, reader
from trinity_mq.families.library import calls_reader
from trinity_mq.thoughts import FORMATS, ThoughtFormat


def row(
    name: str,
    read_calls: CallReader,
    calls_begin: Iterable[str] = (),
    *,
    thoughts: ThoughtFormat | None = FORMATS[0],
    headers: tuple[str, ...] = (),
    **others: Any,
) -> Family:
    """Return a family whose answers are divided by marks.

    Args:
        name: Name of the family.
        read_calls: Reads the text from the first beginning of a call on.
        calls_begin: Texts that begin calls.
        thoughts: Tags around thoughts.
        headers: Texts around content that are no part of it.
        others: Other fields of the family.
    """
    marks = Marks(thoughts, tuple(calls_begin), headers)
    return Family(
        name, reader(marks, read_calls), calls_begin=marks.calls, thoughts=thoughts, headers=headers, **others
    )


_TOOL_CALL = (hermes.CALL_BEGINS,)
_DEEPSEEK = (deepseek.CALLS_BEGIN, deepseek.CALL_BEGINS)
FAMILIES = (
    row(
        "gpt-oss",
        harmony.read_calls,
        harmony.CALL_BEGINS,
        thoughts=harmony.THOUGHTS,
        headers=harmony.HEADERS,
        marks=("<|channel|>analysis<|message|>",),
    ),
    # V3, R1
    row(
        "deepseek",
        deepseek.read_calls,
        _DEEPSEEK,
        marks=("tool▁sep", "+ tool['function']['arguments'] +"),
        library="deepseek-v3",
        arguments="text",
    ),
    row("deepseek-v3.1", deepseek.read_calls, _DEEPSEEK, marks=("tool▁sep",)),
    row(
        "kimi",
        calls_reader("kimi-k2"),
        ("<|tool_calls_section_begin|>",),
        marks=("<|tool_calls_section_begin|>",),
        library="kimi-k2",
    ),
    row("glm-4.5", calls_reader("glm-4.5"), _TOOL_CALL, marks=("<arg_key>", "'\\n<tool_call>'"), library="glm-4.5"),
    # GLM-4.7, GLM-5
    row("glm", calls_reader("glm-5"), _TOOL_CALL, marks=("<arg_key>", "<arg_value>"), library="glm-5"),
    row(
        "qwen3.6",
        calls_reader("qwen3.6"),
        _TOOL_CALL,
        marks=("<|im_start|>", "<function=", "preserve_thinking"),
        library="qwen3.6",
    ),
    # Qwen3.5, Qwen3-Coder
    row("qwen3.5", calls_reader("qwen3.5"), _TOOL_CALL, marks=("<|im_start|>", "<function="), library="qwen3.5"),
    row("qwen3", hermes.read_calls, _TOOL_CALL, marks=("<|im_start|>", "last_query_index"), library="qwen3"),
    # Ministral 3, Magistral
    row(
        "mistral-thinking",
        mistral.read_calls,
        (mistral.CALL_BEGINS,),
        thoughts=mistral.THOUGHTS,
        thoughts_key=PARTS,
        marks=("[TOOL_CALLS]", "[THINK]"),
        call_id=mistral.call_id,
    ),
    row("mistral", mistral.read_calls, (mistral.CALL_BEGINS,), marks=("[TOOL_CALLS]",), call_id=mistral.call_id),
    row("llama", llama.read_calls, llama.CALL_BEGINS, marks=("<|start_header_id|>",), library="llama-3"),
    # no format for calls; the templates leave tools out
    row("gemma", no_calls, marks=("<start_of_turn>",)),
    row("phi", phi.read_calls, phi.CALL_BEGINS, marks=("<|end|>", "<|assistant|>")),
    # Hermes, Qwen2.5, SmolLM2, and every template without a family of its own
    row("hermes", hermes.read_calls, _TOOL_CALL),
)
"""Model families by their chat templates. The first row whose marks all occur in a template applies."""


def family_of(template: str) -> Family:
    """Return the family of a chat template."""
    return next(family for family in FAMILIES if all(mark in template for mark in family.marks))
