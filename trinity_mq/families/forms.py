"""Forms that a request requires of an answer, as grammars for constrained sampling.

A grammar is a structural tag of the package xgrammar, which is installed with engines that can constrain sampling. That
package also knows the forms of the tool calls of most model families. Format: xgrammar, "Structural Tag".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_mq.families.family import Family
from trinity_mq.families.thoughts import PROMPT_END, ThoughtFormat, opening_tag_of

MAX_WHITESPACE = 16
"""Maximum consecutive blanks in JSON. Without a maximum, an undecided model may write blanks up to its limit."""


class FormError(ValueError):
    """The engine cannot guarantee the form. The message gives the reason and the next step."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that a request requires of the text of a response."""

    option: str
    """Name of the request option that requires the form, for error messages."""
    schema: Mapping[str, Any] | None = None
    """JSON schema of the answer after the thoughts. None: the form constrains the calls of ``tools``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that may be called, in the form of the OpenAI API."""
    must_call: bool = False
    """True if the response has to call a tool."""
    parallel: bool = True
    """Whether the response may have several calls. False: at most one call."""


def grammar_of(form: AnswerForm, family: Family, template: str, prompt_end: str) -> str:
    """Return the structural tag for a form, as JSON text.

    Args:
        form: The form.
        family: Family of the model.
        template: Chat template of the model. If it writes thoughts, an answer may begin with thoughts.
        prompt_end: The prompt, or its last characters, which may open or end thoughts.

    Raises:
        FormError: The form cannot be guaranteed for this family, or is not valid.
    """
    thoughts = family.thoughts
    reasoning = "disabled" if thoughts is None else _reasoning(thoughts, template, prompt_end)
    if form.schema is not None:
        if family.headers:
            raise FormError(
                f"{form.option} cannot be promised for the model family {family.name}, whose answers have headers "
                f"around their content; leave {form.option} out and ask for the form in the prompt"
            )
        answer = {"type": "json_schema", "json_schema": form.schema, "max_whitespace_cnt": MAX_WHITESPACE}
        elements = [answer] if thoughts is None else [*_prefix(thoughts, reasoning), answer]
        return json.dumps({"type": "structural_tag", "format": _sequence(elements)})
    if not family.grammar:
        raise FormError(
            f"{form.option} cannot be promised for the model family {family.name}, whose calls have no grammar here; "
            'send tool_choice "auto" with parallel calls, and ask for the tool in the prompt'
        )
    return _grammar_of_calls(form, family, reasoning)


def _grammar_of_calls(form: AnswerForm, family: Family, reasoning: str) -> str:
    from xgrammar import get_model_structural_tag

    try:
        tag = get_model_structural_tag(
            family.grammar,
            tools=[_tool(tool) for tool in form.tools],
            tool_choice="required" if form.must_call else "auto",
            reasoning=reasoning,
            max_whitespace_cnt=MAX_WHITESPACE,
            parallel_tool_calls=form.parallel,
        )
    except ValueError as error:
        raise FormError(f"{form.option} cannot be promised: {error}") from error
    return str(tag.model_dump_json())


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    # without parameters xgrammar accepts any JSON as arguments; call readers accept only objects
    parameters = {"type": "object", **(function.get("parameters") or {})}
    return {"type": "function", "function": {"name": function["name"], "parameters": parameters}}


def _reasoning(thoughts: ThoughtFormat, template: str, prompt_end: str) -> str:
    """Return whether the response continues thoughts that the prompt opened (``enabled``), may begin with thoughts
    (``auto``), or has no thoughts (``disabled``).
    """
    if opening_tag_of(prompt_end) == thoughts.opening:
        return "enabled"
    closed = prompt_end[-PROMPT_END:].rstrip().endswith(thoughts.closing)
    return "auto" if thoughts.opening in template and not closed else "disabled"


def _prefix(thoughts: ThoughtFormat, reasoning: str) -> list[dict[str, Any]]:
    """Return the part of a grammar before the answer."""
    if reasoning == "disabled":
        return []
    inside = {"type": "any_text", "excludes": list(thoughts)}
    opening = "" if reasoning == "enabled" else thoughts.opening
    parts: list[dict[str, Any]] = [
        {"type": "tag", "begin": opening, "content": inside, "end": thoughts.closing},
        {"type": "regex", "pattern": r"\s{0,2}"},
    ]
    return parts if reasoning == "enabled" else [{"type": "optional", "content": _sequence(parts)}]


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}
