"""Switches: variables that a chat template reads in addition to messages and tools, such as ``enable_thinking``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator

SWITCHES, ENABLE_THINKING, EFFORT = "chat_template_kwargs", "enable_thinking", "reasoning_effort"
"""Fields of a request and of ``rollout_args`` with switches: any switches by name, and two switches by themselves."""
SWITCH_FIELDS = (SWITCHES, ENABLE_THINKING, EFFORT)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
"""Levels of ``reasoning_effort`` in the APIs of OpenAI and Anthropic, the lowest first."""

RESERVED = frozenset({
    # arguments of the template call
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
    # parts of messages, and tools that the reader of calls would not see
    "builtin_tools", "content", "custom_tools", "system_message",
    # functions and objects that templates find in their environment
    "cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range", "strftime_now",
})  # fmt: skip
"""Names that the rendering itself sets. Names that end with ``_token``, the special tokens, are reserved too."""
MAX_SWITCHES = 32
MAX_SWITCHES_CHARACTERS = 4096
"""Maximum number of switches, and maximum length of them as JSON text."""


class SwitchError(ValueError):
    """A switch cannot be used. The message gives the name, the value, the accepted values and the next step."""

    def __init__(self, problem: str, where: str = SWITCHES) -> None:
        super().__init__(problem)
        self.where = where
        """Field of the request with the fault, such as ``reasoning_effort``."""


def checked_switches(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``switches`` if they are few, plain JSON, and named like template variables that rendering does not set.

    Raises:
        SwitchError: The switches are too many, too long, not plain JSON, or have a reserved name or a wrong value.
    """
    if len(switches) > MAX_SWITCHES:
        raise SwitchError(f"{SWITCHES} holds {len(switches)} names, wanted at most {MAX_SWITCHES}")
    for name in switches:
        if not isinstance(name, str) or not name.isascii() or not name.isidentifier() or name.startswith("_"):
            raise SwitchError(f"{SWITCHES} holds the name {name!r:.80}, wanted the name of a variable of the template")
        if name in RESERVED or name.endswith("_token"):
            raise SwitchError(f"{SWITCHES}.{name:.80} is set by the rendering itself; leave it out")
    try:
        size = len(json.dumps(switches, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise SwitchError(f"{SWITCHES} holds a value that is not plain JSON: {error!s:.80}") from None
    if size > MAX_SWITCHES_CHARACTERS:
        raise SwitchError(f"{SWITCHES} has {size} characters as JSON, wanted at most {MAX_SWITCHES_CHARACTERS}")
    for name in (ENABLE_THINKING, "thinking"):
        if not isinstance(switches.get(name, False), bool):
            raise SwitchError(f"{SWITCHES}.{name} is {switches[name]!r:.80}, wanted true or false")
    check_effort(switches.get(EFFORT, "none"), f"{SWITCHES}.{EFFORT}")
    return dict(switches)


def check_effort(effort: Any, where: str = EFFORT) -> None:
    """Check a level of ``reasoning_effort``.

    Raises:
        SwitchError: ``effort`` is not a level.
    """
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise SwitchError(f"{where} is {effort!r:.80}, wanted one of {', '.join(EFFORTS)}", where)


def check_switch_fields(fields: Mapping[str, Any]) -> None:
    """Check the switches among the fields of a request or of ``rollout_args``.

    Raises:
        SwitchError: A field has the wrong type, or a switch is refused.
    """
    if not isinstance(switches := fields.get(SWITCHES) or {}, Mapping):
        raise SwitchError(f"{SWITCHES} is {switches!r:.80}, wanted an object with names and values")
    checked_switches(switches)
    if not isinstance(thinking := fields.get(ENABLE_THINKING), bool | None):
        raise SwitchError(f"{ENABLE_THINKING} is {thinking!r:.80}, wanted true or false", ENABLE_THINKING)
    if (effort := fields.get(EFFORT)) is not None:
        check_effort(effort)


def says_thinking(fields: Mapping[str, Any]) -> bool:
    """Return whether the switches among ``fields``, as :func:`check_switch_fields` accepts them, decide whether the
    model thinks.
    """
    present = {name for name in (ENABLE_THINKING, EFFORT) if fields.get(name) is not None}
    return bool(present or {ENABLE_THINKING, "thinking", EFFORT} & set(fields.get(SWITCHES) or {}))


ChatTemplateKwargs = Annotated[dict[str, Any], AfterValidator(checked_switches)]
