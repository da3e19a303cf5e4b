"""A folder that was trained answers in plain transformers as in the engine that got the weights by sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.models.tiny_gguf import make_model, write_gguf
from trinity_mq.config import ModelConfig
from trinity_mq.engines.generation.request import GenerationRequest
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.models.gguf_folder import convert
from trinity_mq.training.model.policy import Policy

CHATS = [
    [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 12 + 31?"}],
    [{"role": "user", "content": "3"}],
    [{"role": "user", "content": "a b  c"}, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}],
]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as a user's is: tied embeddings, byte pairs, a template, an end of sequence of its own."""
    place = tmp_path_factory.mktemp("model")
    convert(write_gguf(make_model(), place / "tiny.gguf"), place / "made")
    return place / "made"


def train(policy: Policy, steps: int) -> None:
    """Take steps large enough to change what is answered."""
    optimizer = torch.optim.AdamW(policy.parameters, lr=1e-2)
    torch.manual_seed(1)
    tokens = torch.randint(3, 200, (4, 24))
    for _ in range(steps):
        policy.model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def in_engine(generator: TextGenerator) -> list[list[int]]:
    codec = generator.codec
    requests = [
        GenerationRequest(codec.encode(codec.render(chat)), NEW_TOKENS, temperature=0.0, stop_ids=codec.stop_ids)
        for chat in CHATS
    ]
    return [completion.token_ids for (completion,) in generator.generate(requests)]


def in_transformers(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for chat in CHATS:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(output[0, prompt["input_ids"].shape[1] :].tolist())
    return answers


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message['content'] }}:{% endfor %}"])
def test_it_answers_alike(folder: Path, tmp_path: Path, template: str | None) -> None:
    limits = {"max_model_len": 128, "max_prompt_tokens": 96, "max_response_tokens": 16}
    config = ModelConfig(model_path=str(folder), custom_chat_template=template, **limits)
    policy, engine = Policy(config, folder, 0), TextGenerator.build(config, folder, num_threads=1)
    answers = []
    for _ in range(2):
        train(policy, 2)
        engine.apply(engine.check(dict(policy.weights())))
        answers.append(in_engine(engine))
        policy.save(tmp_path / "final", folder)
        assert answers[-1] == in_transformers(tmp_path / "final")
    assert answers[0] != answers[1], "the weights have changed in between"
    if template is not None:
        assert engine.codec.render(CHATS[1]) == "3:"
