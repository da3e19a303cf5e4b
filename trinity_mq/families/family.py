"""Interface of a model family, and the answer that it reads from sampled text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from trinity_mq.families.messages import Message, Messages, Tools
from trinity_mq.thoughts import FORMATS, ThoughtFormat

ROLES: Mapping[str, str] = MappingProxyType({"developer": "system", "function": "tool"})
"""API roles that have another name in most families, each with that name."""


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


ReadAnswer = Callable[[str, str | None, Tools], ParsedAnswer]
"""Reads the text of a response, special tokens included. Arguments: text; the end of the prompt, which may open
thoughts (None: unknown); the offered tools, whose schemas give the types of arguments.
"""


@dataclass(frozen=True, slots=True)
class Family:
    """The forms of a model family. A row of the table."""

    name: str
    read: ReadAnswer
    """Reads an answer. It takes time linear in the length of the text, and never raises because of the text."""
    calls_begin: tuple[str, ...] = ()
    """Texts that begin tool calls in a response. A stream holds text back from the first of them."""
    thoughts: ThoughtFormat | None = FORMATS[0]
    """Tags around thoughts. None: the family has no thoughts."""
    marks: tuple[str, ...] = ()
    """Texts that all chat templates of the family contain, and no template outside the family."""
    library: str = ""
    """Name of the family's configuration in the package ``renderers``. Empty: that package does not know the family."""
    grammar: str = ""
    """Name of the form of the family's calls in the package ``xgrammar``. Empty: calls cannot be constrained."""
    arguments: Literal["object", "text"] = "object"
    """``object``: templates write arguments as JSON themselves. ``text``: templates take JSON text."""
    roles: Mapping[str, str] = field(default_factory=lambda: ROLES)
    """API roles, each with the family's name. Messages in API roles remain the fallback for templates without that
    name.
    """

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
        if any(message["role"] in self.roles for message in messages):
            yield [{**message, "role": self.roles.get(message["role"], message["role"])} for message in written]
        yield written


def _with_text(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
