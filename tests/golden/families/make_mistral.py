"""Writes ``mistral.json``, the renderings of Mistral's own encoder.

Run ``python tests/golden/families/make_mistral.py`` from the repository's root, with the package mistral-common.

That package holds the vocabulary of Mistral Nemo (version 3 of the format). Later versions have further special tokens
and other encoders of the same package; they encode with the same vocabulary here.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3])]

import mistral_common  # noqa: E402
from mistral_common.exceptions import MistralCommonException  # noqa: E402
from mistral_common.protocol.instruct.normalize import get_normalizer  # noqa: E402
from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: E402
from mistral_common.protocol.instruct.validator import ValidationMode, get_validator  # noqa: E402
from mistral_common.tokens.tokenizers import instruct  # noqa: E402
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy, TokenizerVersion  # noqa: E402
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: E402
from mistral_common.tokens.tokenizers.tekken import SpecialTokenInfo, Tekkenizer  # noqa: E402

from tests.golden.families.conversations import CASES  # noqa: E402

VERSIONS = {
    "v3": instruct.InstructTokenizerV3,
    "v11": instruct.InstructTokenizerV11,
    "v13": instruct.InstructTokenizerV13,
}
LATER = ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]


def vocabulary() -> dict[str, Any]:
    """Return the maker's file with the vocabulary of Mistral Nemo."""
    made: dict[str, Any] = json.loads(
        (Path(mistral_common.__file__).parent / "data" / "tekken_240718.json").read_text()
    )
    return made


def tokenizer(name: str) -> MistralTokenizer:
    """Return the maker's encoder of one version."""
    data = vocabulary()
    special = [dict(token) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    if name != "v3":
        present = {token["token_str"] for token in special}
        special += [
            SpecialTokenInfo(rank=rank, token_str=text, is_control=True)
            for rank, text in enumerate((text for text in LATER if text not in present), len(special))
        ]
    config = data["config"]
    tekken = Tekkenizer(
        data["vocab"],
        special,
        config["pattern"],
        config["default_vocab_size"],
        config["default_num_special_tokens"],
        TokenizerVersion(name),
    )
    encoder = VERSIONS[name](tekken)
    return MistralTokenizer(
        encoder,
        validator=get_validator(TokenizerVersion(name), mode=ValidationMode.agnostic),
        request_normalizer=get_normalizer(TokenizerVersion(name), tekken.model_settings_builder),
    )


def request(case: Any, *, as_chunks: bool) -> dict[str, Any]:
    """Return a conversation in the form of Mistral's API: thoughts are chunks of the content."""
    messages = []
    for message in case.messages:
        sent = {key: value for key, value in message.items() if key != "reasoning_content"}
        if thoughts := message.get("reasoning_content"):
            chunks = [{"type": "thinking", "thinking": thoughts, "closed": True}]
            sent["content"] = [*chunks, *([{"type": "text", "text": message["content"]}] if message["content"] else [])]
            if not as_chunks:
                sent["content"] = message["content"]
        if calls := message.get("tool_calls"):
            sent["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in calls
            ]
        messages.append(sent)
    return {"messages": messages, "tools": case.tools}


def main() -> None:
    """Write the file."""
    rendered: dict[str, dict[str, str | None]] = {}
    for name in VERSIONS:
        maker = tokenizer(name)
        encoder = maker.instruct_tokenizer.tokenizer
        for title, case in CASES.items():
            try:
                asked = ChatCompletionRequest(**request(case, as_chunks=name == "v13"))
                tokens = maker.encode_chat_completion(asked).tokens
                text = encoder.decode(tokens, special_token_policy=SpecialTokenPolicy.KEEP)
            except (MistralCommonException, ValueError, AssertionError) as error:
                print(f"{name}: {title}: refused: {error}")  # noqa: T201 - a script
                text = None
            rendered.setdefault(name, {})[title] = text
    file = Path(__file__).with_name("mistral.json")
    made = {"package": f"mistral-common {version('mistral-common')}", "licence": "Apache-2.0", "rendered": rendered}
    file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
