"""Interface of a model family, and the answer that it reads from sampled text."""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from trinity_mq.families.division import CallReader, Marks, divide
from trinity_mq.families.messages import THOUGHT_KEYS, THOUGHTS, Message, Messages, Tools
from trinity_mq.families.thoughts import FORMATS, ThoughtFormat, opens_thoughts
from trinity_mq.messages.msgpack_scan import repair_surrogates

PARTS = "content"
"""Value of :attr:`Family.thoughts_key`: templates read thoughts from content parts of the type ``thinking``."""
ROLES: Mapping[str, str] = MappingProxyType({"developer": "system", "function": "tool"})
"""Maps role names of the API to the names that most families use instead."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A response of a model, divided into the parts that API clients read."""

    content: str
    """Text for the user, without thoughts and calls."""
    thoughts: str | None = None
    """Text of the thoughts without their tags. None: the response has no thoughts."""
    calls: list[Message] = field(default_factory=list)
    """Tool calls in the form of the OpenAI API; ``arguments`` is JSON text."""
    malformed: int = 0
    """Number of calls that begin but cannot be read. Their text stays in ``content``."""


@dataclass(frozen=True, slots=True)
class Family:
    """The forms of a model family. A row of the table."""

    name: str
    read_calls: CallReader
    """Reads the tool calls of an answer, in time linear in the length of the text."""
    calls_begin: tuple[str, ...] = ()
    """Texts that begin tool calls in a response. A stream emits no text from the first call on."""
    _: KW_ONLY
    thoughts: ThoughtFormat | None = FORMATS[0]
    """Tags around thoughts. None: the family has no thoughts."""
    headers: tuple[str, ...] = ()
    """Texts that the model writes around the content of an answer, and that are not part of the content."""
    thoughts_key: str | None = None
    """Key of a message from which templates read thoughts. :data:`PARTS`: templates read thoughts from parts of the
    content. Empty: templates read thoughts from the content, between the tags. None: the key that the template names.
    """
    marks: tuple[str, ...] = ()
    """Texts that all chat templates of the family contain. A template belongs to the first row of the table whose marks
    it contains. Empty: any template.
    """
    library: tuple[str, ...] = ()
    """Names of the family's configurations in the package ``renderers``. The first configuration that gives the same
    tokens as the chat template is used. Empty: that package does not render this family.
    """
    grammar: str = ""
    """Name that the package ``xgrammar`` has for the form of the family's tool calls. Empty: calls cannot be
    constrained.
    """
    arguments: Literal["object", "text"] = "object"
    """``object``: templates write arguments as JSON themselves. ``text``: templates take JSON text."""
    call_id: Callable[[str], str] | None = None
    """Converts the id of a tool call to the form that templates accept. None: templates accept any text as id."""
    roles: Mapping[str, str] = field(default_factory=lambda: ROLES)
    """Maps role names of the API to the family's names. Messages with the API's names remain the fallback for templates
    that refuse the family's names.
    """

    def marks_of(self, tools: Tools) -> Marks:
        """Return the texts that divide an answer. Without offered tools, no text is a call."""
        return Marks(self.thoughts, self.calls_begin if tools else (), self.headers)

    def read(self, text: str, prompt_end: str | None, tools: Tools) -> ParsedAnswer:
        """Divide a response into thoughts, content and tool calls. Thoughts and content begin with the text that
        :class:`~trinity_mq.families.division.AnswerFlow` streams for the marks of this family.

        Args:
            text: The response, special tokens included.
            prompt_end: The prompt, or its last characters, which may open thoughts. None: unknown.
            tools: The offered tools, whose schemas give the types of arguments. Without tools, no text is a call.
        """
        marks = self.marks_of(tools)
        if not marks.divide(text) and not opens_thoughts(prompt_end, self.thoughts):
            return ParsedAnswer(text)
        thoughts, content, section = divide(text, marks, prompt_end)
        if not section:
            return ParsedAnswer(content, thoughts)
        try:
            calls, malformed, rest = self.read_calls(section, tools)
        except ValueError:
            calls, malformed, rest = [], 1, ""
        if not calls:
            thoughts, content, _ = divide(text, self.marks_of(None), prompt_end)
            return ParsedAnswer(content, thoughts, [], malformed)
        return ParsedAnswer(content + ("\n" * bool(content) + rest if rest else ""), thoughts, calls, malformed)

    def with_thoughts(self, messages: Messages, template: str) -> list[Message]:
        """Move the thoughts of assistant messages to the place from which this template reads thoughts, or leave the
        thoughts out if the template reads none; return the messages.

        Args:
            messages: Messages with thoughts under ``reasoning_content``.
            template: The chat template.
        """
        key = self.thoughts_key
        if key is None:
            key = next((name for name in THOUGHT_KEYS if _names(template, name)), "")
        elif key == PARTS and not _names(template, "thinking"):
            return [_without(message, THOUGHTS) for message in messages]
        return [self._with_thoughts(message, key) if THOUGHTS in message else message for message in messages]

    def _with_thoughts(self, message: Message, key: str) -> Message:
        thoughts, content, others = message[THOUGHTS], message.get("content") or "", _without(message, THOUGHTS)
        if key == THOUGHTS:
            return message
        if key == PARTS:
            texts = [{"type": "text", "text": content}] if content else []
            return {**others, PARTS: [{"type": "thinking", "thinking": thoughts}, *texts]}
        if key:
            if message.get("tool_calls") and content:  # gpt-oss refuses calls with content and thoughts
                return {**others, "content": "", key: f"{thoughts}\n\n{content}"}
            return {**others, key: thoughts}
        if self.thoughts is None:
            return others
        opening, closing = self.thoughts
        return {**others, "content": f"{opening}\n{thoughts}\n{closing}\n\n{content}"}

    def forms_of(self, messages: Messages) -> Iterator[list[Message]]:
        """Yield these messages in the forms that a template may accept, the most likely form first."""
        written = list(messages)
        if self.arguments != "object":
            written = [
                {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
                if message.get("tool_calls")
                else message
                for message in messages
            ]
        if self.call_id is not None:
            written = _with_call_ids(written, self.call_id)
        if any(message["role"] in self.roles for message in messages):
            renamed = [{**message, "role": self.roles.get(message["role"], message["role"])} for message in written]
            yield renamed
        else:
            renamed = written
        yield written
        yield from _strict_forms(renamed)


def api_call(name: str, arguments: Any, call_id: str | None = None) -> Message:
    """Return a tool call in the form of the OpenAI API. Arguments that are text already are kept as they are.

    Raises:
        ValueError: The arguments hold NaN or an infinite number, which JSON cannot express, or are nested too deeply.
    """
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("the arguments are nested too deeply") from error
    function = {"name": repair_surrogates(name), "arguments": repair_surrogates(text)}
    return {"id": call_id or f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def _names(template: str, key: str) -> bool:
    """Return whether a chat template reads ``key`` of a message."""
    return re.search(rf"\.{key}\b|['\"]{key}['\"]", template) is not None


def _with_call_ids(messages: Messages, call_id: Callable[[str], str]) -> list[Message]:
    """Convert ids of calls and of tool results with ``call_id``. A call or a result without an id gets its number as
    id.
    """
    calls, results = itertools.count(), itertools.count()

    def changed(message: Message) -> Message:
        listed, others = message.get("tool_calls"), dict(message)
        if listed:
            others["tool_calls"] = [{**call, "id": call_id(str(call.get("id") or next(calls)))} for call in listed]
        if message["role"] == "tool":
            others["tool_call_id"] = call_id(str(message.get("tool_call_id") or next(results)))
        return others

    return [changed(message) for message in messages]


def _strict_forms(messages: Messages) -> Iterator[list[Message]]:
    """Yield forms of these messages for stricter templates: first with system messages only at the beginning, then also
    without two user messages in a row. Coding agents send several system and user messages in a row, and system
    messages behind tool results.
    """
    if [message["role"] for message in messages[1:]].count("system"):
        messages = _joined(messages, ("system",))
        messages = [
            {**message, "role": "user"} if number and message["role"] == "system" else message
            for number, message in enumerate(messages)
        ]
        yield list(messages)
    if any(first["role"] == second["role"] == "user" for first, second in itertools.pairwise(messages)):
        yield _joined(messages, ("user",))


def _joined(messages: Messages, roles: Sequence[str]) -> list[Message]:
    """Join neighbouring messages of the same role, if it is among ``roles``, to one message."""
    joined: list[Message] = []
    for message in messages:
        if joined and message["role"] in roles and joined[-1]["role"] == message["role"]:
            texts = [text for text in (joined[-1].get("content"), message.get("content")) if text]
            joined[-1] = {**joined[-1], "content": "\n\n".join(texts)}
        else:
            joined.append(message)
    return joined


def _with_text(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
