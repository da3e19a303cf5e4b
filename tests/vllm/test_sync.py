"""Weights into a living vLLM, by each channel: all of them, in time, or none; its processes die with their engine."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.unit.sync.weights import manifest_of
from tests.waiting import until
from trinity_mq.engines.generation.request import GenerationRequest
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.engines.torch.weights import named_weights
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.client import VllmClient
from trinity_mq.engines.vllm.generator import VllmGenerator, model_limits
from trinity_mq.messages import EngineUse
from trinity_mq.sync.channels.base import Channel
from trinity_mq.sync.channels.checkpoint.channel import CheckpointChannel
from trinity_mq.sync.channels.memory.channel import MemoryChannel

from .conftest import CANARY, Engine, Started, adopted, new_weights, reference
from .overheard import serving

PROMPT = [3, 7, 2, 9]
CLOSE = 1e-4


@pytest.fixture(params=["waiting_engine", "keeping_engine", "split_engine"], ids=["untied", "tied", "split"])
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


@pytest.mark.parametrize("recompute", [False, True])
async def test_keeping_lets_requests_go_on_and_says_which_weights_made_which_token(
    tmp_path: Path, keeping: Engine, recompute: bool
) -> None:
    """Without ``recompute`` no token is computed twice: those after the change see what the old weights cached."""
    folder = keeping.started.folder
    codec, (vocabulary, longest) = TextCodec.load(folder), model_limits(keeping.started.config.model, folder)
    prompt = [(5 * place + 3) % 16 for place in range(20)]
    spans: list[tuple[tuple[int, int, int], ...]] = []
    for step in range(2, 14, 2):
        version = (5 + 10 * recompute, step)
        old, new = (new_weights(folder, 40 + step + which) for which in (0, 1))
        await keeping.sync(old, version)
        async with serving(keeping.started, version) as (_, client):
            generator = VllmGenerator(
                codec,
                client,
                vocabulary=vocabulary,
                max_model_len=longest,
                pause_mode="keep",
                recompute_cache=recompute,
                give_up=lambda: None,
                home=tmp_path,
            )
            request = GenerationRequest(prompt, max_tokens=90, n=32, temperature=1.5)
            asking = asyncio.create_task(client.post(api.GENERATE, api.generate_body(request, api.label(version))))
            before = await busy(client)
            keeping.epoch += 1
            spec = keeping.spec(new, (version[0], step + 1), await keeping.sender.rendezvous())
            async with asyncio.TaskGroup() as group:
                receiving = group.create_task(generator.receive(spec))
                tensors = list(named_weights(new).items())
                group.create_task(keeping.sender.broadcast(tensors, spec["manifest"], keeping.epoch, 1, 2))
            await generator.apply(receiving.result())
            choices = api.read_choices(await asking)
            after = await client.use()
        assert after is not None
        assert after.prompt_tokens - before.prompt_tokens == 0, "the metrics count a prompt once"
        spans += [choice.versions for choice in choices]
        changed = [choice for choice in choices if len(choice.versions) == 2]
        assert (after.preemptions > before.preemptions) == (recompute and bool(changed))
        for choice in choices:
            cut = choice.versions[1][0] if choice in changed else len(choice.token_ids)
            cached = max(cut - 1, 0) if choice.versions[0][2] == step else 0
            expected = mixed(old, new, prompt, choice.token_ids, cut, 0 if recompute else cached)
            torch.testing.assert_close(torch.tensor(choice.logprobs), expected, atol=CLOSE, rtol=0)
        if changed:
            return
    raise AssertionError(f"no request of {len(spans)} was under way when weights came")


def mixed(old: Any, new: Any, prompt: list[int], response: list[int], cut: int, cached: int) -> torch.Tensor:
    """Return the logprobs of a response whose tokens from index ``cut`` on are of ``new``, which sees the prompt and
    the first ``cached`` tokens as ``old`` cached them.
    """
    before = reference(old, prompt, response, 1.5)[:cut]
    if cut == len(response):
        return before
    if not cached:
        return torch.cat([before, reference(new, prompt, response, 1.5)[cut:]])
    with torch.no_grad():
        cache = old(torch.tensor([[*prompt, *response[:cached]]]), use_cache=True).past_key_values
        logits = new(torch.tensor([response[cached:]]), past_key_values=cache).logits[0].float() / 1.5
    after = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(response[cut:])[:, None])[:, 0]
    return torch.cat([before, after])


async def busy(client: VllmClient) -> EngineUse:
    """Return vLLM's use of its cache once it decodes 32 sequences."""
    while True:
        use = await client.use()
        if use is not None and use.running == 32:
            return use


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


@pytest.mark.parametrize("fixture", ["waiting_engine", "split_engine"], ids=["untied", "split"])
@pytest.mark.parametrize("method", ["memory", "checkpoint"])
async def test_weights_that_are_fetched_replace_all(
    request: pytest.FixtureRequest, tmp_path: Path, fixture: str, method: str
) -> None:
    async with adopted(request.getfixturevalue(fixture)) as engine:
        await fetched_weights_replace_all(engine, tmp_path, method)


async def fetched_weights_replace_all(engine: Engine, folder: Path, method: str) -> None:
    channel: Channel = (
        MemoryChannel("127.0.0.1", 2**16, 30.0) if method == "memory" else CheckpointChannel(str(folder), 2**16, 30.0)
    )
    for step in (1, 2):
        model, version = new_weights(engine.started.folder, 100 + step), (8, step)
        tensors = list(named_weights(model).items())
        entries = manifest_of(tensors)
        where = await channel.offer(version, tensors, entries)
        await engine.host.pause()
        canary = torch.tensor((await engine.host.receive(engine.spec(model, version, where)))["logprobs"])
        await engine.host.commit(version, step)
        await channel.committed(version, tensors, entries)
        torch.testing.assert_close(canary, reference(model, CANARY[:1], CANARY[1:]), atol=1e-4, rtol=0)
        found = await channel.catch_up_source()
        assert found is not None
        await engine.host.pause()
        pulled = torch.tensor((await engine.host.receive(engine.spec(model, version, found[1])))["logprobs"])
        await engine.host.commit(version, step)
        torch.testing.assert_close(pulled, canary)
        assert engine.host.snapshot.version == version
    await channel.close()


async def test_damaged_weights_leave_the_old_ones_serving(waiting: Engine) -> None:
    channel, model = MemoryChannel("127.0.0.1", 2**16, 30.0), new_weights(waiting.started.folder, 110)
    await waiting.sync(model, (9, 1))
    other = new_weights(waiting.started.folder, 111)
    offered = ((9, 2), list(named_weights(other).items()), manifest_of(named_weights(other).items()))
    copy = await channel.stage(*offered, digests=True)
    copy.flats[-1][0] += 1
    where = await channel.offer(*offered)
    await waiting.host.pause()
    with pytest.raises(ReceiveFailed, match="checksum") as failed:
        await waiting.host.receive(waiting.spec(other, (9, 2), where))
    assert not failed.value.touched
    await waiting.host.resume()
    [choice] = (await waiting.complete(prompt=[3, 7, 2, 9], max_tokens=8))["choices"]
    assert choice["weight_versions"] == [[0, 9, 1]]
    await channel.close()


async def restarted(engine: Engine) -> None:
    """Return when the host has started the engine again; it has no weights then."""
    again = asyncio.Event()
    engine.host.on_change = lambda: again.set() if engine.host.snapshot.alive else None
    keeping = asyncio.create_task(engine.host.keep())
    await again.wait()
    keeping.cancel()
    assert engine.host.snapshot.state == "empty"


def workers(host: EngineHost) -> list[psutil.Process]:
    return [process for process in processes(host) if process.name().startswith("VLLM::Worker")]


async def test_a_worker_that_hangs_or_dies_ends_vllm_and_the_engine_takes_weights_again(split_engine: Started) -> None:
    async with adopted(split_engine) as engine:
        model = new_weights(split_engine.folder, 130)
        await engine.sync(model, (10, 1))
        family = processes(engine.host)
        workers(engine.host)[1].suspend()
        await engine.host.pause()
        spec = engine.spec(model, (10, 2), await engine.sender.rendezvous(), seconds=1.0)
        with pytest.raises(ReceiveFailed, match="did not answer") as failed:
            await engine.host.receive({**spec, "epoch": 97})
        assert not failed.value.touched
        assert await ended(family) == []
        await restarted(engine)
        canary = torch.tensor(await engine.sync(model, (10, 3)))
        torch.testing.assert_close(canary, reference(model, CANARY[:1], CANARY[1:]), atol=CLOSE, rtol=0)
        family = processes(engine.host)
        workers(engine.host)[0].kill()
        assert await ended(family) == []


async def test_weights_that_do_not_fit_end_vllm_and_its_engine_and_the_host_begins_anew(aborting: Engine) -> None:
    """What went in half-way cannot be repaired: vLLM would try the same tensors again at the next sync."""
    host = aborting.host
    good, bad = (new_weights(aborting.started.folder, seed) for seed in (81, 82))
    bad.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    await aborting.sync(good, (7, 1))
    family = processes(host)
    assert len(family) >= 3  # the engine, vLLM's server, its core
    await host.pause()
    with pytest.raises(BaseExceptionGroup) as failed:
        await aborting.receive(bad, (7, 2))
    [refused] = failed.value.exceptions
    assert isinstance(refused, ReceiveFailed)
    assert refused.touched
    assert await ended(family) == []
    await restarted(aborting)
    canary = torch.tensor(await aborting.sync(good, (7, 3)))
    torch.testing.assert_close(canary, reference(good, CANARY[:1], CANARY[1:]), atol=1e-4, rtol=0)


async def test_an_engine_that_is_killed_leaves_no_process_of_vllm_behind(aborting: Engine) -> None:
    family = processes(aborting.host)
    family[0].kill()
    assert await ended(family) == []


def processes(host: EngineHost) -> list[psutil.Process]:
    ready = ReadyFile.read(host.ready_file)
    assert ready is not None
    engine = psutil.Process(ready.pid)
    return [engine, *engine.children(recursive=True)]


async def ended(family: list[psutil.Process]) -> list[psutil.Process]:
    """Return who still lives after a while; a zombie of ours does not."""
    _, living = await asyncio.to_thread(psutil.wait_procs, family, 20.0)
    left = []
    for one in living:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                left.append(one)
    return left
