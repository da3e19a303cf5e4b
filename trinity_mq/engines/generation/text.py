"""Converts texts and conversations to token ids and back, by the model's tokenizer and chat template."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from trinity_mq.config.model import ModelConfig
from trinity_mq.config.switches import SWITCHES, SwitchError
from trinity_mq.families import bridge
from trinity_mq.families.family import Family, ParsedAnswer
from trinity_mq.families.library import LibraryUnfit, open_renderer
from trinity_mq.families.messages import (
    THOUGHTS,
    Message,
    MessageOutline,
    Messages,
    Probe,
    Tools,
    has_at_most,
    shape_of,
)
from trinity_mq.families.switches import merge_switch_fields, template_switches
from trinity_mq.families.table import family_of, find_family, has_row
from trinity_mq.families.thoughts import ThoughtFormat, opens_thoughts
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import configured_template

_COMMENT, _GENERATION = re.compile(r"\{#.*?#\}", re.DOTALL), re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Jinja comments, and the tag before the assistant's text in a chat template, with any white-space control."""
_LONGEST_SHAPE, _SHAPES = 256, 256
"""Maximum messages of a conversation whose shape is cached, and maximum number of cached shapes."""
_PROBE = "The answer is 42.\n\t3,14 <|im_end|> \u00e9\u4e2d"
"""Text encoded into the fingerprint: two tokenizers with the same vocabulary may still split text differently."""


_EMPTY_THOUGHTS = 8
"""Number of tokens, from an opening tag on, that show whether thoughts are empty."""
_ANY_TOOL: Message = {"type": "function", "function": {"name": "any"}}
CHARACTERS_PER_TOKEN = 16
"""Characters per token, more than texts have on average. At first only this many characters per allowed token are
encoded from a text.
"""
JOINED = 16
"""Number of tokens at the end of a prefix that may be tokenized differently in the whole text."""


Switches = Mapping[str, Any] | None
"""Variables of a chat template, as :meth:`TextCodec.switches` returns them. None: the codec's defaults."""
_RENDERERS = 32
"""Maximum number of combinations of switches whose renderers are cached."""


class TextError(ValueError):
    """This text or conversation cannot be converted to tokens; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """A conversation as tokens, with a mask of the assistant's tokens."""

    token_ids: list[int]
    assistant_mask: list[int]
    """1 where the assistant wrote the token."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as an engine reads it."""

    text: str
    token_ids: list[int]
    is_continued: bool = False
    """True if the tokens begin with the tokens of the past."""


class _Renderer(NamedTuple):
    """The renderer for certain switches."""

    library: Any
    """Renderer of the package ``renderers``; None: the chat template renders."""
    description: str


class TextCodec:
    """A tokenizer with its chat template. Safe to use from several threads, because it never changes the tokenizer's
    state.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: frozenset[int], *, family: Family | None = None, switches: Switches = None
    ) -> None:
        """Take the tokenizer.

        Args:
            tokenizer: A tokenizer of transformers.
            stop_ids: Token ids that end a response.
            family: Family of the model. None: by its chat template.
            switches: Defaults of every rendering, ``model.chat_template_kwargs``.
        """
        self._tokenizer = tokenizer
        self._chosen_family, self._default_switches = family, dict(switches or {})
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # truncation or padding set in the tokenizer file would change prompts silently
            self._fast.no_truncation()
            self._fast.no_padding()
        self.path: str = getattr(tokenizer, "name_or_path", "")
        """Folder or hub id that the tokenizer was loaded from."""
        self.stop_ids = stop_ids
        """Token ids that end a response."""
        self.end_id: int = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(stop_ids)
        """The main token id that ends a response: the tokenizer's end-of-sequence token, or else the smallest of
        :attr:`stop_ids`.
        """
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_ids, default=0)
        self._cached_left_out = functools.lru_cache(maxsize=_SHAPES)(self._left_out)
        self._cached_renderer = functools.lru_cache(maxsize=_RENDERERS)(self._open_renderer)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        trust_remote_code: bool = False,
        family: Family | None = None,
        switches: Switches = None,
        template: str | None = None,
    ) -> TextCodec:
        """Return the codec of a Hugging Face folder.

        Args:
            folder: The folder.
            trust_remote_code: Allow code from the folder to run.
            family: Family of the model. None: by its chat template.
            switches: Defaults of every rendering, ``model.chat_template_kwargs``.
            template: Chat template. None: the template of the folder.

        Raises:
            ModelError: The folder has no tokenizer that can be loaded, or its chat template does not read a switch.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # the error class depends on the tokenizer
            raise ModelError(f"{folder}: its tokenizer cannot be loaded: {' '.join(str(error).split())}") from error
        if template is not None:
            tokenizer.chat_template = template
        codec = cls(tokenizer, _stop_ids(tokenizer, folder), family=family, switches=switches)
        try:
            codec.switches({})
        except SwitchError as error:
            raise ModelError(f"model.chat_template_kwargs: {error} ({folder})") from error
        return codec

    @classmethod
    def of_model(cls, folder: Path, config: ModelConfig) -> TextCodec:
        """Return the codec of a configured model from its folder; raises the same errors as :meth:`load`.

        Raises:
            ModelError: The file of the configured chat template cannot be read.
            UnknownNameError: ``config.family`` does not exist.
        """
        return cls.load(
            folder,
            trust_remote_code=config.trust_remote_code,
            family=None if config.family is None else find_family(config.family),
            switches=config.chat_template_kwargs,
            template=configured_template(config),
        )

    def rendering_as(self, template: str | None, switch_fields: Mapping[str, Any]) -> TextCodec:
        """Return a codec of the same tokenizer that renders in another way.

        Args:
            template: Chat template. None: the template of this codec.
            switch_fields: ``chat_template_kwargs``, ``enable_thinking`` and ``reasoning_effort``; they override the
                defaults of this codec.

        Raises:
            SwitchError: The template has no such switch, or a field has another form.
        """
        tokenizer = copy.copy(self._tokenizer)
        tokenizer.chat_template = template or self._tokenizer.chat_template
        codec = TextCodec(tokenizer, self.stop_ids, family=self._chosen_family, switches=self._default_switches)
        codec._default_switches = codec.switches(switch_fields)
        return codec

    def switches(self, fields: Mapping[str, Any], tools: Tools = None) -> dict[str, Any]:
        """Return the variables of the chat template for a request, with the codec's defaults.

        Args:
            fields: Fields of the request; ``chat_template_kwargs``, ``enable_thinking`` and ``reasoning_effort`` are
                read.
            tools: The offered tools.

        Raises:
            SwitchError: The template has no such switch, or a field has another form.
        """
        merged = merge_switch_fields({SWITCHES: self._default_switches}, fields)
        return template_switches(merged, self._template(tools), self.family.thoughts) if merged else {}

    def _variables(self, switches: Switches, tools: Tools) -> Mapping[str, Any]:
        if switches is not None:
            return switches
        return self.switches({}, tools) if self._default_switches else {}

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def template(self) -> str:
        """Chat template of the model for requests without tools."""
        return self._template(None)

    @property
    def family(self) -> Family:
        """Family of the model."""
        return self._chosen_family or family_of(self._template(None))

    @property
    def has_known_family(self) -> bool:
        """Whether the model's family was chosen, or the table has a row for its chat template."""
        return self._chosen_family is not None or has_row(self._template(None))

    def prepare(self) -> str:
        """Load the renderer and the call reader for the default switches, so that requests do not wait for them; return
        :attr:`rendering`.
        """
        self.read_answer("".join(self.family.calls_begin[:1]), "", [_ANY_TOOL])
        return self.rendering

    @property
    def rendering(self) -> str:
        """Description of the renderer of conversations: the package ``renderers``, or the chat template with the
        reason.
        """
        return self.rendering_with(None)

    def rendering_with(self, switches: Switches, tools: Tools = None) -> str:
        """Return a description of the renderer of conversations with these switches and tools, as :attr:`rendering`."""
        if not self.has_template:
            return "none: the model has no chat template"
        return self._renderer(switches, tools).description

    def read_answer(self, text: str, prompt_end: str | None, tools: Tools) -> ParsedAnswer:
        """Divide a response into thoughts, content and tool calls.

        Args:
            text: The response, special tokens included.
            prompt_end: The prompt, or its last characters. None: unknown.
            tools: The offered tools. Without tools, no text is a call.
        """
        return self.family.read(text, prompt_end, tools)

    @property
    def size(self) -> int:
        """Number of the tokenizer's tokens, including added tokens."""
        return len(self._tokenizer)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of ``text``. ``special`` adds the tokens that the tokenizer puts around a bare prompt.

        Raises:
            TextError: The vocabulary does not cover the text.
        """
        try:
            if self._fast is not None:
                # encode_batch releases the GIL for other threads; encode does not
                ids: list[int] = self._fast.encode_batch([text], add_special_tokens=special)[0].ids
            else:
                ids = self._tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # the Rust library raises plain Exception
            vocabulary = self._tokenizer.get_vocab()
            uncovered = sorted({character for character in text if character not in vocabulary})
            raise TextError(
                f"the text {text[:40]!r} holds {''.join(uncovered)[:40]!r}, which the vocabulary of {len(vocabulary)} "
                f"tokens does not cover; use other text or add the characters to the model ({error})"
            ) from error
        return ids

    def encode_within(self, text: str, limit: int, *, special: bool = False) -> list[int]:
        """Return the token ids of ``text``, or more than ``limit`` token ids of its beginning if the text is much
        longer.

        Time and memory depend on the limit, not on the text, unless the text has more than :data:`CHARACTERS_PER_TOKEN`
        characters per token.

        Raises:
            TextError: The vocabulary does not cover the text.
        """
        beginning = text[: (limit + JOINED) * CHARACTERS_PER_TOKEN]
        ids = self.encode(beginning, special=special)
        return ids if len(beginning) == len(text) or len(ids) > limit + JOINED else self.encode(text, special=special)

    def encode_after(self, tokens: Sequence[int], text: str, limit: int) -> list[int]:
        """Return token ids of ``text`` that begin with ``tokens``, if ``text`` begins with the text of ``tokens``; else
        the result of :meth:`encode_within`.

        Sampled tokens can differ from the tokenizer's encoding of their text. Therefore both the prefix and the whole
        result are checked by decoding.

        Raises:
            TextError: The vocabulary does not cover the text.
        """
        [beginning] = self.decode([tokens])
        if text.startswith(beginning):
            continued = [*tokens, *self.encode_within(text[len(beginning) :], limit)]
            if self.decode([continued]) == [text]:
                return continued
        return self.encode_within(text, limit)

    def prompt(
        self,
        messages: Messages,
        tools: Tools = None,
        switches: Switches = None,
        *,
        before: Sequence[int] = (),
        messages_before: int = 0,
        beginning: str = "",
        limit: int,
    ) -> Prompt:
        """Return the prompt of a conversation.

        Args:
            messages: As :func:`read_messages` returns them.
            tools: As :func:`read_tools` returns them.
            switches: Variables of the chat template. None: the codec's defaults.
            before: Tokens of the past, as engines read and sampled them. The prompt begins with them where the family
                allows it.
            messages_before: Number of leading messages that ``before`` holds; the last of them is the answer. 0:
                unknown; then the prompt begins with these tokens if its text begins with their text.
            beginning: Text with which the answer begins, the end of the prompt.
            limit: Maximum number of tokens. Of a much longer prompt, only the beginning is returned, with more tokens
                than that.

        Raises:
            TextError: As :meth:`render` and :meth:`messages_for_template`.
        """
        if before and messages_before:
            bridged = self._bridged(before, messages_before, messages, tools, switches, limit)
            if bridged is not None:
                return Prompt(self.decode([bridged])[0], bridged, is_continued=True)
        written = self.messages_for_template(messages, tools, switches)
        renderer = None if beginning else self._renderer(switches, tools).library
        if renderer is not None and (ids := _library_tokens(renderer, written, tools, limit)) is not None:
            return Prompt(self.decode([ids])[0], ids)
        text: str = self._apply(written, tools, switches, tokenize=False, add_generation_prompt=True)
        if beginning:
            text = _begun(text, beginning, self.family.thoughts)
        if before and not messages_before:
            ids = self.encode_after(before, text, limit)
            return Prompt(text, ids, is_continued=ids[: len(before)] == list(before))
        return Prompt(text, self.encode_within(text, limit))

    def _bridged(
        self,
        before: Sequence[int],
        count: int,
        messages: Messages,
        tools: Tools,
        switches: Switches,
        limit: int,
    ) -> list[int] | None:
        """Return a prompt that begins with ``before``; None if later messages cannot be added to these tokens, such as
        when the family would write the past in another form.
        """
        has_thoughts, room = self._has_thoughts(before), max(0, limit - len(before))
        for short in bridge.abridge(messages, count, has_thoughts=has_thoughts):
            try:
                ended, continued = (self.messages_for_template(part, tools, switches) for part in short)
                by_library = self._library_bridge(before, continued[len(ended) :], tools, switches, room)
                if by_library is not None:
                    return by_library
                behind = bridge.continuation(
                    self.render(ended, tools, switches, add_generation_prompt=False),
                    self.render(continued, tools, switches),
                    self.family.thoughts,
                    has_thoughts=has_thoughts,
                )
                added = [] if behind is None else self.encode_within(behind[1], room)
            except TextError:
                continue  # rendering the whole conversation then raises a readable error
            position = None if behind is None else self._place_behind_turn(before[-1], behind[0], added)
            if position is not None:
                return [*before, *added[position:]]
        return None

    def _place_behind_turn(self, last: int, after: str, added: Sequence[int]) -> int | None:
        """Return the place in ``added`` from which it continues a past that ends with the token ``last``. Return None
        if no token of ``added`` ends the turn, or if the past ends with another stop token.

        Args:
            last: Last token of the past. An answer that was cut lacks the token that ends a turn; that token is then
                added.
            after: Text that the template writes behind the text of the turn if the turn is the last.
            added: Tokens that the template writes behind the text of the turn once other messages follow.
        """
        end = next((place for place, token in enumerate(added) if token in self.stop_ids), None)
        if end is None:
            return None
        if last not in self.stop_ids:
            return end
        is_end = after.startswith(self.decode([added[: end + 1]])[0])
        if is_end or added[end] == last:
            return end + 1
        # in this family the next role ends a turn
        return end if last == self.end_id else None

    def _library_bridge(
        self, before: Sequence[int], messages: Messages, tools: Tools, switches: Switches, room: int
    ) -> list[int] | None:
        renderer = self._renderer(switches, tools).library
        if renderer is None or not has_at_most(messages, room * CHARACTERS_PER_TOKEN):
            return None
        split = len(before) - 1 if before[-1] in self.stop_ids else len(before)
        past = list(before)
        try:
            bridged = renderer.bridge_to_next_turn(past[:split], past[split:], list(messages), tools=tools)
        except Exception:  # the package asserts and raises many classes; the chat template decides
            return None
        ids = None if bridged is None else list(bridged.token_ids)
        return ids if ids is not None and ids[: len(past)] == past else None

    def _has_thoughts(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens hold thoughts that are not empty."""
        tags = self.family.thoughts
        if tags is None:
            return False
        opening = self.encode(tags.opening)
        if len(opening) == 1:
            places = (place for place, token in enumerate(tokens) if token == opening[0])
            texts = [tokens[place : place + _EMPTY_THOUGHTS] for place in places]
            return any(bridge.begins_thoughts(text, tags) for text in self.decode(texts))
        return bridge.begins_thoughts(self.decode([tokens])[0], tags)

    # -- chat template

    def render(
        self,
        messages: Messages,
        tools: Tools = None,
        switches: Switches = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the conversation as the chat template writes it.

        Raises:
            TextError: The model has no chat template, or the template refuses these messages.
        """
        text: str = self._apply(messages, tools, switches, tokenize=False, add_generation_prompt=add_generation_prompt)
        return text

    def _apply(self, messages: Messages, tools: Tools, switches: Switches, **options: Any) -> Any:
        if not self._tokenizer.chat_template:
            raise TextError("the model has no chat template; use completions with a prompt instead of chat")
        variables = self._variables(switches, tools)
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, **options, **variables
            )
        except Exception as error:  # templates are programs of the model's author
            raise TextError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from error

    def render_with_tools(
        self,
        messages: Messages,
        tools: Tools = None,
        switches: Switches = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the conversation as the chat template writes it, converted to roles and forms that the template
        supports.

        Raises:
            TextError: As :meth:`render` and :meth:`messages_for_template`.
        """
        written = self.messages_for_template(messages, tools, switches)
        return self.render(written, tools, switches, add_generation_prompt=add_generation_prompt)

    def messages_for_template(
        self, messages: Messages, tools: Tools = None, switches: Switches = None
    ) -> list[Message]:
        """Return the messages in the form of the template's family, with roles that the template supports.

        Args:
            messages: As :func:`read_messages` returns them.
            tools: As :func:`read_tools` returns them.
            switches: Variables of the chat template. None: the codec's defaults.

        Raises:
            TextError: The template leaves out the tools, the calls or the text of a message.
        """
        template, key = self._template(tools), _key(self._variables(switches, tools))
        family = self.family
        if any(THOUGHTS in message for message in messages):
            messages = family.with_thoughts(messages, template)
        shape = shape_of(messages)
        if _is_plain(shape, family) and self._problem(template, shape, bool(tools), key) == "":
            return list(messages)
        forms = list(family.forms_of(messages))
        problems = [self._problem(template, shape_of(form), bool(tools), key) for form in forms]
        if "" in problems:
            return forms[problems.index("")]
        if problem := next(filter(None, problems), None):
            raise TextError(
                f"the chat template does not write {problem}, so the model would not see it; leave it out, or use a "
                "model whose template writes it"
            )
        return forms[0]

    def _renderer(self, switches: Switches, tools: Tools) -> _Renderer:
        return self._cached_renderer(self._template(tools), _key(self._variables(switches, tools)))

    def _open_renderer(self, template: str, switches: str) -> _Renderer:
        """Return the renderer for these switches, which are JSON text."""
        family = self.family
        if self._chosen_family is None and not has_row(template):
            return _Renderer(None, "chat template, because the table of model families has no row for it")
        if not family.library:
            return _Renderer(None, f"chat template, because the package renderers has no family {family.name}")
        variables = json.loads(switches)

        def write(messages: Messages, tools: Tools, asks: bool) -> tuple[list[Message], list[int]] | None:
            try:
                written = self.messages_for_template(messages, tools, variables)
                return written, self.encode(self.render(written, tools, variables, add_generation_prompt=asks))
            except TextError:
                return None

        try:
            name, renderer = open_renderer(family.library, _LibraryTokenizer(self, self._tokenizer), variables, write)
        except LibraryUnfit as error:
            return _Renderer(None, f"chat template, because the package renderers does not fit ({error})")
        return _Renderer(renderer, f"renderers: {name}")

    def _template(self, tools: Tools) -> str:
        template = self._tokenizer.chat_template
        if isinstance(template, dict):  # several named templates; transformers chooses by whether tools are offered
            template = self._tokenizer.get_chat_template(tools=tools or None)
        return str(template or "")

    def _problem(self, template: str, shape: tuple[MessageOutline, ...], has_tools: bool, switches: str) -> str | None:
        if len(shape) > _LONGEST_SHAPE:
            return self._left_out(template, shape, has_tools, switches)
        return self._cached_left_out(template, shape, has_tools, switches)

    def _left_out(self, template: str, shape: tuple[MessageOutline, ...], has_tools: bool, switches: str) -> str | None:
        """Return the part of messages of this shape that the template leaves out. Empty: nothing. None: it refuses the
        probe.
        """
        del template  # only the cache key needs it: a tokenizer may get another template
        probe = Probe(shape, has_tools=has_tools)
        try:
            return probe.left_out(self.render(probe.messages, probe.tools, json.loads(switches)))
        except TextError:
            return None

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence, special tokens included."""
        if self._fast is not None:
            texts: list[str] = self._fast.decode_batch([list(ids) for ids in sequences], skip_special_tokens=False)
        else:
            texts = [self._tokenizer.decode(list(ids), skip_special_tokens=False) for ids in sequences]
        return texts

    def conversation(self, messages: Messages, tools: Tools = None, switches: Switches = None) -> MaskedTokens:
        """Return the whole conversation as tokens with a mask of the tokens that the assistant would have sampled.

        The mask covers each assistant turn up to its first end-of-sequence token, even if that token opens the next
        role. If the template writes no end to a last turn, an end token is added.

        The turns come from the template's ``{% generation %}`` marks if it has them, else from rendering each prefix.

        Raises:
            TextError: The template leaves something out, or it rewrites earlier turns, so that the mask cannot be
                determined.
        """
        messages = self.messages_for_template(messages, tools, switches)
        if _GENERATION.search(_COMMENT.sub("", self._template(tools))):
            tokens, turns = self._marked_turns(messages, tools, switches)
        else:
            tokens = self.encode(self.render(messages, tools, switches, add_generation_prompt=False))
            turns = list(self._rendered_turns(messages, tools, switches, tokens))
        mask, has_end = [0] * len(tokens), True
        for start, stop in turns:
            end = self._end_of_turn(tokens, start, stop)
            mask[start:end] = [1] * (end - start)
            has_end = end > start and tokens[end - 1] in self.stop_ids
        if turns and not has_end and messages[-1]["role"] == "assistant":
            tokens, mask = [*tokens[:end], self.end_id], [*mask[:end], 1]
        return MaskedTokens(tokens, mask)

    def _marked_turns(
        self, messages: Messages, tools: Tools, switches: Switches
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a conversation and the assistant's turns by the template's marks. Tokens that open a
        turn in a prompt are excluded.
        """
        rendered = self._apply(
            messages,
            tools,
            switches,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        tokens, opening = list(rendered["input_ids"]), self._opening(messages, tools, switches)
        bits = "".join(str(int(bit)) for bit in rendered["assistant_masks"])
        turns = []
        for run in re.finditer("1+", bits):
            starts = (run.start() + distance for distance in range(len(opening), 0, -1))
            opening_starts = (start for start in starts if tokens[max(0, start - len(opening)) : start] == opening)
            turns.append((next(opening_starts, run.start()), run.end()))
        return tokens, turns

    def _opening(self, messages: Messages, tools: Tools, switches: Switches) -> list[int]:
        """Return the tokens with which the template opens the assistant's turn in a prompt; no engine samples them."""
        first = next((number for number, message in enumerate(messages) if message["role"] == "assistant"), 0)
        try:
            without_opening, with_opening = (
                self.encode(self.render(messages[:first], tools, switches, add_generation_prompt=asks))
                for asks in (False, True)
            )
        except TextError:
            return []
        return with_opening[shared_length(without_opening, with_opening) :]

    def _rendered_turns(
        self, messages: Messages, tools: Tools, switches: Switches, tokens: list[int]
    ) -> Iterator[tuple[int, int]]:
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.encode(self.render(messages[:number], tools, switches)) if number else []
            through = self.encode(self.render(messages[: number + 1], tools, switches, add_generation_prompt=False))
            start, stop = len(before), self._end_of_turn(through, len(before), len(through))
            if tokens[:start] != before or tokens[:stop] != through[:stop]:
                raise TextError(
                    f"the chat template writes the conversation up to message {number} differently once another "
                    "message follows, so the tokens that the assistant sampled are not known; use a template with "
                    "{% generation %} marks, a template that keeps earlier turns (for Qwen3 "
                    "examples/templates/qwen3.jinja), or convert one turn at a time"
                )
            yield start, stop

    def _end_of_turn(self, tokens: Sequence[int], start: int, stop: int) -> int:
        """Return the position at which an engine would have ended a turn that the template writes from ``start`` to
        ``stop``.

        The end is behind the first end-of-sequence token, which may also follow directly after ``stop`` or after white
        space. Without such a token the end is ``stop``.
        """
        for position in range(start, len(tokens)):
            if tokens[position] in self.stop_ids:
                return position + 1
            if position >= stop and not self.decode([tokens[position : position + 1]])[0].isspace():
                break
        return stop

    def fingerprint(self) -> str:
        """Return a digest of vocabulary, chat template, default switches, stop tokens, padding token and the encoding
        of a probe text. Trainer and engines compare it to verify that they use the same tokenizer.
        """
        try:
            probe = self.encode(_PROBE)
        except TextError:
            probe = []
        identity = {
            "vocabulary": sorted(self._tokenizer.get_vocab().items()),
            "chat_template": self._tokenizer.chat_template,
            "stop": sorted(self.stop_ids),
            "pad": self.pad_id,
            "probe": probe,
            **({"switches": self._default_switches} if self._default_switches else {}),
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


class _LibraryTokenizer:
    """The tokenizer of a codec in the form that the package ``renderers`` reads. It has no name, because the package
    must not choose by the name of a model.
    """

    name_or_path = ""

    def __init__(self, codec: TextCodec, tokenizer: Any) -> None:
        self._codec, self._tokenizer = codec, tokenizer
        self.unk_token_id, self.eos_token_id = tokenizer.unk_token_id, tokenizer.eos_token_id
        self.chat_template = codec._template(None)  # noqa: SLF001 - a part of the codec

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Return the token ids of a text."""
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int], *_: Any, **__: Any) -> str:
        """Return the text of token ids, special tokens included."""
        return self._codec.decode([token_ids])[0]

    def convert_tokens_to_ids(self, token: str) -> Any:
        """Return the token id of a token's text."""
        return self._tokenizer.convert_tokens_to_ids(token)


def _library_tokens(renderer: Any, messages: Messages, tools: Tools, limit: int) -> list[int] | None:
    """Return the tokens of a prompt by the package ``renderers``. None: the chat template has to render, because the
    package failed, or because the messages are much longer than ``limit`` tokens and the package would encode all of
    them.
    """
    if not has_at_most([*messages, *(tools or ())], limit * CHARACTERS_PER_TOKEN):
        return None
    try:
        ids: list[int] = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    except Exception:  # the package asserts and raises many classes; the chat template decides
        return None
    return ids


def _begun(prompt: str, beginning: str, thoughts: ThoughtFormat | None) -> str:
    """Return a prompt that ends with the beginning of the answer. If both have the tag that opens thoughts, the tag
    stands there once.
    """
    if thoughts is not None and opens_thoughts(prompt, thoughts) and beginning.lstrip().startswith(thoughts.opening):
        prompt = prompt[: prompt.rindex(thoughts.opening.rstrip())]
    return prompt + beginning


def _is_plain(shape: Sequence[MessageOutline], family: Family) -> bool:
    """Return whether the family writes messages of this shape as they are: without calls, tool results and renamed
    roles.
    """
    return all(not turn.calls and turn.role != "tool" and turn.role not in family.roles for turn in shape)


def _key(switches: Mapping[str, Any]) -> str:
    return json.dumps(switches, sort_keys=True, default=str)


class _GenerationConfig(BaseModel):
    """The part of ``generation_config.json`` that ends responses."""

    eos_token_id: int | list[int] | None = None


def _stop_ids(tokenizer: Any, folder: Path) -> frozenset[int]:
    """Return the end-of-sequence ids from the tokenizer and from ``generation_config.json``.

    Raises:
        ModelError: The file is not a valid generation configuration, or neither names an id.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            eos = _GenerationConfig.model_validate_json(file.read_bytes()).eos_token_id
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
        ids.update([eos] if isinstance(eos, int) else eos or ())
    if not ids:
        raise ModelError(
            f"{folder} names no end-of-sequence token, in its tokenizer or in generation_config.json: responses would "
            "never end"
        )
    return frozenset(ids)


def shared_length(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False))))
