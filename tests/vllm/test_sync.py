"""Weights into a living vLLM: all of them, in time, or none."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import torch

from tests.waiting import until
from trinity_mq.engines.host.admin_client import ReceiveFailed

from .conftest import CANARY, Engine, Started, adopted, new_weights, reference

PROMPT = [3, 7, 2, 9]
CLOSE = 1e-4


@pytest.fixture(params=["waiting_engine", "keeping_engine"], ids=["untied", "tied"])
def started(request: pytest.FixtureRequest) -> Started:
    chosen: Started = request.getfixturevalue(request.param)
    return chosen


async def test_each_sync_replaces_all_weights(started: Started) -> None:
    async with adopted(started) as engine:
        models = [new_weights(started.folder, seed) for seed in (11, 12, 13)]
        for step, model in enumerate(models, 11):
            canary = torch.tensor(await engine.sync(model, (2, step)))
            torch.testing.assert_close(canary, reference(model, CANARY[:1], CANARY[1:]), atol=CLOSE, rtol=0)
            for other in models:
                if other is not model:  # a part that had stayed old would still be close to one of these or to none
                    assert (canary - reference(other, CANARY[:1], CANARY[1:])).abs().max() > 0.1
            # the same prompt every time: nothing cached under other weights may answer it
            [choice] = (await engine.complete(prompt=PROMPT, max_tokens=16, seed=1))["choices"]
            expected = reference(model, PROMPT, choice["token_ids"])
            torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), expected, atol=CLOSE, rtol=0)
            assert choice["weight_versions"] == [[0, 2, step]]
            assert engine.host.snapshot.version == (2, step)


async def test_a_trainer_that_does_not_come_leaves_the_old_weights_serving(waiting: Engine) -> None:
    model = new_weights(waiting.started.folder, 21)
    await waiting.sync(model, (3, 1))
    await waiting.host.pause()
    spec = waiting.spec(model, (3, 2), await waiting.sender.rendezvous(), seconds=2.0)
    with pytest.raises(ReceiveFailed) as failed:
        await waiting.host.receive({**spec, "epoch": 99})
    assert not failed.value.touched
    await waiting.host.resume()
    [choice] = (await waiting.complete(prompt=PROMPT, max_tokens=8))["choices"]
    assert choice["weight_versions"] == [[0, 3, 1]]
    other = new_weights(waiting.started.folder, 22)
    canary = torch.tensor(await waiting.sync(other, (3, 3)))  # and the next one works
    torch.testing.assert_close(canary, reference(other, CANARY[:1], CANARY[1:]), atol=CLOSE, rtol=0)


async def test_a_transfer_cut_off_by_resume_leaves_the_old_weights_serving(waiting: Engine) -> None:
    model = new_weights(waiting.started.folder, 23)
    await waiting.sync(model, (3, 4))
    await waiting.host.pause()
    spec = waiting.spec(model, (3, 5), await waiting.sender.rendezvous(), seconds=5.0)
    receiving = asyncio.create_task(waiting.host.receive({**spec, "epoch": 98}))
    store = waiting.sender._store
    assert store is not None
    await asyncio.to_thread(store.wait, ["at/98/1/1"], timedelta(seconds=30))  # vLLM's worker is at the barrier
    await waiting.host.resume()
    with pytest.raises(ReceiveFailed) as failed:
        await receiving
    assert not failed.value.touched
    assert waiting.host.snapshot.version == (3, 4)
    canary = torch.tensor(await waiting.sync(new_weights(waiting.started.folder, 24), (3, 6)))
    expected = reference(new_weights(waiting.started.folder, 24), CANARY[:1], CANARY[1:])
    torch.testing.assert_close(canary, expected, atol=CLOSE, rtol=0)


async def test_waiting_lets_requests_end_with_the_weights_they_began_with(waiting: Engine) -> None:
    old, new = (new_weights(waiting.started.folder, seed) for seed in (31, 32))
    await waiting.sync(old, (4, 1))
    asked = asyncio.create_task(waiting.complete(prompt=PROMPT, n=32, max_tokens=56, temperature=1.5))
    await under_way(waiting)
    await waiting.sync(new, (4, 2))
    for choice in (await asked)["choices"]:
        assert choice["weight_versions"] == [[0, 4, 1]]
        expected = reference(old, PROMPT, choice["token_ids"], 1.5)
        torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), expected, atol=CLOSE, rtol=0)


async def test_keeping_lets_requests_go_on_and_says_which_weights_made_which_token(keeping: Engine) -> None:
    """The cache is computed anew with the new weights, so tokens after the change are wholly of the new policy."""
    spans: list[list[list[int]]] = []
    for step in range(2, 12, 2):
        old, new = (new_weights(keeping.started.folder, 40 + step + which) for which in (0, 1))
        await keeping.sync(old, (5, step))
        asked = asyncio.create_task(keeping.complete(prompt=PROMPT, n=64, max_tokens=56, temperature=1.5))
        await under_way(keeping)
        await keeping.sync(new, (5, step + 1))
        for choice in (await asked)["choices"]:
            spans.append(choice["weight_versions"])
            starts = [start for start, *_ in choice["weight_versions"]] + [len(choice["token_ids"])]
            for (start, _, made_by), end in zip(choice["weight_versions"], starts[1:], strict=True):
                model = old if made_by == step else new
                expected = reference(model, PROMPT, choice["token_ids"], 1.5)[start:end]
                seen = torch.tensor(choice["token_logprobs"][start:end])
                torch.testing.assert_close(seen, expected, atol=CLOSE, rtol=0)
        if any(len(runs) == 2 for runs in spans):
            return
    raise AssertionError(f"no request of {len(spans)} was under way when weights came")


async def test_aborting_begins_requests_anew_with_the_new_weights(aborting: Engine) -> None:
    for step in range(2, 12, 2):
        old, new = (new_weights(aborting.started.folder, 60 + step + which) for which in (0, 1))
        await aborting.sync(old, (6, step))
        asked = asyncio.create_task(aborting.complete(prompt=PROMPT, n=64, max_tokens=56, temperature=1.5))
        await under_way(aborting)
        await aborting.sync(new, (6, step + 1))
        versions = {tuple(run) for choice in (await asked)["choices"] for run in choice["weight_versions"]}
        assert len(versions) == 1  # all of a request by the same weights
        if versions == {(0, 6, step + 1)}:
            return
    raise AssertionError("no request was under way when weights came")


async def under_way(engine: Engine) -> None:
    """Return when the engine samples."""

    async def busy() -> bool:
        return (await engine.host.refresh()).load > 0

    await until(busy)
