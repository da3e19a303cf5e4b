"""Text to token ids and back, with the chat template and its masks."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_mq.families.family import Family, ParsedAnswer
from trinity_mq.families.messages import Message, MessageOutline, Messages, Probe, Tools, shape_of
from trinity_mq.families.table import family_of
from trinity_mq.models.errors import ModelError

_COMMENT, _GENERATION = re.compile(r"\{#.*?#\}", re.DOTALL), re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Jinja comments, and the tag before the assistant's text in a chat template, with any white-space control."""
_LONGEST_SHAPE, _SHAPES = 256, 256
"""Maximum messages of a conversation whose shape is cached, and maximum number of cached shapes."""
_PROBE = "The answer is 42.\n\t3,14 <|im_end|> \u00e9\u4e2d"
"""Text encoded into the fingerprint: two tokenizers with the same vocabulary may still split text differently."""


CHARACTERS_PER_TOKEN = 16
"""More than texts have on average. At first only this many characters per allowed token are read from a text."""
JOINED = 16
"""Tokens at the end of a prefix that may be tokenized differently in the whole text."""


class TextError(ValueError):
    """This text or conversation cannot be converted to tokens; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """A conversation as tokens, with a mask of the assistant's tokens."""

    token_ids: list[int]
    assistant_mask: list[int]
    """1 where the assistant wrote the token."""


class TextCodec:
    """A tokenizer with its chat template. Safe to use from several threads, because it never changes the tokenizer's
    state.
    """

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # truncation or padding set in the tokenizer file would change prompts silently
            self._fast.no_truncation()
            self._fast.no_padding()
        self.stop_ids = stop_ids
        """Token ids that end a response."""
        self.end_id: int = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(stop_ids)
        """Token id that ends a response to imitate."""
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_ids, default=0)
        self._cached_left_out = functools.lru_cache(maxsize=_SHAPES)(self._left_out)

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> TextCodec:
        """Return the codec of a Hugging Face folder.

        Raises:
            ModelError: The folder has no tokenizer that can be loaded.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # the error class depends on the tokenizer
            raise ModelError(f"{folder}: its tokenizer cannot be loaded: {' '.join(str(error).split())}") from error
        return cls(tokenizer, _stop_ids(tokenizer, folder))

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
        """Family of the model, by its chat template."""
        return family_of(self._template(None))

    def read_answer(self, text: str, prompt_end: str | None, tools: Tools) -> ParsedAnswer:
        """Return the parts of a response.

        Args:
            text: The response, special tokens included.
            prompt_end: The prompt, or its last characters. None: unknown.
            tools: The offered tools. Without tools nothing is a call.
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

        Time and memory depend on the limit, not on the text.

        Raises:
            TextError: The vocabulary does not cover the text.
        """
        beginning = text[: (limit + JOINED) * CHARACTERS_PER_TOKEN]
        ids = self.encode(beginning, special=special)
        return ids if len(beginning) == len(text) or len(ids) > limit + JOINED else self.encode(text, special=special)

    def encode_after(self, tokens: Sequence[int], text: str, limit: int) -> list[int]:
        """Return token ids of ``text`` that begin with ``tokens`` if these decode to its beginning, else as
        :meth:`encode_within`.

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

    def render(self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = True) -> str:
        """Return the conversation as the chat template writes it.

        Raises:
            TextError: The model has no chat template, or the template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise TextError("the model has no chat template; use completions with a prompt instead of chat")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # templates are programs of the model's author
            raise TextError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from error
        return text

    def render_with_tools(self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = True) -> str:
        """Return the conversation as the chat template writes it, with nothing left out.

        Raises:
            TextError: As :meth:`render` and :meth:`messages_for_template`.
        """
        return self.render(
            self.messages_for_template(messages, tools), tools, add_generation_prompt=add_generation_prompt
        )

    def messages_for_template(self, messages: Messages, tools: Tools = None) -> list[Message]:
        """Return the messages in the form of the template's family, with roles that the template supports.

        Args:
            messages: As :func:`read_messages` returns them.
            tools: As :func:`read_tools` returns them.

        Raises:
            TextError: The template leaves out the tools, the calls or the text of a message.
        """
        template = self._template(tools)
        forms = list(family_of(template).forms_of(messages))
        problems = [self._problem(template, shape_of(form), bool(tools)) for form in forms]
        if "" in problems:
            return forms[problems.index("")]
        if problem := next(filter(None, problems), None):
            raise TextError(
                f"the chat template does not write {problem}, so the model would not see it; leave it out, or use a "
                "model whose template writes it"
            )
        return forms[0]

    def _template(self, tools: Tools) -> str:
        template = self._tokenizer.chat_template
        if isinstance(template, dict):  # several named templates; transformers chooses by whether tools are offered
            template = self._tokenizer.get_chat_template(tools=tools or None)
        return str(template or "")

    def _problem(self, template: str, shape: tuple[MessageOutline, ...], has_tools: bool) -> str | None:
        if len(shape) > _LONGEST_SHAPE:
            return self._left_out(template, shape, has_tools)
        return self._cached_left_out(template, shape, has_tools)

    def _left_out(self, template: str, shape: tuple[MessageOutline, ...], has_tools: bool) -> str | None:
        """Return the part of messages of this shape that the template leaves out. Empty: nothing. None: it refuses the
        probe.
        """
        del template  # only the cache key needs it: a tokenizer may get another template
        probe = Probe(shape, has_tools=has_tools)
        try:
            return probe.left_out(self.render(probe.messages, probe.tools))
        except TextError:
            return None

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence, special tokens included."""
        if self._fast is not None:
            texts: list[str] = self._fast.decode_batch([list(ids) for ids in sequences], skip_special_tokens=False)
        else:
            texts = [self._tokenizer.decode(list(ids), skip_special_tokens=False) for ids in sequences]
        return texts

    def conversation(self, messages: Messages, tools: Tools = None) -> MaskedTokens:
        """Return the whole conversation as tokens with a mask of the tokens that the assistant would have sampled.

        The mask covers each assistant turn up to its first end-of-sequence token, even if that token opens the next
        role. If the template writes no end to a last turn, an end token is added.

        The turns come from the template's ``{% generation %}`` marks if it has them, else from rendering each prefix.

        Raises:
            TextError: The template leaves something out, or it rewrites earlier turns, so that no mask is right.
        """
        messages = self.messages_for_template(messages, tools)
        if _GENERATION.search(_COMMENT.sub("", self._template(tools))):
            tokens, turns = self._marked_turns(messages, tools)
        else:
            tokens = self.encode(self.render(messages, tools, add_generation_prompt=False))
            turns = list(self._rendered_turns(messages, tools, tokens))
        mask, has_end = [0] * len(tokens), True
        for start, stop in turns:
            end = self._end_of_turn(tokens, start, stop)
            mask[start:end] = [1] * (end - start)
            has_end = end > start and tokens[end - 1] in self.stop_ids
        if turns and not has_end and messages[-1]["role"] == "assistant":
            tokens, mask = [*tokens[:end], self.end_id], [*mask[:end], 1]
        return MaskedTokens(tokens, mask)

    def _marked_turns(self, messages: Messages, tools: Tools) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a conversation and the assistant's turns by the template's marks. Tokens that open a
        turn in a prompt are excluded.
        """
        # raises a readable error if the template refuses the messages
        self.render(messages, tools, add_generation_prompt=False)
        rendered = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        tokens, opening = list(rendered["input_ids"]), self._opening(messages, tools)
        bits = "".join(str(int(bit)) for bit in rendered["assistant_masks"])
        turns = []
        for run in re.finditer("1+", bits):
            starts = (run.start() + distance for distance in range(len(opening), 0, -1))
            opening_starts = (start for start in starts if tokens[max(0, start - len(opening)) : start] == opening)
            turns.append((next(opening_starts, run.start()), run.end()))
        return tokens, turns

    def _opening(self, messages: Messages, tools: Tools) -> list[int]:
        """Return the tokens with which the template opens the assistant's turn in a prompt; no engine samples them."""
        first = next((number for number, message in enumerate(messages) if message["role"] == "assistant"), 0)
        try:
            without_opening, with_opening = (
                self.encode(self.render(messages[:first], tools, add_generation_prompt=asks)) for asks in (False, True)
            )
        except TextError:
            return []
        return with_opening[_shared(without_opening, with_opening) :]

    def _rendered_turns(self, messages: Messages, tools: Tools, tokens: list[int]) -> Iterator[tuple[int, int]]:
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.encode(self.render(messages[:number], tools)) if number else []
            through = self.encode(self.render(messages[: number + 1], tools, add_generation_prompt=False))
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
        """Return the end at which an engine would have stopped a turn that the template writes from ``start`` to
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
        """Return a digest of vocabulary, chat template, stop tokens and the encoding of a probe text. Trainer and
        engines compare it to verify that they use the same tokenizer.
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
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _stop_ids(tokenizer: Any, folder: Path) -> frozenset[int]:
    """Return the end-of-sequence ids from the tokenizer and from ``generation_config.json``."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            eos: int | list[int] | None = json.loads(file.read_text()).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        ids.update([eos] if isinstance(eos, int) else eos or [])
    if not ids:
        raise ModelError(
            f"{folder} names no end-of-sequence token, in its tokenizer or in generation_config.json: responses would "
            "never end"
        )
    return frozenset(ids)


def _shared(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False))))
