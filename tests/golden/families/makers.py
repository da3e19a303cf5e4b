"""What the makers of model families publish: their chat templates, run as they are, and their special tokens.

``sources.json`` names the package and the licence of each template. The vocabularies are too large to keep: a tokenizer
of bytes with the family's special tokens (``vocabularies.json``) stands for them, because a template decides about
text, not about tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trinity_mq.engines.generation.text import TextCodec

FOLDER = Path(__file__).parent
SOURCES: Mapping[str, Mapping[str, Any]] = json.loads((FOLDER / "sources.json").read_text())


@dataclass(frozen=True)
class Vocabulary:
    """Special tokens of a family, and the tokens that begin a text and end a response."""

    special: Sequence[str]
    ends: Sequence[str]
    """The first is the tokenizer's end of sequence."""
    begin: str | None = None


VOCABULARIES = {
    beginning: Vocabulary(fields["special"], fields["ends"], fields["begin"])
    for beginning, fields in json.loads((FOLDER / "vocabularies.json").read_text()).items()
}
"""By the first letters of the templates' names."""


def vocabulary_of(name: str) -> Vocabulary:
    """Return the special tokens of the family to which the template ``name`` belongs."""
    return next(vocabulary for beginning, vocabulary in VOCABULARIES.items() if name.startswith(beginning))


@functools.cache
def template_of(name: str) -> str:
    """Return a maker's chat template."""
    return (FOLDER / "templates" / f"{name}.jinja").read_text()


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the special tokens and the chat template of a maker."""
    vocabulary = vocabulary_of(name)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in vocabulary.special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=vocabulary.begin,
        eos_token=vocabulary.ends[0],
        pad_token=vocabulary.ends[0],
    )
    tokenizer.chat_template = template_of(name)
    return tokenizer


@functools.cache
def codec_of(name: str) -> TextCodec:
    """Return our codec of that tokenizer."""
    tokenizer = tokenizer_of(name)
    return TextCodec(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, vocabulary_of(name).ends)))


def rendering_of(
    name: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    asks: bool = True,
    **switches: Any,
) -> str:
    """Return the text that a maker's template writes; ``asks``: it opens the assistant's next turn."""
    text: str = tokenizer_of(name).apply_chat_template(
        [dict(message) for message in messages],
        tools=None if tools is None else [dict(tool) for tool in tools],
        tokenize=False,
        add_generation_prompt=asks,
        **switches,
    )
    return text
