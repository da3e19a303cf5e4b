"""Switches of chat templates: finds the switches that a template reads, and sets them for a request.

The variables of a template show its switches, so that a family does not list them. Requests use two common names,
``enable_thinking`` and ``reasoning_effort``, which become the variables of the template.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from trinity_mq.config.switches import (
    EFFORT,
    EFFORTS,
    ENABLE_THINKING,
    RESERVED,
    SWITCH_FIELDS,
    SWITCHES,
    SwitchError,
    check_switch_fields,
)
from trinity_mq.families.thoughts import FORMATS, ThoughtFormat

THINKING = (ENABLE_THINKING, "thinking")
"""Variables by which templates switch thinking. First: Qwen3, GLM, Nemotron, Gemma 4. Second: DeepSeek V3.1, Kimi."""
_DECIDING = {*THINKING, EFFORT}
_USUAL_EFFORTS = ("low", "medium", "high")
"""Levels of a template that writes the level into the prompt as it is (gpt-oss)."""
_SATISFIED = frozenset(EFFORTS[EFFORTS.index("medium") :])
"""Levels of effort that a template without levels satisfies by thinking without a limit. Lower levels ask for less."""
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def merge_switch_fields(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the switch fields of a request (``stronger``) with defaults (``weaker``), name by name; return the result.

    If ``stronger`` says something about thinking (``enable_thinking``, ``thinking`` or ``reasoning_effort``), it
    replaces everything that ``weaker`` says about thinking. ``enable_thinking`` becomes a part of
    ``chat_template_kwargs``, the form that other servers read too. Malformed fields are returned as they are.
    """
    weak, strong = (
        {name: fields[name] for name in SWITCH_FIELDS if fields.get(name) is not None} for fields in (weaker, stronger)
    )
    weak_switches, strong_switches = weak.pop(SWITCHES, {}), strong.get(SWITCHES, {})
    if not isinstance(weak_switches, Mapping) or not isinstance(strong_switches, Mapping):
        return strong
    if _DECIDING & {*strong, *strong_switches}:
        weak = {}
        weak_switches = {name: value for name, value in weak_switches.items() if name not in _DECIDING}
    switches = {**weak_switches, **strong_switches}
    merged = {**weak, **strong}
    merged.pop(SWITCHES, None)
    if ENABLE_THINKING in merged and switches.get(ENABLE_THINKING, merged[ENABLE_THINKING]) is merged[ENABLE_THINKING]:
        switches[ENABLE_THINKING] = merged.pop(ENABLE_THINKING)
    return {**merged, SWITCHES: switches} if switches else merged


def without_switches(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request without its switch fields."""
    return {name: value for name, value in fields.items() if name not in SWITCH_FIELDS}


def template_switches(
    fields: Mapping[str, Any], template: str, thoughts: ThoughtFormat | None = FORMATS[0]
) -> dict[str, Any]:
    """Return the variables for a template, from the switch fields of a request.

    Args:
        fields: ``chat_template_kwargs``, ``enable_thinking`` and ``reasoning_effort``; other fields are ignored.
        template: The chat template.
        thoughts: Tags around the thoughts of the model's family. A template that contains these tags belongs to a model
            that thinks.

    Raises:
        SwitchError: A field is malformed, two fields contradict each other, or the template does not read the switch.
    """
    check_switch_fields(fields)
    switches = dict(fields.get(SWITCHES) or {})
    thinking = _agreed({name: switches.pop(name, None) for name in THINKING} | {"": fields.get(ENABLE_THINKING)})
    effort = _agreed({SWITCHES: switches.pop(EFFORT, None), EFFORT: fields.get(EFFORT)})
    readable = variables_of(template)
    if unknown := sorted(switches.keys() - readable):
        names = ", ".join(sorted(readable)) or "no switches"
        raise SwitchError(
            f"{SWITCHES}.{unknown[0]} has no effect: the chat template of this model does not read it; it reads {names}"
        )
    return switches | _thinking_switches(thinking, effort, readable, template, thoughts or ())


@functools.lru_cache(maxsize=64)
def variables_of(template: str) -> frozenset[str]:
    """Return the variables that a template reads and that a request may set. A variable that the template sets itself
    counts only if the template tests whether it is defined.
    """
    from jinja2 import Environment, TemplateError, meta, nodes  # jinja2 is installed wherever templates are rendered

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
        read = meta.find_undeclared_variables(parsed)
    except (TemplateError, RecursionError):  # the rendering reports the error
        return frozenset()
    tests = [test for test in parsed.find_all(nodes.Test) if test.name in {"defined", "undefined"}]
    filters = [default for default in parsed.find_all(nodes.Filter) if default.name in {"default", "d"}]
    tested = {part.node.name for part in (*tests, *filters) if isinstance(part.node, nodes.Name)}
    stored = {name.name for name in parsed.find_all(nodes.Name) if name.ctx != "load"}
    free = {name for name in read if name in tested or name not in stored}
    return frozenset(name for name in free if name not in RESERVED and not name.endswith("_token"))


def _agreed(values: Mapping[str, Any]) -> Any:
    present = [value for value in values.values() if value is not None]
    if any(value != present[0] for value in present):
        raise SwitchError(f"the request asks for thinking twice, with {present[0]!r} and {present[-1]!r}; ask once")
    return present[0] if present else None


def _thinking_switches(
    thinking: bool | None, effort: str | None, readable: Collection[str], template: str, tags: Collection[str]
) -> dict[str, Any]:
    if thinking is None and effort is None:
        return {}
    if thinking and effort == "none":
        raise SwitchError(f"{ENABLE_THINKING} is true and {EFFORT} is none; leave one of them out", EFFORT)
    switch = next((name for name in THINKING if name in readable), None)
    levels = list(_levels(template)) if EFFORT in readable else []
    thinks = switch is not None or bool(levels) or any(tag in template for tag in tags)
    if thinking is False or effort == "none":
        return _switches_without_thoughts(switch, levels) if thinks else {}
    if not thinks:
        if thinking:
            raise SwitchError("thinking cannot be switched on: the chat template has no thoughts; leave it out")
        return {}  # a level only limits thoughts
    on: dict[str, Any] = {} if switch is None else {switch: True}
    if levels and effort is not None:
        if effort not in levels:
            raise SwitchError(f"{EFFORT} is {effort}; the template of this model knows {', '.join(levels)}", EFFORT)
        return {**on, EFFORT: effort}
    if effort is not None and effort not in _SATISFIED:
        advice = "send none, or medium or more" if switch is not None else "leave it out"
        raise SwitchError(
            f"{EFFORT} is {effort}, and the chat template of this model cannot limit its thoughts; {advice}", EFFORT
        )
    return on


def _switches_without_thoughts(switch: str | None, levels: Sequence[str]) -> dict[str, Any]:
    if switch is not None:
        return {switch: False}
    if "none" in levels:
        return {EFFORT: "none"}
    advice = f"the lowest {EFFORT} is {levels[0]}" if levels else "leave it out"
    raise SwitchError(f"thinking cannot be switched off: the chat template has no switch for it; {advice}")


def _levels(template: str) -> Iterator[str]:
    """Yield the levels of effort that a template supports: the levels that it names, or the usual levels if it names
    fewer than two.
    """
    named = [level for level in EFFORTS if re.search(rf"""(["']){level}\1""", template)]
    yield from named if len(named) > 1 else _USUAL_EFFORTS
