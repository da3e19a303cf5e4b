"""Renders a conversation as engines do, and reads the assistant's turns as engines would."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_mq.config.switches import SWITCH_FIELDS, SWITCHES
from trinity_mq.engines.generation.text import TextCodec, TextError, shared_length
from trinity_mq.errors import CommandError
from trinity_mq.families.family import ParsedAnswer
from trinity_mq.families.messages import Message, MessageError, read_messages, read_tools
from trinity_mq.observability.experiences.show_experience import line, print_title
from trinity_mq.observability.experiences.token_texts import tokenizer_folder
from trinity_mq.operations.submit import read_json_argument
from trinity_mq.targets.run_folder import CONFIG_FILE
from trinity_mq.targets.target import find_configuration

if TYPE_CHECKING:
    from rich.console import Console


EXAMPLE = '[{"role": "user", "content": "1 + 1?"}]'
PROMPT_END = 1000
"""Number of characters at the end of a prompt that the answer's parser gets, to see whether the prompt opens
thoughts."""
_LIMIT = 1 << 30
"""Maximum tokens of a prompt; so large that no prompt is cut."""


@dataclass(frozen=True)
class ConversationInput:
    """A conversation to render."""

    messages: list[Message]
    tools: list[Message] | None
    switches: Mapping[str, Any]
    """The fields of a request that set variables of the chat template: ``chat_template_kwargs``, ``enable_thinking``
    and ``reasoning_effort``.
    """


@dataclass(frozen=True)
class RenderedTurn:
    """A turn of the assistant, and the answer that an engine would return if it had sampled the turn's text."""

    message: int
    """Number of the message."""
    text: str
    """Text of the turn in this conversation, with the token that ends it."""
    answer: ParsedAnswer


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as tokens."""

    family: str
    rendering: str
    """The package or template that renders the conversation, with the reason for this choice."""
    token_ids: list[int]
    texts: list[str]
    mask: list[int] | None
    """1 for tokens that an assistant samples. None: unknown; see ``problem``."""
    messages: list[int | None]
    """Number of the message to which each token belongs. None: it belongs to no message."""
    turns: list[RenderedTurn]
    problem: str
    """The reason for an unknown mask. Empty: the mask is known."""


# -- input


def read_conversation(text: str, tools: str | None = None, switches: str | None = None) -> ConversationInput:
    """Return the conversation in ``text``: JSON, ``@FILE`` or ``-`` for standard input.

    Args:
        text: A list of messages, or an object with ``messages``, as in a request, and possibly ``tools`` and
            ``chat_template_kwargs``, ``enable_thinking`` and ``reasoning_effort``.
        tools: The offered tools, in the same forms. They replace the conversation's tools.
        switches: Variables of the chat template, in the same forms. They override the conversation's variables.

    Raises:
        CommandError: An argument cannot be read, or messages or tools have another form than in the OpenAI API.
    """
    value = read_json_argument("--conversation", text, EXAMPLE)
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {"messages": value}
    listed = (
        fields.get("tools") if tools is None else read_json_argument("--tools", tools, '[{"type": "function", ...}]')
    )
    merged = fields.get("chat_template_kwargs") or {}
    if switches is not None:
        added = read_json_argument("--switches", switches, '{"enable_thinking": false}')
        merged = {**merged, **added} if isinstance(merged, dict) and isinstance(added, dict) else added
    for name, part, kind, wanted in (
        ("messages", fields.get("messages"), list, f"a list such as {EXAMPLE}"),
        ("tools", listed if listed is not None else [], list, "a list of tools as in the OpenAI API"),
        ("switches", merged, dict, 'an object such as {"enable_thinking": false}'),
    ):
        if not isinstance(part, kind):
            raise CommandError(f"{name} is {json.dumps(part, default=repr)[:80]}, wanted {wanted}")
    if not fields["messages"]:
        raise CommandError(f"the conversation has no messages; give a list such as {EXAMPLE}")
    try:
        chosen = {name: fields[name] for name in SWITCH_FIELDS if fields.get(name) is not None}
        tools_read = read_tools(listed) if listed else None
        return ConversationInput(read_messages(fields["messages"]), tools_read, {**chosen, SWITCHES: merged})
    except MessageError as error:
        raise CommandError(str(error)) from error


# -- rendering


def render_conversation(codec: TextCodec, conversation: ConversationInput) -> RenderedConversation:
    """Return the tokens of a conversation: a prompt, or the whole conversation if it ends with an answer.

    Raises:
        TextError: The model does not have a chat template, or the template refuses this conversation.
        SwitchError: The chat template has no such variable.
    """
    messages, tools = conversation.messages, conversation.tools
    switches = codec.switches(conversation.switches, tools)
    conversation = dataclasses.replace(conversation, switches=switches)
    if messages[-1]["role"] == "assistant":
        ids = codec.encode(codec.render_with_tools(messages, tools, switches=switches, add_generation_prompt=False))
    else:
        ids = codec.prompt(messages, tools, switches, limit=_LIMIT).token_ids
    mask, problem = _mask(codec, conversation, ids)
    if mask is not None and len(mask) > len(ids):  # the codec adds an end to a last turn that has none
        ids = [*ids, codec.end_id]
    return RenderedConversation(
        family=codec.family.name,
        rendering=codec.rendering_with(switches, tools),
        token_ids=ids,
        texts=codec.decode([[token] for token in ids]),
        mask=mask,
        messages=message_numbers(ids, _prefixes(codec, conversation)),
        turns=list(_turns(codec, conversation, ids)),
        problem=problem,
    )


def _mask(codec: TextCodec, conversation: ConversationInput, ids: Sequence[int]) -> tuple[list[int] | None, str]:
    """Return the mask of the sampled tokens, or None and the reason why it is unknown."""
    try:
        whole = codec.conversation(conversation.messages, conversation.tools, conversation.switches)
    except TextError as error:
        return None, str(error)
    shared = shared_length(whole.token_ids, ids)
    if 1 in whole.assistant_mask[shared:] and shared < len(ids):
        return None, "the prompt writes an earlier turn in another form than the whole conversation"
    if shared == len(ids):
        return whole.assistant_mask if len(whole.token_ids) == len(ids) + 1 else whole.assistant_mask[:shared], ""
    return [*whole.assistant_mask[:shared], *[0] * (len(ids) - shared)], ""


def _prefixes(codec: TextCodec, conversation: ConversationInput) -> list[list[int] | None]:
    """Return the tokens of the first 1, 2, ... messages; None where the template refuses this number of messages."""
    tools, switches = conversation.tools, conversation.switches
    prefixes: list[list[int] | None] = []
    for count in range(1, len(conversation.messages) + 1):
        part = conversation.messages[:count]
        try:
            text = codec.render_with_tools(part, tools, switches=switches, add_generation_prompt=False)
        except TextError:
            prefixes.append(None)
        else:
            prefixes.append(codec.encode(text))
    return prefixes


def message_numbers(ids: Sequence[int], prefixes: Sequence[Sequence[int] | None]) -> list[int | None]:
    """Return for each token the number of its message.

    Args:
        ids: Tokens of the conversation.
        prefixes: Tokens of its first 1, 2, ... messages; None: unknown. The tokens of a message begin where the tokens
            of fewer messages end. A message with unknown tokens counts as part of the next message. Where tokens differ
            (the template writes a message in another form once others follow), the end of that message is unknown, and
            the tokens up to the end of the next message get None.

    >>> message_numbers([7, 1, 2, 3, 4], [[7, 1], [7, 1, 2, 3]])
    [0, 0, 1, 1, None]
    >>> message_numbers([7, 1, 2, 3, 4], [[7], [7, 1, 9], [7, 1, 2, 3], [7, 1, 2, 3, 4]])
    [0, 1, None, None, 3]
    """
    numbers: list[int | None] = []
    differs = False
    for number, prefix in enumerate(prefixes):
        end = 0 if prefix is None else shared_length(ids, prefix)
        numbers += [None if differs else number] * max(0, end - len(numbers))
        if prefix is not None:
            differs = end < min(len(prefix), len(ids))
    return [*numbers, *[None] * (len(ids) - len(numbers))]


def _turns(codec: TextCodec, conversation: ConversationInput, ids: list[int]) -> Iterator[RenderedTurn]:
    """Yield each turn of the assistant whose prompt, the messages before it, is the beginning of ``ids``."""
    tools, switches = conversation.tools, conversation.switches
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant" or not number:
            continue
        try:
            before = codec.prompt(conversation.messages[:number], tools, switches, limit=_LIMIT)
        except TextError:
            continue
        start = len(before.token_ids)
        if ids[:start] != before.token_ids:
            continue
        end = next((place for place in range(start, len(ids)) if ids[place] in codec.stop_ids), len(ids))
        text, whole = codec.decode([ids[start:end], ids[start : end + 1]])
        yield RenderedTurn(number, whole, codec.read_answer(text, before.text[-PROMPT_END:], tools))


# -- output


def as_json(rendered: RenderedConversation) -> dict[str, Any]:
    """Return a rendered conversation for :func:`dump_line`. ``turns`` have the fields of an engine's answers."""
    return {
        "family": rendered.family,
        "rendering": rendered.rendering,
        "tokens": rendered.token_ids,
        "token_texts": rendered.texts,
        "assistant_mask": rendered.mask,
        "message_numbers": rendered.messages,
        "turns": [
            {
                "message": turn.message,
                "text": turn.text,
                "content": turn.answer.content,
                "reasoning_content": turn.answer.thoughts,
                "tool_calls": turn.answer.calls,
                "malformed_calls": turn.answer.malformed,
            }
            for turn in rendered.turns
        ],
        "problem": rendered.problem,
    }


def print_rendered(console: Console, rendered: RenderedConversation) -> None:
    """Print a rendered conversation for a person."""
    from rich.table import Table
    from rich.text import Text

    line(console, "family", rendered.family)
    line(console, "rendering", rendered.rendering)
    if rendered.problem:
        line(console, "no mask", rendered.problem, "yellow")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("token", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", overflow="fold")
    for name in ("mask", "message"):
        table.add_column(name, justify="right", no_wrap=True)
    mask: Sequence[int | None] = rendered.mask or [None] * len(rendered.token_ids)
    columns = zip(rendered.token_ids, rendered.texts, mask, rendered.messages, strict=True)
    for place, (token, text, bit, message) in enumerate(columns):
        cells = (
            str(token),
            Text(repr(text)),
            "?" if bit is None else str(bit),
            "-" if message is None else str(message),
        )
        table.add_row(str(place), *cells, style=None if bit else "dim")
    console.print(table)
    for turn in rendered.turns:
        print_title(console, f"message {turn.message} is written {turn.text!r}", "cyan")
        if turn.answer.thoughts is not None:
            line(console, "thoughts", turn.answer.thoughts)
        line(console, "content", turn.answer.content)
        for call in turn.answer.calls:
            line(console, "call", f"{call['function']['name']} {call['function']['arguments']}")
        if turn.answer.malformed:
            line(console, "malformed", f"{turn.answer.malformed} calls cannot be read", "red")


# -- the model that TARGET names


def model_folder(target: str) -> Path | None:
    """Return the model folder that a command's TARGET names; None: TARGET is not a model folder."""
    folder = Path(target).expanduser()
    is_model = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    return folder if is_model and not (folder / CONFIG_FILE).is_file() else None


def open_codec(target: str, overrides: Sequence[str], scratch: Path) -> TextCodec:
    """Return the codec of a model folder or of a run's model.

    Args:
        target: A model folder, or a run: its configuration file, folder or name.
        overrides: Settings that override the run's configuration.
        scratch: Folder for a tiny model that the run has not made yet.

    Raises:
        CommandError: The model is not on this machine, or settings were given for a model folder.
        ModelError: The tokenizer cannot be loaded.
    """
    folder = model_folder(target)
    if folder is not None:
        if overrides:
            raise CommandError(f"{target} is a model folder, which has no settings; leave {overrides[0]} out")
        return TextCodec.load(folder)
    config = find_configuration(target, overrides)
    if config is None:
        raise CommandError(f"{target!r} is no configuration, run or model folder; give a YAML file or a model's folder")
    folder = tokenizer_folder(config.model, config.path)
    if folder is None and config.model.tiny is not None:
        from trinity_mq.models import ensure_model_folder

        folder = ensure_model_folder(config.model, scratch / "model", config.seed)
    if folder is None:
        raise CommandError(f"the model {config.model.model_path} is not on this machine; give its folder as TARGET")
    return TextCodec.of_model(folder, config.model)
