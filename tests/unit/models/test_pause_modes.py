"""New weights while a batch step runs, on a real small model: it is paused and goes on (keep), or restarts (abort)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.batch_step import PauseMode, StaticBatcher
from trinity_mq.engines.generation.pause import PauseControl, Spans
from trinity_mq.engines.generation.request import GenerationRequest, ScoreRequest, Token
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.engines.torch.weights import named_weights
from trinity_mq.messages import Version

OLD, NEW = (1, 2), (1, 3)
AT = 5
PROMPT = [3, 4, 5]
REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=12, n=2, seed=7)


class At(PauseControl):
    """Begins the sync's pause when the batch step is before step :data:`AT`, and lets the batch step wait there."""

    def __init__(self, report_paused: Callable[[float], None], mode: PauseMode) -> None:
        super().__init__(report_paused)
        self._mode, self.begun = mode, asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def between(self, step: int, spans: Spans) -> Version | None:
        if step == AT and len(spans) == 1 and not self.begun.is_set():
            self.hold() if self._mode == "keep" else self.cut()
            self._loop.call_soon_threadsafe(self.begun.set)
        return super().between(step, spans)


class PausedBatcher(StaticBatcher):
    """A batcher with the pause of :class:`At`."""

    def __init__(self, *args: Any, pause_mode: PauseMode, **how: Any) -> None:
        super().__init__(*args, pause_mode=pause_mode, **how)
        self.at = self._pause_control = At(self._report_paused, pause_mode)


@contextlib.asynccontextmanager
async def serving(generator: TextGenerator, mode: PauseMode) -> AsyncIterator[tuple[StaticBatcher, EngineState, At]]:
    state = EngineState()
    state.phase, state.version = "current", OLD
    batcher = PausedBatcher(generator, state, max_sequences=100, max_delay=0.0, pause_mode=mode)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(batcher.run())
        try:
            yield batcher, state, batcher.at
        finally:
            await batcher.close(5.0)
            running.cancel()


def other_weights(generator: TextGenerator) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(weight.shape, generator=made) * 0.1 + float(weight.dim() == 1)
        for name, weight in named_weights(generator.model).items()
    }


async def sync(
    batcher: StaticBatcher, state: EngineState, generator: TextGenerator, weights: dict[str, torch.Tensor]
) -> None:
    """What the admin routes do."""
    state.pause(30.0)
    await batcher.idle()
    checked = await batcher.call(lambda: generator.check(weights))
    state.touch()
    await batcher.call(lambda: generator.apply(checked))
    state.applied = True
    state.commit(NEW, 1)


def reference(before: Any, after: Any, tokens: list[int]) -> torch.Tensor:
    """Logprobs of ``tokens``: the context up to token AT - 1 read by ``before``, the rest by ``after``."""
    ids, cut = torch.tensor([[*PROMPT, *tokens]]), len(PROMPT) + AT - 1
    cache = DynamicCache(config=before.config)
    with torch.no_grad():
        first = before(ids[:, :cut], past_key_values=cache, use_cache=True).logits
        rest = after(ids[:, cut:], past_key_values=cache, use_cache=True).logits
    distribution = torch.cat([first, rest], 1)[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    return distribution.gather(1, torch.tensor(tokens)[:, None])[:, 0]


async def test_a_round_that_is_kept_goes_on_under_the_new_weights_and_its_tokens_say_so(
    generator: TextGenerator,
) -> None:
    before = copy.deepcopy(generator.model)
    async with serving(generator, "keep") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], None))
        scored = asyncio.ensure_future(batcher.score([ScoreRequest(PROMPT)], None))
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        [(completions, oldest)] = await asked
        await scored
    assert oldest == OLD
    for completion in completions:
        assert len(completion.token_ids) > AT, "another seed: it must be longer than the pause comes late"
        assert completion.versions == ((0, *OLD), (AT, *NEW))
        wanted = reference(before, generator.model, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-4, rtol=0)


async def test_a_stream_that_is_kept_says_where_the_weights_changed(generator: TextGenerator) -> None:
    tokens: list[Token] = []
    async with serving(generator, "keep") as (batcher, state, pause_control), batcher.stream(REQUEST, None) as stream:
        assert await stream.begun() == OLD
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        async for news in stream:
            tokens += news
    for choice in range(REQUEST.n):
        versions = [token.version for token in tokens if token.choice == choice]
        assert [place for place, version in enumerate(versions) if version] == [AT]
        assert versions[AT] == NEW


async def test_a_round_that_is_aborted_begins_anew_under_the_new_weights(generator: TextGenerator) -> None:
    async with serving(generator, "abort") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], None))
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        [(completions, version)] = await asked
        [again] = generator.generate([REQUEST])
    assert version == NEW
    assert [one.token_ids for one in completions] == [one.token_ids for one in again]


async def test_a_stream_that_is_aborted_ends_with_an_error_that_says_why(generator: TextGenerator) -> None:
    async with serving(generator, "abort") as (batcher, state, pause_control), batcher.stream(REQUEST, None) as stream:
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        with pytest.raises(ApiError, match="new weights arrived"):
            async for _ in stream:
                pass


async def test_a_round_kept_through_a_sync_that_fails_untouched_goes_on_as_it_was(generator: TextGenerator) -> None:
    async with serving(generator, "keep") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], None))
        await pause_control.begun.wait()
        state.pause(30.0)
        await batcher.idle()
        state.resume()
        [(completions, version)] = await asked
        [plain] = generator.generate([REQUEST])
    assert version == OLD
    assert [(one.token_ids, one.versions) for one in completions] == [(one.token_ids, ()) for one in plain]


async def test_a_round_whose_weights_are_gone_is_not_finished_by_what_is_there(generator: TextGenerator) -> None:
    async with serving(generator, "keep") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], None))
        await pause_control.begun.wait()
        state.pause(30.0)
        await batcher.idle()
        state.touch()
        state.resume()
        with pytest.raises(ApiError, match="waits for weights"):
            await asked


async def test_a_kept_answer_to_a_request_pinned_to_the_old_version_is_refused(generator: TextGenerator) -> None:
    async with serving(generator, "keep") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], OLD))
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        with pytest.raises(ApiError, match="pinned to version"):
            await asked
