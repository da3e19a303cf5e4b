"""The package ``renderers``: rendering, bridges and readers of calls for the families that it knows.

The configuration of a renderer is chosen by the row of the family, never by the name of the model. A renderer is used
only if its tokens equal the tokens of the model's own chat template for :data:`PROBES`. The package's renderer of
gpt-oss is never used: it loads its own vocabulary over the network, whose tokens may differ from the model's.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity_mq.families.division import CallReader, ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.json_calls import MAX_CALL_CHARACTERS, MAX_CALLS
from trinity_mq.families.messages import THOUGHTS, Message, Messages, Tools

_COSTLY = re.compile(r"<(?:invoke|parameter|function|arg_key|arg_value)\b")
"""Beginnings of parts that the package's patterns may search to the end of the text. A text with too many for its
length is not read.
"""
_MAX_COST = 1 << 26
_LONGEST_ID = 256
"""Maximum characters of the identifier of a call that the model writes."""
_SWITCH = "enable_thinking"


Write = Callable[[Messages, Tools, bool], tuple[list[Message], list[int]] | None]
"""Returns messages in the form of a chat template, and the tokens of the rendered messages. None: the template cannot
write these messages. Arguments: messages, tools, whether to end with the opening of the next answer.
"""


class LibraryUnfit(Exception):
    """The package cannot render for this model; the message gives the reason."""


# -- reading of calls


class MarkTokenizer:
    """A vocabulary for reading only: each mark of a family is a token, and each other character is a token.

    The package reads tokens. With this vocabulary it reads any text, without the model's tokenizer.
    """

    name_or_path = ""
    unk_token_id = None
    eos_token_id = None
    chat_template = ""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []
        self._pattern: re.Pattern[str] | None = None
        self.learns = True
        """If true, :meth:`encode` adds a text that is a single special token as a mark. Renderers encode their special
        tokens in their constructors.
        """

    def convert_tokens_to_ids(self, token: str) -> int:
        """Return the token id of a mark; add the mark to the vocabulary if it is new."""
        if token not in self._ids:
            self._ids[token] = _MARKS + len(self._texts)
            self._texts.append(token)
            marks = sorted(self._ids, key=len, reverse=True)
            self._pattern = re.compile(f"({'|'.join(map(re.escape, marks))})")
        return self._ids[token]

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Return the token ids of a text."""
        if self.learns and _SPECIAL.fullmatch(text):
            self.convert_tokens_to_ids(text)
        pieces = self._pattern.split(text) if self._pattern else [text]
        ids: list[int] = []
        for piece in pieces:
            mark = self._ids.get(piece)
            ids.extend(map(ord, piece) if mark is None else [mark])
        return ids

    def decode(self, token_ids: Sequence[int], *_: Any, **__: Any) -> str:
        """Return the text of token ids."""
        return "".join(chr(token) if token < _MARKS else self._texts[token - _MARKS] for token in token_ids)


_SPECIAL = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>")
"""Matches a special token. DeepSeek writes special tokens with a fullwidth bar."""
_MARKS = 0x110000
"""First token id of a mark, above the code points of all characters."""


def calls_reader(name: str) -> CallReader:
    """Return a reader of the tool calls of a family that the package knows. The reader drops text between and after
    calls.

    Args:
        name: Name of the package's configuration.
    """

    def read(text: str, tools: Tools) -> ReadCalls:
        if len(text) > MAX_CALL_CHARACTERS or len(_COSTLY.findall(text)) * len(text) > _MAX_COST:
            return ReadCalls([], 1)
        renderer, tokenizer = _reading(name)
        try:
            attempts = renderer.parse_response(tokenizer.encode(text), tools=list(tools or ())).tool_calls
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
            # hostile text or hostile schemas of tools that the package does not expect
            return ReadCalls([], 1)
        if len(attempts) > MAX_CALLS:
            return ReadCalls([], len(attempts))
        if not attempts:
            return ReadCalls([], 1)
        schemas = _schemas(tools)
        calls = [_call(attempt, schemas) for attempt in attempts]
        valid = [call for call in calls if call is not None]
        if len(valid) < len(calls):
            return ReadCalls([], len(calls) - len(valid))
        return ReadCalls(valid)

    return read


@functools.lru_cache(maxsize=64)
def _reading(name: str) -> tuple[Any, MarkTokenizer]:
    tokenizer = MarkTokenizer()
    config = _config_class(name)
    fields = {_SWITCH: False} if _SWITCH in config.template_field_names() else {}
    renderer = _renderer(tokenizer, config(**fields))
    tokenizer.learns = False
    return renderer, tokenizer


def _call(attempt: Any, schemas: Mapping[str, Mapping[str, Any]]) -> Message | None:
    """Convert a call that the package read; return None if it is malformed. This does not check whether the tool and
    its parameters exist: the client checks that and tells the model.
    """
    is_read = attempt.status in _READ or (attempt.status == "invalid_json" and isinstance(attempt.arguments, dict))
    if not is_read or not isinstance(attempt.name, str) or not attempt.name:
        return None
    arguments = attempt.arguments
    if isinstance(arguments, dict):
        types = schemas.get(attempt.name, {})
        arguments = {name: _boolean(value, types.get(name)) for name, value in arguments.items()}
    elif not isinstance(arguments, str):
        return None
    try:
        call_id = attempt.id if attempt.id and len(attempt.id) <= _LONGEST_ID else None
        return api_call(attempt.name, arguments, call_id)
    except ValueError:
        return None


def _boolean(value: Any, declared: Any) -> Any:
    """Convert the texts ``True`` and ``False`` to booleans if the parameter is boolean. Templates write booleans of
    earlier calls in this form.
    """
    return _PYTHON_BOOLEANS.get(value, value) if isinstance(value, str) and declared == "boolean" else value


def _schemas(tools: Tools) -> dict[str, dict[str, Any]]:
    """Return the declared types of parameters, by tool name and parameter name."""
    types = {}
    for tool in tools or ():
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties")
        if isinstance(properties, Mapping):
            types[function["name"]] = {
                name: schema.get("type") for name, schema in properties.items() if isinstance(schema, Mapping)
            }
    return types


_READ = frozenset({"ok", "unknown_tool"})
_PYTHON_BOOLEANS = {"True": True, "False": False}


# -- rendering


def _config_class(name: str) -> Any:
    from renderers.configs import config_from_name

    return type(config_from_name(name))


def _renderer(tokenizer: Any, config: Any) -> Any:
    import renderers

    # create_renderer would import all families and the vocabulary of gpt-oss
    return getattr(renderers, type(config).__name__.removesuffix("Config"))(tokenizer, config)


def open_renderer(
    names: Sequence[str],
    tokenizer: Any,
    switches: Mapping[str, Any],
    write: Write,
) -> tuple[str, Any]:
    """Return the first renderer whose tokens equal the tokens of the chat template, with the name of its configuration.
    The tokens are compared for every probe that the template can write.

    Args:
        names: Names of the package's configurations.
        tokenizer: The model's tokenizer, in the form that the package reads.
        switches: Variables of the chat template.
        write: Renders probes with the chat template.

    Raises:
        LibraryUnfit: The package cannot be imported, or cannot render for this model.
    """
    reasons = []
    for name in names:
        try:
            return name, _fitting(name, tokenizer, switches, write)
        except LibraryUnfit as error:
            reasons.append(f"{name}: {error}")
        except ImportError as error:
            raise LibraryUnfit(f"it cannot be imported: {error}") from error
    raise LibraryUnfit("; ".join(reasons))


def _fitting(name: str, tokenizer: Any, switches: Mapping[str, Any], write: Write) -> Any:
    config = _config_class(name)
    fields = config.template_field_names()
    if others := sorted(set(switches) - fields):
        raise LibraryUnfit(f"the package does not know {', '.join(others)}")
    choices: list[dict[str, Any]] = [dict(switches)]
    if _SWITCH in fields and _SWITCH not in switches:
        choices += [{**switches, _SWITCH: value} for value in (True, False)]
    reason = ""
    for choice in choices:
        try:
            renderer = _renderer(tokenizer, config(**choice))
            difference = _difference(renderer, write)
        except Exception as error:  # the package asserts and raises many classes
            difference = " ".join(str(error).split())[:200] or type(error).__name__
        if not difference:
            return renderer
        reason = reason or difference
    raise LibraryUnfit(reason)


def _difference(renderer: Any, write: Write) -> str:
    """Return a description of the first probe whose tokens differ from the chat template's; empty if all tokens are
    equal.
    """
    compared = 0
    for description, messages, offered in PROBES:
        for asks, tools in itertools.product((True, False), {bool(offered): offered, False: None}.values()):
            written = write(messages, tools, asks)
            if written is None:
                continue
            compared += 1
            form, expected = written
            if list(renderer.render_ids(form, tools=tools, add_generation_prompt=asks)) != expected:
                return f"its tokens differ from the chat template's for {description}"
    return "" if compared else "the chat template writes none of the probes"


def _turn(role: str, content: str, **others: Any) -> Message:
    return {"role": role, "content": content, **others}


def _probe_call(number: int, arguments: Any) -> Message:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a place, "now" & <here>.',
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "A place"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
_ASK = _turn("user", "What is 2 + 2?\nThink.  ")
_CALLS = _turn(
    "assistant",
    "",
    tool_calls=[_probe_call(1, {"place": "K\u00f6ln \u4e2d", "days": 2, "now": True, "of": {"a": [1, None]}})],
)
_TWO_CALLS = _turn(
    "assistant", "I look.", tool_calls=[_probe_call(1, {"place": "Bonn"}), _probe_call(2, {"place": 'a "b"\n<c>'})]
)
_RESULTS = [
    _turn("tool", f"{degrees} \u00b0C", tool_call_id=f"call0000{degrees}", name="weather") for degrees in (1, 2)
]
_THOUGHT = _turn("assistant", "4", **{THOUGHTS: "Two and two.\nFour."})
PROBES: tuple[tuple[str, list[Message], list[Message] | None], ...] = (
    ("a question", [_ASK], None),
    ("a system message", [_turn("system", "You add."), _ASK], None),
    ("an answer", [_ASK, _turn("assistant", "It is\n\n4. ")], None),
    ("several turns", [_ASK, _turn("assistant", "4"), _turn("user", "Sure?"), _turn("assistant", "Yes.")], None),
    ("thoughts", [_ASK, _THOUGHT], None),
    ("earlier thoughts", [_ASK, _THOUGHT, _turn("user", "Sure?")], None),
    ("tools", [_ASK], [_TOOL]),
    ("tools and a system message", [_turn("system", "You look."), _ASK], [_TOOL]),
    ("a call", [_ASK, _CALLS], [_TOOL]),
    ("a result", [_ASK, _CALLS, _RESULTS[0]], [_TOOL]),
    ("two results", [_ASK, _TWO_CALLS, *_RESULTS], [_TOOL]),
    ("a call with thoughts", [_ASK, {**_CALLS, THOUGHTS: "I look."}, _RESULTS[0]], [_TOOL]),
    ("an answer after a result", [_ASK, _CALLS, _RESULTS[0], _THOUGHT, _turn("user", "And now?")], [_TOOL]),
)
"""Conversations that the renderer and the chat template must render to the same tokens: (description, messages, tools).
"""
