"""Adapters into a living vLLM: each version is what peft computes, and answers under way keep theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.unit.models.test_recording import MESSAGES
from tests.waiting import until
from trinity_mq.config import ModelConfig
from trinity_mq.config.model import LoraConfig
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.models import ModelWrapper

from .conftest import CANARY, Engine, Started, adopted, new_weights, reference, started_engine, tensors_of, untied
from .test_sync import under_way

PROMPT = [3, 7, 2, 9]
CLOSE = 1e-4
LONGEST = 120
AT_ONCE = 8
TRIES = 6


def _with_lora(model: ModelConfig, **lora: Any) -> ModelConfig:
    return model.model_copy(update={"lora": LoraConfig(sync="adapter", **lora)})


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    base = tmp_path_factory.mktemp("qwen3")
    model = untied(base / "model")
    new_weights(base / "model", 1).save_pretrained(base / "model")
    # of a rank that vLLM has no room of, so that the next larger is taken
    yield from started_engine(_with_lora(model, r=3, alpha=7.0), base / "run", "wait")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Its output layer is tied to the embeddings, of what vLLM packs in one layer not all have adapters, and two workers
    hold half of it each.
    """
    base = tmp_path_factory.mktemp("llama")
    model, folder = untied(base / "model"), base / "model"
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=True, initializer_range=0.2)
    torch.manual_seed(2)
    LlamaForCausalLM(config).save_pretrained(folder)
    lora = {"r": 8, "rslora": True, "target_modules": ["q_proj", "v_proj", "gate_proj"]}
    yield from started_engine(_with_lora(model, **lora), base / "run", "keep", 2)


@pytest.fixture
async def engine(qwen3: Started) -> AsyncIterator[Engine]:
    async with adopted(qwen3) as engine:
        yield engine


def trained(started: Started, seed: int) -> Any:
    """Return the engine's model with a random adapter, by peft from the engine's settings."""
    lora = started.config.model.lora
    assert lora is not None
    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, use_rslora=lora.rslora, target_modules=lora.target_modules
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(started.folder), settings).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def assert_is_of(model: Any, choice: dict[str, Any], heat: float = 1.0) -> None:
    expected = reference(model, PROMPT, choice["token_ids"], heat)
    torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), expected, atol=CLOSE, rtol=0)


@pytest.fixture(params=["qwen3", "llama"])
def started(request: pytest.FixtureRequest) -> Started:
    chosen: Started = request.getfixturevalue(request.param)
    return chosen


async def test_each_sync_serves_what_peft_computes(started: Started) -> None:
    assert started.first_answer.status_code == 503, "the model without an adapter is no version of the policy"
    async with adopted(started) as engine:
        models = [trained(started, seed) for seed in (11, 12, 13)]
        for step, model in enumerate(models, 11):
            canary = torch.tensor(await engine.sync(model, (2, step)))
            torch.testing.assert_close(canary, reference(model, CANARY[:1], CANARY[1:]), atol=CLOSE, rtol=0)
            for other in models:
                if other is not model:
                    assert (canary - reference(other, CANARY[:1], CANARY[1:])).abs().max() > 0.1
            # the same prompt every time: nothing cached under another adapter may answer it
            for sampling in ({}, {"temperature": 1.5}, {"top_p": 0.7}):
                [choice] = (await engine.complete(prompt=PROMPT, max_tokens=16, seed=1, **sampling))["choices"]
                assert_is_of(model, choice, sampling.get("temperature", 1.0))
                assert choice["weight_versions"] == [[0, 2, step]]
            assert engine.host.snapshot.version == (2, step)


async def test_answers_under_way_keep_the_adapter_that_they_began_with(engine: Engine) -> None:
    for step in range(2, 2 + 2 * TRIES, 2):
        old, new = (trained(engine.started, 20 + step + which) for which in (0, 1))
        await engine.sync(old, (3, step))
        asked = asyncio.create_task(engine.complete(prompt=PROMPT, n=16, max_tokens=LONGEST, temperature=1.5))
        await under_way(engine)
        await engine.sync(new, (3, step + 1))
        was_under_way = not asked.done()
        for choice in (await engine.complete(prompt=PROMPT, n=2, max_tokens=8))["choices"]:
            assert_is_of(new, choice)
            assert choice["weight_versions"] == [[0, 3, step + 1]]
        for choice in (await asked)["choices"]:
            assert_is_of(old, choice, 1.5)
            assert choice["weight_versions"] == [[0, 3, step]]
        if was_under_way:
            return
    raise AssertionError("no request was under way when an adapter came")


class Streamed:
    """Answers that are streamed; ``sampling`` once tokens come."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.sampling = asyncio.Event()
        self.tokens = 0
        self._wrapper = ModelWrapper(engine.host.snapshot.model(), enable_history=True, temperature=1.5, seed=seed)
        self.read = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._wrapper.get_openai_async_client() as client:
            stream: Any = await client.chat.completions.create(
                model=self._wrapper.model_name, messages=MESSAGES, n=3, stream=True, max_tokens=LONGEST
            )
            async for chunk in stream:
                self.tokens += sum(len(choice.token_ids or ()) for choice in chunk.choices)
                if self.tokens:
                    self.sampling.set()
        await self._wrapper.aclose()

    async def assert_is_of(self, model: Any, version: tuple[int, int]) -> None:
        await self.read
        experiences = self._wrapper.extract_experience_from_history()
        assert len(experiences) == 3
        for experience in experiences:
            prompt = experience.tokens[: experience.prompt_length].tolist()
            response = experience.tokens[experience.prompt_length :].tolist()
            assert experience.logprobs is not None
            expected = reference(model, prompt, response, 1.5)
            torch.testing.assert_close(experience.logprobs, expected, atol=CLOSE, rtol=0)
            assert experience.versions == [(0, *version)]


async def test_a_stream_keeps_the_adapter_that_it_began_with(engine: Engine) -> None:
    for step in range(2, 2 + 2 * TRIES, 2):
        old, new = (trained(engine.started, 40 + step + which) for which in (0, 1))
        await engine.sync(old, (4, step))
        stream = Streamed(engine, step)
        await stream.sampling.wait()
        await engine.sync(new, (4, step + 1))
        before = stream.tokens
        await stream.assert_is_of(old, (4, step))
        if stream.tokens > before:
            return
    raise AssertionError("no stream was under way when an adapter came")


async def test_versions_may_come_faster_than_answers_end_and_are_unloaded_when_these_have(engine: Engine) -> None:
    """As many are in use as may be, and newer ones come; those behind wait their turn, the canaries do not."""
    models = {step: trained(engine.started, 60 + step) for step in range(1, 9)}
    asked: list[asyncio.Task[dict[str, Any]]] = []
    most = 0

    async def admitted() -> bool:
        return (await engine.host.refresh()).load >= AT_ONCE * sum(not one.done() for one in asked)

    for step, model in models.items():
        await engine.sync(model, (5, step))
        body = {"prompt": PROMPT, "n": AT_ONCE, "max_tokens": LONGEST, "temperature": 1.5}
        asked.append(asyncio.create_task(engine.complete(**body)))
        await until(admitted)
        most = max(most, len(adapter_folders(engine)))
    for step, one in enumerate(asked, 1):
        for choice in (await one)["choices"]:
            [[start, generation, by]] = choice["weight_versions"]
            assert (start, generation) == (0, 5)
            assert by >= step  # of a newer one, where it had to wait
            assert_is_of(models[by], choice, 1.5)
    assert most > 2, "none was kept for answers under way"
    await engine.sync(models[1], (5, 9))
    [left] = adapter_folders(engine)
    assert left.name.startswith("policy-5.9-")
    assert await served_names(engine) == ["policy", left.name]


async def test_what_is_no_such_adapter_is_refused_and_the_old_one_goes_on_serving(engine: Engine) -> None:
    model = trained(engine.started, 80)
    await engine.sync(model, (6, 1))
    other = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(engine.started.folder), peft.LoraConfig(r=5, target_modules="all-linear")
    )
    await engine.host.pause()
    refusal = pytest.RaisesExc(ReceiveFailed, match=r"shape \[5, \d+\]; with the engine's model.lora.r it is \[3,")
    with pytest.RaisesGroup(refusal) as failed:
        await engine.receive(other, (6, 2))
    [refused] = failed.value.exceptions
    assert not refused.touched
    await engine.host.resume()
    [choice] = (await engine.complete(prompt=PROMPT, max_tokens=8))["choices"]
    assert_is_of(model, choice)
    assert choice["weight_versions"] == [[0, 6, 1]]
    newer = trained(engine.started, 81)
    canary = torch.tensor(await engine.sync(newer, (6, 3)))  # and the next one works
    torch.testing.assert_close(canary, reference(newer, CANARY[:1], CANARY[1:]), atol=CLOSE, rtol=0)


async def test_tensors_of_the_adapter_are_read_back_by_name(engine: Engine) -> None:
    from safetensors.torch import load

    model = trained(engine.started, 82)
    await engine.sync(model, (7, 1))
    name, tensor = next(iter(tensors_of(model).items()))
    assert torch.equal(load(await engine.host.weight(name))[name], tensor)


def _socket(engine: Engine) -> Path:
    ready = ReadyFile.read(engine.host.ready_file)
    assert ready is not None
    [server] = [child for child in psutil.Process(ready.pid).children() if "--uds" in child.cmdline()]
    command = server.cmdline()
    return Path(command[command.index("--uds") + 1])


def adapter_folders(engine: Engine) -> list[Path]:
    return sorted(path for path in _socket(engine).parent.iterdir() if path.is_dir())


async def served_names(engine: Engine) -> list[str]:
    """Return the models that vLLM itself says it serves."""
    import httpx

    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(_socket(engine)))) as client:
        return [model["id"] for model in (await client.get("http://vllm/v1/models")).json()["data"]]
