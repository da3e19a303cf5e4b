"""What is proven for which template of which maker: one source for the tests in this folder and docs/families.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.golden.families.conversations import CASES, Case, Message
from tests.golden.families.makers import rendering_of

WITH_THOUGHTS = frozenset(title for title in CASES if "thoughts" in title)
WITH_TOOLS = frozenset(title for title, case in CASES.items() if case.tools)
WITH_CALLS = frozenset(
    title for title, case in CASES.items() if any("tool_calls" in message for message in case.messages)
)
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
EARLIER = frozenset(("two turns", "turn after a result", "turn after thoughts", "unicode", "empty answer"))
"""Conversations with a turn before the user's last message. Many templates leave out the thoughts of that turn, also
empty ones.
"""
THOUGHTS_OFF = frozenset(("thoughts", "thoughts and call"))
"""Conversations with thoughts, which nobody samples while thinking is off."""
FINISHED = EARLIER | {
    "result",
    "answer after a result",
    "parallel calls",
    "two rounds",
    "text and call",
}
"""Conversations with a turn before the last answer. Qwen3 writes empty thoughts for the last answer only."""
TAGS = frozenset(("tags in arguments",))
UNSAMPLED = FINISHED | TAGS | {"answered", "one call"}
"""Conversations without thoughts, where the prompt opens thoughts: nobody samples these turns."""
AFTER_THOUGHTS = frozenset(("turn after thoughts",))
MOVED = frozenset(("turn after a result",))
"""Mistral writes the tools before the last message of the user."""


@dataclass(frozen=True)
class Proof:
    """A maker's template, and what our rendering of it may do."""

    template: str
    """Name in ``sources.json``."""
    family: str
    """Row of :data:`trinity_mq.families.table.FAMILIES`."""
    rewritten: Sequence[tuple[Mapping[str, Any], frozenset[str]]] = (({}, frozenset()),)
    """Variables of the template, each time with the conversations in which the template writes an earlier turn in
    another form than it was sampled, so that its mask is unknown.
    """
    thoughts: str = ""
    """Key of a message from which the template reads thoughts; ``parts``: parts of the content. Empty: it has none."""
    writes_tools: bool = True
    arguments: str = "object"
    """``text``: the template takes arguments as JSON text."""
    refused: frozenset[str] = frozenset()
    """Conversations that this template refuses, or of which it leaves something out."""
    unread: frozenset[str] = frozenset()
    """Conversations whose answers are not read back as they were. ``reason`` says why."""
    reason: str = ""
    breaks: frozenset[str] = frozenset()
    """Conversations whose last finished turn is rendered anew, because the template would write it in another form."""
    calls: str = ""
    """Words for what is known of tools and calls. Empty: by the conversations above."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Variables that make the template independent of the day."""

    def cases(self) -> Iterator[tuple[str, Case]]:
        """Yield the conversations for which the template defines a form."""
        for title, case in CASES.items():
            if title in WITH_THOUGHTS and not self.thoughts:
                continue
            yield title, case if self.writes_tools else Case(case.messages)

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
        return rendering_of(self.template, self.maker_form(messages), tools, asks=asks, **{**self.fixed, **switches})


def _with_text(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


_QWEN35_OFF = EARLIER | THOUGHTS_OFF
_XML = "a closing tag in the text of an argument ends the argument"
_ALONE = "the template writes no text next to calls"
_QWEN35 = Proof(
    "qwen3.5",
    "qwen3.5",
    (({}, EARLIER), (OFF, _QWEN35_OFF), (ON, EARLIER)),
    thoughts="reasoning_content",
    unread=TAGS,
    reason=_XML,
    breaks=AFTER_THOUGHTS,
)
_LLAMA31 = Proof(
    "llama3.1",
    "llama",
    refused=frozenset(("parallel calls",)),
    unread=frozenset(("text and call",)),
    reason=_ALONE,
)
_GLM45 = Proof(
    "glm4.5",
    "glm",
    (({}, AFTER_THOUGHTS), (OFF, WITH_THOUGHTS)),
    thoughts="reasoning_content",
    unread=TAGS,
    reason=_XML,
    breaks=AFTER_THOUGHTS,
)
_MISTRAL = Proof(
    "mistral-nemo",
    "mistral",
    (({}, MOVED),),
    unread=frozenset(("text and call",)),
    reason=_ALONE,
    breaks=MOVED,
)

PROOFS = (
    Proof("qwen2.5", "hermes"),
    Proof(
        "qwen3",
        "hermes",
        (({}, FINISHED), (OFF, FINISHED | WITH_THOUGHTS), (ON, FINISHED)),
        thoughts="reasoning_content",
        breaks=AFTER_THOUGHTS,
    ),
    Proof("qwen3-instruct-2507", "hermes"),
    Proof("qwen3-thinking-2507", "hermes", (({}, FINISHED),), thoughts="reasoning_content", breaks=AFTER_THOUGHTS),
    _QWEN35,
    replace(_QWEN35, template="qwen3.5-small", rewritten=(({}, _QWEN35_OFF), (OFF, _QWEN35_OFF), (ON, EARLIER))),
    replace(_QWEN35, template="qwen3.6"),
    Proof("smollm2", "hermes", refused=WITH_TOOLS - WITH_THOUGHTS),
    Proof("llama3", "llama", refused=WITH_TOOLS - WITH_THOUGHTS),
    _LLAMA31,
    replace(_LLAMA31, template="llama3.2", fixed={"date_string": "26 Jul 2024"}),
    Proof("gemma3", "gemma", refused=WITH_TOOLS - WITH_THOUGHTS),
    Proof("phi3", "phi", refused=WITH_TOOLS - WITH_THOUGHTS),
    Proof("phi3.5", "phi", refused=WITH_TOOLS - WITH_THOUGHTS),
    _GLM45,
    replace(_GLM45, template="glm4.6"),
    replace(_GLM45, template="glm4.7", rewritten=(({}, UNSAMPLED), (OFF, WITH_THOUGHTS)), breaks=EARLIER),
    Proof(
        "deepseek-r1",
        "deepseek",
        (({}, UNSAMPLED - WITH_THOUGHTS),),
        arguments="text",
        writes_tools=False,
        breaks=EARLIER - {"turn after thoughts", "turn after a result"},
    ),
    Proof(
        "deepseek-r1-distill",
        "deepseek",
        (({}, frozenset(("answered", "two turns", "unicode", "empty answer"))),),
        arguments="text",
        writes_tools=False,
        refused=WITH_CALLS - WITH_THOUGHTS,
        breaks=EARLIER - {"turn after thoughts", "turn after a result"},
    ),
    Proof("deepseek-v3.1", "deepseek-v3.1", writes_tools=False),
    Proof(
        "gpt-oss",
        "gpt-oss",
        (({}, EARLIER), ({"reasoning_effort": "high"}, EARLIER)),
        thoughts="thinking",
        refused=frozenset(("parallel calls",)),
        unread=frozenset(("text and call",)),
        reason="the template writes text next to calls as thoughts",
        breaks=EARLIER,
    ),
    Proof("kimi-k2", "kimi", writes_tools=False, refused=WITH_CALLS - WITH_THOUGHTS, calls="not proven"),
    _MISTRAL,
    replace(_MISTRAL, template="mistral-small-3.2"),
    Proof("ministral-3", "mistral", thoughts="parts", refused=frozenset(("empty answer",))),
    Proof(
        "qwen3.8",
        "qwen3.5",
        (({}, frozenset()), (OFF, WITH_THOUGHTS), (ON, frozenset())),
        thoughts="reasoning_content",
        unread=TAGS,
        reason=_XML,
    ),
    Proof("qwen3-coder", "qwen3.5", unread=TAGS, reason=_XML),
    Proof(
        "nemotron-3",
        "nemotron",
        (({}, UNSAMPLED), (OFF, WITH_THOUGHTS)),
        thoughts="reasoning_content",
        unread=TAGS,
        reason=_XML,
        breaks=EARLIER,
    ),
    Proof("minimax-m2", "minimax", (({}, UNSAMPLED),), thoughts="reasoning_content", breaks=EARLIER),
)
"""Proven templates."""
TOOL_PROOFS = tuple(proof for proof in PROOFS if proof.writes_tools and "one call" not in proof.refused)
"""Templates that write tools and calls. Those of DeepSeek, Gemma 3, Llama 3, Phi 3 and SmolLM2 do not, and transformers
refuses what the template of Kimi K2 does with calls.
"""

UNPROVEN = {
    "gemma4": "TRL holds templates of five revisions; no golden test compares them yet",
    "phi": "calls of Phi-4-mini: the format is that of the model card, and no package holds the template",
    "kimi": "tools, calls and results of Kimi K2: the copy of the template was changed for another program, and the "
    "maker's tokenizer, which sorts the keys of tools, is in no package",
    "deepseek": "DeepSeek V3 and V3-0324: no package holds their template (R1 and V3.1 are proven)",
    "hermes": "calls of SmolLM2: its template writes no tools; the format is that of the model card",
    "gemma": "calls of Gemma 3: the maker gives no format",
}
"""What is not proven, by rows of the table."""
