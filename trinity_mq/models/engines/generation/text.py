"""Text to token ids and back, with the chat template and its masks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_mq.models.errors import ModelError

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None
_PROBE = "The answer is 42.\n\t3,14 <|im_end|> \u00e9\u4e2d"
"""Encoded into the fingerprint: two tokenizers with the same vocabulary may still cut text differently."""


class TextError(ValueError):
    """This text or conversation cannot be turned into tokens; the message says why."""


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """A conversation as tokens, and which of them the assistant wrote."""

    token_ids: list[int]
    assistant_mask: list[int]
    """1 where the assistant wrote the token."""


class TextCodec:
    """A tokenizer with its chat template. Safe to use from several threads: it never changes the tokenizer's state."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # what the file may have left on would cut prompts silently
            self._fast.no_truncation()
            self._fast.no_padding()
        self.stop_ids = stop_ids
        """Token ids that end a response."""
        self.end_id: int = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(stop_ids)
        """The token with which a response to imitate ends."""
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_ids, default=0)

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> TextCodec:
        """Return the codec of a Hugging Face folder.

        Raises:
            ModelError: There is no tokenizer that can be loaded.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # of many kinds, by tokenizer
            raise ModelError(f"{folder}: its tokenizer cannot be loaded: {' '.join(str(error).split())}") from error
        return cls(tokenizer, _stop_ids(tokenizer, folder))

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def size(self) -> int:
        """Number of the tokenizer's tokens, added ones included."""
        return len(self._tokenizer)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of ``text``; ``special`` adds what the tokenizer puts around a bare prompt.

        Raises:
            TextError: The vocabulary does not cover the text.
        """
        try:
            if self._fast is not None:
                ids: list[int] = self._fast.encode(text, add_special_tokens=special).ids
            else:
                ids = self._tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # the Rust library raises plain Exception
            vocabulary = self._tokenizer.get_vocab()
            strange = sorted({character for character in text if character not in vocabulary})
            raise TextError(
                f"the text {text[:40]!r} holds {''.join(strange)[:40]!r}, which the vocabulary of {len(vocabulary)} "
                f"tokens does not cover; use other text or add the characters to the model ({error})"
            ) from error
        return ids

    def encode_after(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return tokens of ``text`` that begin with ``tokens``, where these are the tokens of its beginning; else as
        :meth:`encode`.

        What was sampled need not be what the tokenizer makes of its text. Whether they are of its beginning is seen by
        decoding, and so is the whole that is returned.

        Raises:
            TextError: The vocabulary does not cover the text.
        """
        [beginning] = self.decode([tokens])
        if text.startswith(beginning):
            continued = [*tokens, *self.encode(text[len(beginning) :])]
            if self.decode([continued]) == [text]:
                return continued
        return self.encode(text)

    def render(self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = True) -> str:
        """Return the conversation as the chat template writes it.

        Raises:
            TextError: There is no template, or it refuses these messages.
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

    def render_with_tools(self, messages: Messages, tools: Tools) -> str:
        """Return the conversation as the chat template writes it, tools included.

        Raises:
            TextError: As :meth:`render`, or the template leaves tools out.
        """
        text = self.render(messages, tools)
        if tools and text == self.render(messages):
            raise TextError(
                f"the chat template has no place for tools, so the model would not hear of the {len(tools)} offered; "
                "leave tools out, or use a model whose template writes them"
            )
        return text

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence, special tokens included."""
        if self._fast is not None:
            texts: list[str] = self._fast.decode_batch([list(ids) for ids in sequences], skip_special_tokens=False)
        else:
            texts = [self._tokenizer.decode(list(ids), skip_special_tokens=False) for ids in sequences]
        return texts

    def conversation(self, messages: Messages, tools: Tools = None) -> MaskedTokens:
        """Return the whole conversation as tokens with a mask of what the assistant wrote.

        The mask comes from the template's ``{% generation %}`` marks if it has them, else from rendering each prefix.

        Raises:
            TextError: The template rewrites earlier turns, so that no mask is right.
        """
        if "{% generation" in str(self._tokenizer.chat_template or ""):
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return MaskedTokens(list(rendered["input_ids"]), [int(bit) for bit in rendered["assistant_masks"]])
        whole = self.encode(self.render(messages, tools, add_generation_prompt=False))
        mask = [0] * len(whole)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.encode(self.render(messages[:number], tools)) if number else []
            through = self.encode(self.render(messages[: number + 1], tools, add_generation_prompt=False))
            if whole[: len(before)] != before or whole[: len(through)] != through:
                raise TextError(
                    f"the chat template writes the conversation up to message {number} differently once more follows, "
                    "so which tokens the assistant sampled cannot be told; use a template with {% generation %} marks, "
                    "or convert one turn at a time"
                )
            mask[len(before) : len(through)] = [1] * (len(through) - len(before))
        return MaskedTokens(whole, mask)

    def fingerprint(self) -> str:
        """Return a digest of vocabulary, chat template, stop tokens and how a probe text is cut, by which trainer and
        engines know that they use the same.
        """
        try:
            probe = self.encode(_PROBE)
        except TextError:
            probe = []
        seen = {
            "vocabulary": sorted(self._tokenizer.get_vocab().items()),
            "chat_template": self._tokenizer.chat_template,
            "stop": sorted(self.stop_ids),
            "pad": self.pad_id,
            "probe": probe,
        }
        return hashlib.sha256(json.dumps(seen, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _stop_ids(tokenizer: Any, folder: Path) -> frozenset[int]:
    """Return the ends of sequence of the tokenizer and of ``generation_config.json`` together."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            found: int | list[int] | None = json.loads(file.read_text()).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        ids.update([found] if isinstance(found, int) else found or [])
    if not ids:
        raise ModelError(
            f"{folder} names no end-of-sequence token, in its tokenizer or in generation_config.json: responses would "
            "never end"
        )
    return frozenset(ids)
