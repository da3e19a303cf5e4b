"""The same prompts with the makers' own vocabularies and encoders, where these are installed."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from tests.golden.families.conversations import CASES, Case
from tests.golden.families.makers import template_of
from tests.golden.families.proofs import PROOFS, Proof
from tests.golden.families.test_families import DEVIATIONS, GPT_DEVIATIONS, HARMONY, LIMIT, MISTRAL, maker_of_mistral
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.families.messages import read_messages

pytestmark = pytest.mark.timeout(300)  # a vocabulary of 200 000 tokens is converted
SMOLLM2 = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct"
HARMONY_SPECIAL = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|reserved_200000|>",
    "<|reserved_200001|>",
    "<|return|>",
    "<|constrain|>",
    "<|reserved_200004|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|reserved_200009|>",
    "<|reserved_200010|>",
    "<|reserved_200011|>",
    "<|call|>",
)
"""Special tokens behind the vocabulary, in the order of their ids."""


@functools.cache
def codec_of_ranks(
    file: Path, pattern: str, special: tuple[str, ...], template: str, ends: tuple[str, ...]
) -> TextCodec:
    """Our codec of a vocabulary in the form of tiktoken, with special tokens behind it."""
    backend = TikTokenConverter(vocab_file=str(file), pattern=pattern).converted()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    begin = "<s>" if "<s>" in special else None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=ends[0], pad_token=ends[0])
    tokenizer.chat_template = template_of(template)
    return TextCodec(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, ends)))


def asked(proof: Proof) -> Iterator[tuple[str, Case]]:
    for title, case in proof.cases():
        if title not in proof.refused and case.messages[-1]["role"] != "assistant":
            yield title, case


def deviations(proof: Proof, encode: Callable[[Case], list[int] | None], ours: Callable[[Case], list[int]]) -> set[str]:
    """Titles of the conversations that the maker's encoder writes in another way; None: it refuses them."""
    titles, compared = set(), 0
    for title, case in asked(proof):
        truth = encode(case)
        if truth is not None:
            compared += 1
            if truth != ours(case):
                titles.add(title)
    assert compared > 5
    return titles


@pytest.mark.parametrize("version", DEVIATIONS)
def test_tokens_are_those_of_mistrals_encoder(version: str, tmp_path: Path) -> None:
    pytest.importorskip("mistral_common", reason="mistral-common, with its vocabulary and encoder, is not installed")
    from mistral_common.exceptions import MistralCommonException
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    from tests.golden.families import make_mistral

    proof, maker = maker_of_mistral(version), make_mistral.tokenizer(version)
    tekken, data = maker.instruct_tokenizer.tokenizer, make_mistral.vocabulary()
    shift = data["config"]["default_num_special_tokens"]
    size = data["config"]["default_vocab_size"] - shift
    file = tmp_path / "vocabulary"
    file.write_text("".join(f"{token['token_bytes']} {token['rank']}\n" for token in data["vocab"][:size]))
    special = tuple(dict.fromkeys(tekken.id_to_piece(number) for number in range(40)))
    codec = codec_of_ranks(file, data["config"]["pattern"], special, proof.template, ("</s>",))
    numbers = {number: codec.encode(tekken.id_to_piece(number))[0] for number in range(40)}

    def encode(case: Case) -> list[int] | None:
        try:
            sent = ChatCompletionRequest(**make_mistral.request(case, as_chunks=version == "v13"))
            tokens = maker.encode_chat_completion(sent).tokens
        except (MistralCommonException, ValueError):
            return None
        return [numbers[token] if token < shift else token - shift for token in tokens]

    def ours(case: Case) -> list[int]:
        # the templates put a system message of their own where the conversation has none
        is_bare = version != "v3" and case.messages[0]["role"] != "system"
        messages = [*([{"role": "system", "content": ""}] if is_bare else []), *case.messages]
        text = codec.render_with_tools(read_messages(messages), case.tools)
        return codec.encode(text.replace("[SYSTEM_PROMPT][/SYSTEM_PROMPT]", "") if is_bare else text)

    assert deviations(proof, encode, ours) == {title for title, _ in asked(proof)} & DEVIATIONS[version]


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_tokens_are_those_of_openais_encoder(effort: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE", "")) / "o200k_base.tiktoken"
    if not file.is_file():
        pytest.skip("TIKTOKEN_ENCODINGS_BASE names no folder with o200k_base.tiktoken")
    from openai_harmony import HarmonyEncodingName, RenderConversationConfig, Role, load_harmony_encoding
    from tiktoken_ext import openai_public

    from tests.golden.families import make_harmony

    # the pattern stands in this function, next to a download of the vocabulary that is cached here
    url = f"https://openaipublic.blob.core.windows.net/encodings/{file.name}"
    (tmp_path / hashlib.sha1(url.encode()).hexdigest()).symlink_to(file.resolve())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    pattern = openai_public.o200k_base()["pat_str"]
    proof = next(proof for proof in PROOFS if proof.template == "gpt-oss")
    codec = codec_of_ranks(file, pattern, HARMONY_SPECIAL, proof.template, ("<|return|>", "<|call|>"))
    maker = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    def ours(case: Case) -> list[int]:
        return codec.prompt(
            read_messages(case.messages), case.tools, {"reasoning_effort": effort}, limit=LIMIT
        ).token_ids

    text = codec.decode([ours(Case([{"role": "user", "content": "?"}]))])[0]
    date = text.partition("Current date: ")[2].partition("\n")[0]
    config = RenderConversationConfig(auto_drop_analysis=True)

    def encode(case: Case) -> list[int]:
        conversation = make_harmony.conversation(case, effort, date)
        return list(maker.render_conversation_for_completion(conversation, Role.ASSISTANT, config))

    assert deviations(proof, encode, ours) == {title for title, _ in asked(proof)} & GPT_DEVIATIONS


@pytest.mark.skipif(not (SMOLLM2 / "tokenizer.json").is_file(), reason="scripts/get-smollm2 has not run")
def test_tokens_are_those_of_smollm2s_tokenizer() -> None:
    proof = next(proof for proof in PROOFS if proof.template == "smollm2")
    codec, maker = TextCodec.load(SMOLLM2), AutoTokenizer.from_pretrained(SMOLLM2)
    assert maker.chat_template.strip() == template_of("smollm2").strip()

    def encode(case: Case) -> list[int]:
        text = maker.apply_chat_template(case.messages, tokenize=False, add_generation_prompt=True)
        return list(maker(text, add_special_tokens=False)["input_ids"])

    def ours(case: Case) -> list[int]:
        return codec.prompt(read_messages(case.messages), case.tools, limit=LIMIT).token_ids

    assert len(list(asked(proof))) == 5
    assert [title for title, case in asked(proof) if encode(case) != ours(case)] == []


def test_the_kept_renderings_are_of_these_conversations() -> None:
    assert MISTRAL["rendered"].keys() == DEVIATIONS.keys()
    for rendered in (*MISTRAL["rendered"].values(), *HARMONY["rendered"].values()):
        assert rendered.keys() == CASES.keys()
