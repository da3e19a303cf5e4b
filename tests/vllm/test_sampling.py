"""What vLLM samples through our API, against the Hugging Face model with the same weights."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import torch

from tests.unit.models.talker import CHARACTERS

from .conftest import Engine, Started, new_weights, reference

PROMPT = [3, 7, 2, 9]
CLOSE = 1e-4


def test_serves_nothing_before_its_first_weights(waiting_engine: Started) -> None:
    assert waiting_engine.first_answer.status_code == 503
    assert float(waiting_engine.first_answer.headers["Retry-After"]) > 0
    assert waiting_engine.first_answer.json()["error"]["code"] == "engine_not_current"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_logprobs_are_those_of_the_tempered_distribution(waiting: Engine, temperature: float) -> None:
    model = new_weights(waiting.started.folder, 1)
    await waiting.sync(model, (1, 1))
    answer = await waiting.complete(prompt=PROMPT, n=8, max_tokens=24, temperature=temperature, seed=5)
    assert len(answer["choices"]) == 8
    for choice in answer["choices"]:
        expected = reference(model, PROMPT, choice["token_ids"], temperature)
        torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), expected, atol=CLOSE, rtol=0)
        assert choice["weight_versions"] == [[0, 1, 1]]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1


async def test_temperature_0_takes_the_likeliest_token_and_says_its_untempered_logprob(waiting: Engine) -> None:
    model = new_weights(waiting.started.folder, 2)
    await waiting.sync(model, (1, 2))
    [choice] = (await waiting.complete(prompt=PROMPT, max_tokens=12, temperature=0))["choices"]
    expected = reference(model, PROMPT, choice["token_ids"])
    torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), expected, atol=CLOSE, rtol=0)
    tokens = torch.tensor([[*PROMPT, *choice["token_ids"]]])
    with torch.no_grad():
        assert model(tokens).logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == choice["token_ids"]


async def test_greedy_and_sampled_requests_in_one_batch_do_not_disturb_each_other(waiting: Engine) -> None:
    model = new_weights(waiting.started.folder, 3)
    await waiting.sync(model, (1, 3))
    async with asyncio.TaskGroup() as group:
        asked = {
            heat: group.create_task(waiting.complete(prompt=PROMPT, n=4, max_tokens=16, temperature=heat))
            for heat in (0, 0.5, 2.0)
        }
    for heat, task in asked.items():
        for choice in task.result()["choices"]:
            expected = reference(model, PROMPT, choice["token_ids"], heat or 1.0)
            torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), expected, atol=CLOSE, rtol=0)


async def test_logprobs_are_those_before_truncation(waiting: Engine) -> None:
    model = new_weights(waiting.started.folder, 4)
    await waiting.sync(model, (1, 4))
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 12, "temperature": 0.7, "top_p": 0.6}
    for choice in (await waiting.complete(**body))["choices"]:
        expected = reference(model, PROMPT, choice["token_ids"], 0.7)
        torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_given_tokens_are_scored_at_any_temperature(waiting: Engine, temperature: float) -> None:
    model = new_weights(waiting.started.folder, 5)
    await waiting.sync(model, (1, 5))
    tokens = [(7 * place + 3) % 16 for place in range(waiting.started.config.model.max_model_len)]
    async with httpx.AsyncClient(base_url=waiting.url, timeout=60.0) as client:
        answer = (await client.post("/v1/logprobs", json={"tokens": tokens, "temperature": temperature})).json()
    expected = reference(model, tokens[:1], tokens[1:], temperature)
    torch.testing.assert_close(torch.tensor(answer["logprobs"]), expected, atol=CLOSE, rtol=0)
    assert answer["weight_version"] == [1, 5]


async def test_a_seed_repeats_its_samples_in_other_company(waiting: Engine) -> None:
    await waiting.sync(new_weights(waiting.started.folder, 6), (1, 6))
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 16, "temperature": 1.0, "seed": 11}
    alone = await waiting.complete(**body)
    async with asyncio.TaskGroup() as group:
        group.create_task(waiting.complete(prompt=[9, 9], n=8, max_tokens=16))
        again = group.create_task(waiting.complete(**body))
    assert tokens_of(alone) == tokens_of(again.result())
    assert tokens_of(alone) != tokens_of(await waiting.complete(**{**body, "seed": 12}))


async def test_a_response_ends_with_the_end_of_sequence_which_its_tokens_keep_and_its_text_does_not(
    waiting: Engine,
) -> None:
    await waiting.sync(new_weights(waiting.started.folder, 7), (1, 7))
    answer = await waiting.complete(prompt=PROMPT, n=64, max_tokens=40, temperature=1.5)
    ended = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert ended
    for choice in answer["choices"]:
        if choice["finish_reason"] == "stop":
            assert choice["token_ids"].index(1) == len(choice["token_ids"]) - 1
            assert choice["text"] == "".join(map(letters, choice["token_ids"][:-1]))
        else:
            assert len(choice["token_ids"]) == 40
            assert 1 not in choice["token_ids"]


async def test_a_stop_string_ends_text_and_tokens_where_it_is_complete(waiting: Engine) -> None:
    model = new_weights(waiting.started.folder, 8)
    await waiting.sync(model, (1, 8))
    body = {"prompt": PROMPT, "n": 8, "max_tokens": 40, "temperature": 1.0, "seed": 3}
    free = (await waiting.complete(**body))["choices"]
    stop = "".join(map(letters, free[0]["token_ids"][3:5]))
    for whole, stopped in zip(free, (await waiting.complete(**body, stop=[stop]))["choices"], strict=True):
        texts = ["".join(map(letters, whole["token_ids"][: end + 1])) for end in range(len(whole["token_ids"]))]
        complete = next((end for end, text in enumerate(texts) if stop in text), None)
        length = len(texts) if complete is None else complete + 1
        assert stopped["token_ids"] == whole["token_ids"][:length]
        assert len(stopped["token_logprobs"]) == length
        assert stopped["text"] == (whole["text"] if complete is None else texts[-1].split(stop)[0])
        assert stopped["finish_reason"] == (whole["finish_reason"] if complete is None else "stop")


async def test_a_prompt_without_room_is_refused_as_by_our_own_engine(waiting: Engine) -> None:
    await waiting.sync(new_weights(waiting.started.folder, 9), (1, 9))
    async with httpx.AsyncClient(base_url=waiting.url) as client:
        response = await client.post("/v1/completions", json={"prompt": [3] * 256})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def letters(token: int) -> str:
    return ["<pad>", "<eos>", *CHARACTERS][token]
