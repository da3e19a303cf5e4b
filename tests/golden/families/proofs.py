"""What is proven for which template of which maker: the one source of the tests in this folder and of docs/families.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.golden.families.conversations import CASES, Case, Message
from tests.golden.families.makers import rendering_of

WITH_THOUGHTS = frozenset(title for title in CASES if "thoughts" in title)
WITH_TOOLS = frozenset(title for title, case in CASES.items() if case.tools)
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@dataclass(frozen=True)
class Proof:
    """A maker's template, and what our rendering of it may do."""

    template: str
    """Name in ``sources.json``."""
    family: str
    """Row of :data:`trinity_mq.families.table.FAMILIES`."""
    switches: Sequence[Mapping[str, Any]] = ({},)
    thoughts: str = ""
    """Key of a message from which the template reads thoughts; ``parts``: parts of the content. Empty: it has none."""
    writes_tools: bool = True
    arguments: str = "object"
    """``text``: the template takes arguments as JSON text."""
    refused: frozenset[str] = frozenset()
    """Conversations that this template refuses, or of which it leaves something out."""
    rewritten: frozenset[str] = frozenset()
    """Conversations with an earlier turn in another form than it was sampled: their masks are unknown."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Variables that make the template independent of the day."""

    def cases(self) -> Iterator[tuple[str, Case]]:
        """Yield the conversations for which the template defines a form."""
        for title, case in CASES.items():
            if title not in WITH_THOUGHTS or self.thoughts:
                yield title, case

    def maker_form(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the maker documents them for this template."""
        return [self._maker_form(message) for message in messages]

    def _maker_form(self, message: Message) -> Message:
        form = {key: value for key, value in message.items() if key != "reasoning_content"}
        thoughts = message.get("reasoning_content")
        if thoughts and self.thoughts == "parts":
            parts = [{"type": "thinking", "thinking": thoughts}]
            form["content"] = [*parts, *([{"type": "text", "text": message["content"]}] if message["content"] else [])]
        elif thoughts and self.thoughts:
            form[self.thoughts] = thoughts
        if self.arguments == "text" and "tool_calls" in message:
            form["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return form

    def truth(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, asks: bool, **switches: Any
    ) -> str:
        """Return the text that the maker's template writes."""
        return rendering_of(self.template, self.maker_form(messages), tools, asks=asks, **self.fixed, **switches)


def _with_text(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


PROOFS = (
    Proof("qwen2.5", "hermes"),
    Proof("qwen3", "hermes", ({}, OFF, ON), thoughts="reasoning_content"),
    Proof("qwen3-instruct-2507", "hermes"),
    Proof("qwen3-thinking-2507", "hermes", thoughts="reasoning_content"),
    Proof("qwen3.5", "qwen3.5", ({}, OFF, ON), thoughts="reasoning_content"),
    Proof("qwen3.5-small", "qwen3.5", ({}, OFF, ON), thoughts="reasoning_content"),
    Proof("qwen3.6", "qwen3.5", ({}, OFF, ON), thoughts="reasoning_content"),
    Proof("smollm2", "hermes"),
    Proof("llama3", "llama"),
    Proof("llama3.1", "llama"),
    Proof("llama3.2", "llama", fixed={"date_string": "26 Jul 2024"}),
    Proof("gemma3", "gemma"),
    Proof("phi3", "phi"),
    Proof("phi3.5", "phi"),
    Proof("glm4.5", "glm", ({}, OFF), thoughts="reasoning_content"),
    Proof("glm4.6", "glm", ({}, OFF), thoughts="reasoning_content"),
    Proof("glm4.7", "glm", ({}, OFF), thoughts="reasoning_content"),
    Proof("deepseek-r1", "deepseek", arguments="text"),
    Proof("deepseek-r1-distill", "deepseek", arguments="text"),
    Proof("deepseek-v3.1", "deepseek-v3.1"),
    Proof("gpt-oss", "gpt-oss", ({}, {"reasoning_effort": "high"}), thoughts="thinking"),
    Proof("kimi-k2", "kimi"),
    Proof("mistral-nemo", "mistral"),
    Proof("mistral-small-3.2", "mistral"),
    Proof("ministral-3", "mistral", thoughts="parts"),
)
