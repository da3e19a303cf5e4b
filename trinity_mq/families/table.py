"""Table of the model families."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trinity_mq.families import hermes
from trinity_mq.families.division import CallReader, Marks
from trinity_mq.families.family import Family, reader
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
FAMILIES = (
    row(
        "deepseek",
        calls_reader("deepseek-v3"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        marks=("+ tool['function']['arguments'] +",),
        library="deepseek-v3",
        arguments="text",
    ),
    # Hermes, Qwen2.5, and every template without a family of its own
    row("hermes", hermes.read_calls, _TOOL_CALL),
)
"""Model families by their chat templates. The first row whose marks all occur in a template applies."""


def family_of(template: str) -> Family:
    """Return the family of a chat template."""
    return next(family for family in FAMILIES if all(mark in template for mark in family.marks))
