"""Table of the model families."""

from __future__ import annotations

from trinity_mq.families import hermes
from trinity_mq.families.family import Family

FAMILIES = (
    Family(
        "deepseek",
        hermes.read_answer,
        calls_begin=(hermes.CALL_BEGINS,),
        marks=("+ tool['function']['arguments'] +",),
        arguments="text",
    ),
    # Hermes, Qwen, and every template without a family of its own
    Family("hermes", hermes.read_answer, calls_begin=(hermes.CALL_BEGINS,), grammar="qwen_3"),
)
"""Model families by their chat templates. The first row whose marks all occur in a template applies."""


def family_of(template: str) -> Family:
    """Return the family of a chat template."""
    return next(row for row in FAMILIES if all(mark in template for mark in row.marks))
