"""Reward for calling the right tools with the right arguments. No tool is called, and no code is executed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trinity_mq.families.family import Family
from trinity_mq.families.table import FAMILIES
from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.rewards.ground_truth import accept_any_truth_type

MAX_CALLS = 16
"""Maximum calls of a response that are read; a response with more calls is wrong."""
LONGEST = 20_000
"""Maximum characters of a call that are read."""
PARTIAL_WEIGHT = 0.5

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_JSON_CALL = re.compile(r"<tool_call>\s*\{")
_NAME = re.compile(r"[\w.:/-]{1,256}")
"""Pattern of a function's name. A reader of the wrong family may return a name with text around it, which does not
match.
"""
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
"""Names of Python types in JSON schemas."""

Call = tuple[str, dict[str, str]]
"""Name, and the canonical JSON of each argument."""


@accept_any_truth_type
def tool_call(
    response: str,
    truth: str | None,
    *,
    finished: bool,
    partial_weight: float = PARTIAL_WEIGHT,
    prompt_end: str | None = None,
) -> dict[str, float]:
    """Return accuracy 1 if the calls in ``response`` equal the calls of ``truth``, in any order, else partial credit.

    The credit is ``partial_weight`` times the matching score of ToolRL (arXiv 2504.13958, section 3.2) divided by its
    maximum ``1 + sum over wanted calls (1 + number of parameters)``:

    * names: the overlap of the two multisets of names, intersection over union;
    * for each pair of a wanted call and a call of the same name: intersection over union of the parameter names, plus 1
      for each parameter with the wanted value. Pairs are chosen best first.

    Args:
        response: Calls are JSON objects ``{"name": ..., "arguments": {...}}`` in ``<tool_call></tool_call>`` (the
            Hermes form), or have the form of another family of :data:`trinity_mq.families.table.FAMILIES` whose calls
            begin with a mark. The types in ``truth`` decide how arguments without a type are read. A call that does not
            parse makes the response wrong and earns nothing. Calls inside thoughts are drafts and are ignored.
        truth: JSON list of such objects; the empty list requires that no call is made.
        finished: Whether the response ended by itself. A truncated response is never exact.
        partial_weight: Maximum credit of a response that is not exact; 0 gives rewards of 0 or 1 only.
        prompt_end: The prompt, or its last characters, which may open the thoughts. None: unknown.

    Raises:
        ValueError: ``truth`` does not have this form.
    """
    expected = _expected_calls(truth)
    answer = after_thoughts(response, prompt_end)
    calls, clean = _parsed_calls(answer)
    if not calls and (readers := _readers(answer)):
        calls, clean = _read_calls(readers, response, prompt_end, expected)
    is_answered = finished and bool(
        answer or calls or not response
    )  # thoughts alone do not decide that no tool is called
    if is_answered and clean and _same(expected, calls):
        return {"accuracy": 1.0, "partial_credit": 0.0}
    return {"accuracy": 0.0, "partial_credit": partial_weight * _matching_score(expected, calls) if calls else 0.0}


def _expected_calls(truth: str | None) -> list[Call]:
    try:
        listed = json.loads(truth or "")
        calls = [_call(item) for item in listed] if isinstance(listed, list) else [None]
    except (ValueError, RecursionError):
        calls = [None]
    expected = [call for call in calls if call is not None]
    if len(expected) != len(calls) or len(expected) > MAX_CALLS:
        shown = (truth or "")[:80]
        raise ValueError(
            f"the right answer is {shown!r}, wanted a JSON list of at most {MAX_CALLS} calls such as "
            '[{"name": "add", "arguments": {"a": 1}}]'
        )
    return expected


def _parsed_calls(response: str) -> tuple[list[Call], bool]:
    """Return the calls that parse, and whether all calls parse and their number is at most MAX_CALLS."""
    blocks = response.split(_OPEN, MAX_CALLS + 1)[1:]
    parsed: list[Call] = []
    for block in blocks[:MAX_CALLS]:
        text, closed, _ = block.partition(_CLOSE)
        call = _parsed(text) if closed else None
        if call is not None:
            parsed.append(call)
    return parsed, len(parsed) == len(blocks)


def _readers(answer: str) -> list[Family]:
    """Return the families, other than Hermes, whose calls may stand in an answer. The model's family is not known."""
    if _JSON_CALL.search(answer):
        return []
    return [family for family in FAMILIES if any(mark in answer for mark in family.calls_begin if mark[0] in " <[")]


def _read_calls(
    families: list[Family], response: str, prompt_end: str | None, expected: list[Call]
) -> tuple[list[Call], bool]:
    """Return the calls as read by the first family that can read all calls, at most MAX_CALLS, and whether such a
    family exists.
    """
    tools = [_tool(name, arguments) for name, arguments in expected] or [_tool("any", {})]
    for family in families:
        answer = family.read(response, prompt_end, tools)
        if answer.calls and not answer.malformed and len(answer.calls) <= MAX_CALLS:
            parsed = [_parsed(json.dumps(call["function"])) for call in answer.calls]
            calls = [call for call in parsed if call is not None and _NAME.fullmatch(call[0])]
            if len(calls) == len(parsed):
                return calls, True
    return [], False


def _tool(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    """Return a tool whose schema has the types of the wanted arguments."""
    properties = {key: {"type": _TYPES[type(json.loads(value))]} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _parsed(text: str) -> Call | None:
    if len(text) > LONGEST:
        return None
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _call(candidate: object) -> Call | None:
    match candidate:
        case {"name": str(name), "arguments": dict(arguments)}:
            return name, {key: _canonical(value) for key, value in arguments.items()}
        case {"name": str(name), "arguments": str(text)}:  # the form of OpenAI's API
            inner = json.loads(text)
            return _call({"name": name, "arguments": inner}) if isinstance(inner, dict) else None
    return None


def _same(expected: list[Call], calls: list[Call]) -> bool:
    expected_keys, actual_keys = (
        sorted((name, sorted(arguments.items())) for name, arguments in listed) for listed in (expected, calls)
    )
    return expected_keys == actual_keys


def _canonical(value: object) -> str:
    """Return JSON that is equal for equal values: True is not 1, but 1.0 is; the order of keys does not count."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return json.dumps(value)


def _matching_score(expected: list[Call], calls: list[Call]) -> float:
    """Return ToolRL's matching score divided by its maximum."""
    most = 1 + sum(1 + len(arguments) for _, arguments in expected)
    shared = (Counter(name for name, _ in expected) & Counter(name for name, _ in calls)).total()
    total = shared / (len(expected) + len(calls) - shared)
    scores = sorted(
        (
            (_match(expected_args, actual_args), -n, -m)
            for n, (name, expected_args) in enumerate(expected)
            for m, (called, actual_args) in enumerate(calls)
            if name == called
        ),
        reverse=True,
    )
    used_wanted: set[int] = set()
    used_calls: set[int] = set()
    for score, n, m in scores:
        if n not in used_wanted and m not in used_calls:
            used_wanted.add(n)
            used_calls.add(m)
            total += score
    return total / most


def _match(expected: dict[str, str], actual: dict[str, str]) -> float:
    either = expected.keys() | actual.keys()
    names = len(expected.keys() & actual.keys()) / len(either) if either else 1.0
    return names + sum(actual.get(key) == value for key, value in expected.items())
