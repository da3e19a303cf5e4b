"""A tokenizer of bytes with the chat template, the special tokens and the ends that a test gives."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trinity_mq.engines.generation.text import MaskedTokens, TextCodec

CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")


def tokenizer_of(
    template: str, ends: Sequence[str] = CHATML_ENDS, others: Sequence[str] = ("<|im_start|>",)
) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose end of sequence is the first of ``ends``; ``others`` are further special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*ends, *others)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ends[0], pad_token=ends[0])
    tokenizer.chat_template = template
    return tokenizer


def codec_of(template: str, ends: Sequence[str] = CHATML_ENDS, others: Sequence[str] = ("<|im_start|>",)) -> TextCodec:
    """Return a codec of the tokenizer that :func:`tokenizer_of` makes."""
    tokenizer = tokenizer_of(template, ends, others)
    return TextCodec(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, ends)))


def trained(codec: TextCodec, masked: MaskedTokens) -> list[str]:
    """Return the texts of the runs of tokens that the assistant wrote."""
    runs: list[list[int]] = [[]]
    for token, bit in zip(masked.token_ids, masked.assistant_mask, strict=True):
        if bit:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return codec.decode([run for run in runs if run])
