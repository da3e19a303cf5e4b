"""A stream under way when new weights come goes on with them, and says which tokens are theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.unit.models.test_recording import MESSAGES
from trinity_mq.experience import Experience
from trinity_mq.models import ModelWrapper

from .conftest import Engine, Started, adopted, new_weights, reference

CLOSE = 1e-4
LONGEST = 200
TRIES = 6


@pytest.fixture(params=["keeping_engine", "aborting_engine"], ids=["keep", "abort"])
def started(request: pytest.FixtureRequest) -> Started:
    chosen: Started = request.getfixturevalue(request.param)
    return chosen


async def test_a_stream_goes_on_with_new_weights(started: Started) -> None:
    async with adopted(started) as engine:
        for step in range(2, 2 + 2 * TRIES, 2):
            models = {step + later: new_weights(started.folder, 90 + step + later) for later in (0, 1)}
            await engine.sync(models[step], (8, step))
            recorded, texts = await streamed(engine, models[step + 1], (8, step + 1))
            for experience in recorded:
                response = experience.tokens[experience.prompt_length :].tolist()
                assert_each_token_is_of_the_weights_it_names(experience, response, models)
            assert texts == [experience.response_text for experience in recorded]
            assert all(one.response_length == LONGEST or one.truncate_status is None for one in recorded), "it ended"
            if any(len(experience.versions or ()) == 2 for experience in recorded):
                return
    raise AssertionError("no stream was under way when weights came")


async def streamed(engine: Engine, new: Any, version: tuple[int, int]) -> tuple[list[Experience], list[str]]:
    """Stream three answers, send ``new`` once tokens come; return what was recorded and the texts."""
    wrapper = ModelWrapper(engine.host.snapshot.model(), enable_history=True, temperature=1.5, seed=version[1])
    texts = [""] * 3
    syncing: asyncio.Task[list[float]] | None = None
    async with wrapper.get_openai_async_client() as client:
        stream: Any = await client.chat.completions.create(
            model=wrapper.model_name, messages=MESSAGES, n=3, stream=True, max_tokens=LONGEST
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            if syncing is None and any(choice.token_ids for choice in chunk.choices):
                syncing = asyncio.create_task(engine.sync(new, version))
    assert syncing is not None
    await syncing
    await wrapper.aclose()
    return wrapper.extract_experience_from_history(), texts


def assert_each_token_is_of_the_weights_it_names(
    experience: Experience, response: list[int], models: dict[int, Any]
) -> None:
    prompt = experience.tokens[: experience.prompt_length].tolist()
    runs = experience.versions or []
    ends = [start for start, *_ in runs[1:]] + [len(response)]
    for (start, _, step), end in zip(runs, ends, strict=True):
        expected = reference(models[step], prompt, response, 1.5)[start:end]
        assert experience.logprobs is not None
        torch.testing.assert_close(experience.logprobs[start:end], expected, atol=CLOSE, rtol=0)
