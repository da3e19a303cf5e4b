"""What the makers of model families publish: their chat templates, run as they are, and their special tokens.

``sources.json`` names the package and the licence of each template. The vocabularies are too large to keep: a tokenizer
of bytes with the family's special tokens stands for them, because a template decides about text, not about tokens.
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

FOLDER = Path(__file__).parent
SOURCES: Mapping[str, Mapping[str, Any]] = json.loads((FOLDER / "sources.json").read_text())

QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
).split()
LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|> "
    "<|finetune_right_pad_id|>"
).split()
GLM = (
    "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> "
    "</tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> /nothink"
).split()
DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <think> </think>"
).split()
HARMONY = "<|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>".split()
KIMI = (
    "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <|media_start|> "
    "<|media_content|> <|media_pad|> <|media_end|> [PAD]"
).split()
MISTRAL = (
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [CALL_ID] [ARGS] [THINK] [/THINK]"
).split()


@dataclass(frozen=True)
class Vocabulary:
    """Special tokens of a family, and the tokens that begin a text and end a response."""

    special: Sequence[str]
    ends: Sequence[str]
    """The first is the tokenizer's end of sequence."""
    begin: str | None = None


VOCABULARIES = {
    "qwen": Vocabulary(QWEN, ("<|im_end|>", "<|endoftext|>")),
    "llama": Vocabulary(LLAMA, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), "<|begin_of_text|>"),
    "gemma": Vocabulary("<bos> <eos> <start_of_turn> <end_of_turn>".split(), ("<eos>", "<end_of_turn>"), "<bos>"),
    "phi": Vocabulary(
        "<|endoftext|> <|end|> <|system|> <|user|> <|assistant|>".split(), ("<|endoftext|>", "<|end|>", "<|assistant|>")
    ),
    "glm": Vocabulary(GLM, ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "deepseek": Vocabulary(DEEPSEEK, ("<｜end▁of▁sentence｜>",), "<｜begin▁of▁sentence｜>"),
    "gpt": Vocabulary(HARMONY, ("<|return|>", "<|call|>")),
    "kimi": Vocabulary(KIMI, ("<|im_end|>", "[EOS]"), "[BOS]"),
    "mistral": Vocabulary(MISTRAL, ("</s>",), "<s>"),
    "ministral": Vocabulary(MISTRAL, ("</s>",), "<s>"),
    "smollm2": Vocabulary("<|im_start|> <|im_end|> <|endoftext|>".split(), ("<|im_end|>", "<|endoftext|>")),
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
