"""A real tiny model, made once, and a real server around it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.unit.models.talker import taught
from trinity_mq.config import Config, ModelConfig, TinyModelConfig
from trinity_mq.engines.host.admin_client import EngineAdmin
from trinity_mq.engines.server.server import EngineServer, ServerSettings
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.models.clients import EngineClients
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.model_folder import ensure_model_folder

TOKEN = "secret"
VERSION = (1, 7)


@pytest.fixture(scope="session")
def model_config() -> ModelConfig:
    return ModelConfig(tiny=TinyModelConfig(), max_model_len=64, max_prompt_tokens=32, max_response_tokens=16)


@pytest.fixture(scope="session")
def folder(model_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model_folder(model_config, tmp_path_factory.mktemp("tiny") / "model", 0)


@pytest.fixture
def config(model_config: ModelConfig, tmp_path: Path) -> Config:
    rollout = {"lease": 20.0, "num_threads": 1}
    data = {"model": model_config.model_dump(), "run_dir": str(tmp_path), "explorer": {"rollout_model": rollout}}
    return Config.model_validate(data)


@pytest.fixture(scope="session")
def shared_generator(model_config: ModelConfig, folder: Path) -> TextGenerator:
    """For tests that leave the weights alone."""
    return built(model_config, folder)


@pytest.fixture
def generator(model_config: ModelConfig, folder: Path) -> TextGenerator:
    return built(model_config, folder)


def built(model_config: ModelConfig, folder: Path) -> TextGenerator:
    """Return a generator with the same weights in every run: those it is built with are random otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TextGenerator.build(model_config, folder, num_threads=1)


@pytest.fixture(scope="session")
def plain_logprobs() -> Callable[..., torch.Tensor]:
    """The reference: one unpadded forward pass over the whole sequence."""
    return _plain_logprobs


def _plain_logprobs(
    generator: TextGenerator, prompt: list[int], response: list[int], temperature: float
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = generator.model(ids).logits[0].float() / (temperature or 1.0)
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.fixture
def serving() -> Callable[..., Any]:
    """``async with serving(generator, receiver, version=None, **settings) as server``: a server on loopback."""
    return engine_server


@contextlib.asynccontextmanager
async def engine_server(
    generator: Any, receiver: Any = None, *, version: tuple[int, int] | None = VERSION, **settings: Any
) -> AsyncIterator[EngineServer]:
    chosen = replace(
        ServerSettings(
            engine_id="e0", model_name="tiny", model_path="/models/tiny", token=TOKEN, max_response_tokens=16
        ),
        **settings,
    )
    server = EngineServer(generator, chosen, receiver)
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(lambda url: ready.set()))
        await ready.wait()
        if version is not None:
            server.state.phase, server.state.version = "current", version
        try:
            yield server
        finally:
            server.stop("test is over")


@pytest.fixture
async def clients() -> AsyncIterator[EngineClients]:
    async with EngineClients() as clients:
        yield clients


@pytest.fixture
async def admin_of() -> AsyncIterator[Callable[[EngineServer], EngineAdmin]]:
    async with aiohttp.ClientSession() as session:
        yield lambda server: EngineAdmin(session, server.url, TOKEN)


@pytest.fixture
def handle_of() -> Callable[[EngineServer], InferenceModel]:
    """What a runner would be given."""
    return lambda server: InferenceModel("e0", server.url, "tiny", "/models/tiny", VERSION)


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> TextGenerator:
    """A tiny model that was taught to call a tool; see talker.py."""
    return taught(tmp_path_factory.mktemp("talker") / "model")
