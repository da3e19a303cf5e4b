"""Real vLLM engines on tiny models, started once each; every test adopts them as a restarted host would."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]

import httpx  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.unit.models.talker import talker_config, taught  # noqa: E402
from tests.unit.sync.weights import manifest_of  # noqa: E402
from trinity_mq.config import Config, ModelConfig  # noqa: E402
from trinity_mq.engines.host.host import EngineHost  # noqa: E402
from trinity_mq.engines.host.ready_file import ReadyFile  # noqa: E402
from trinity_mq.engines.torch.generator import TextGenerator  # noqa: E402
from trinity_mq.engines.torch.weights import named_weights  # noqa: E402
from trinity_mq.messages import Version  # noqa: E402
from trinity_mq.models import ensure_model_folder  # noqa: E402
from trinity_mq.sync.channels.collective.broadcast import Sender  # noqa: E402

START_SECONDS = 600.0
"""Three processes import vLLM one after the other: half a minute where nothing else runs, minutes where much does."""
CANARY = [3, 7, 2, 9, 4, 11, 5]
MARK = "TRINITY_MQ_TEST_SESSION"
"""In the environment of every process that these tests start, and of those that they start."""
LEAVE_SECONDS = 20.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.vllm)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(START_SECONDS + 60))
    # whole runs first: beside the engines of the others they would have to share the machine
    places = [number for number, item in enumerate(items) if item in ours]
    for number, item in zip(places, sorted(ours, key=lambda item: not item.get_closest_marker("e2e")), strict=True):
        items[number] = item


@dataclass
class Started:
    """An engine that runs, and what it said before it had weights."""

    config: Config
    folder: Path
    first_answer: httpx.Response


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the tests no process lives that they have started."""
    os.environ[MARK] = secrets.token_hex(8)
    yield
    base = tmp_path_factory.getbasetemp()
    _, left = psutil.wait_procs([one for one in psutil.process_iter() if _is_ours(one, base)], LEAVE_SECONDS)
    assert not left, f"processes of these tests live on: {left}"


def _is_ours(process: psutil.Process, base: Path) -> bool:
    try:
        if process.name().startswith("VLLM"):  # which it wrote over its environment; its output stays
            return any(base in Path(opened.path).parents for opened in process.open_files())
        return process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:  # gone, or another user's
        return False


def untied(folder: Path) -> ModelConfig:
    """Make the folder of a tiny model, the one that can be taught to call tools."""
    config = talker_config()
    ensure_model_folder(config, folder, 0)
    return config.model_copy(update={"tiny": None, "model_path": str(folder)})


def _tied(folder: Path) -> ModelConfig:
    """The same model with its output layer tied to the embeddings."""
    config = untied(folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": True}))
    new_weights(folder, 0).save_pretrained(folder)
    return config


def new_weights(folder: Path, seed: int) -> Any:
    """Return the Hugging Face model of ``folder`` with other random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.2  # sharp enough for weights to make a difference
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def started_engine(model: ModelConfig, run_dir: Path, mode: str, size: int = 1) -> Iterator[Started]:
    rollout = {"engine": "vllm", "lease": 3600.0, "max_batch_sequences": 64, "tensor_parallel_size": size}
    rollout["vllm"] = {"kv_cache_memory_bytes": 32 * 2**20, "start_timeout": START_SECONDS}
    data = {"model": model.model_dump(), "run_dir": str(run_dir), "explorer": {"rollout_model": rollout}}
    config = Config.model_validate({**data, "synchronizer": {"pause_mode": mode}})

    async def start() -> httpx.Response:
        host = EngineHost(config, run_dir, "e0")
        await host.start()
        try:
            async with httpx.AsyncClient(base_url=host.snapshot.url) as client:
                return await client.post("/v1/completions", json={"prompt": [3, 4]})
        finally:
            await host.detach()

    async def stop() -> None:
        host = EngineHost(config, run_dir, "e0")
        ready = ReadyFile.read(host.ready_file)
        if ready is not None and ready.lives():  # a test may have killed it
            await host.start()
            await host.stop()

    answer = asyncio.run(start())
    try:
        yield Started(config, Path(str(model.model_path)), answer)
    finally:
        asyncio.run(stop())


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> TextGenerator:
    """The same model, taught to call a tool."""
    return taught(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture(scope="session")
def waiting_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    base = tmp_path_factory.mktemp("untied")
    yield from started_engine(untied(base / "model"), base / "run", "wait")


@pytest.fixture(scope="session")
def split_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """An engine of two workers that hold half of the model each."""
    base = tmp_path_factory.mktemp("split")
    yield from started_engine(untied(base / "model"), base / "run", "keep", 2)


@pytest.fixture(scope="session")
def keeping_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    base = tmp_path_factory.mktemp("tied")
    yield from started_engine(_tied(base / "model"), base / "run", "keep")


@pytest.fixture(scope="session")
def aborting_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    base = tmp_path_factory.mktemp("aborting")
    yield from started_engine(untied(base / "model"), base / "run", "abort")


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return what a sync of ``model`` sends: its weights, or its adapter where peft has put one on it."""
    if not hasattr(model, "peft_config"):
        return named_weights(model)
    from peft import get_peft_model_state_dict

    adapter: dict[str, Tensor] = get_peft_model_state_dict(model)
    return adapter


class Engine:
    """An adopted engine, and the trainer's side of its weight sync."""

    def __init__(self, started: Started, host: EngineHost) -> None:
        self.started, self.host, self.url = started, host, host.snapshot.url
        self.version: Version = (1, 0)
        self.sender = Sender("127.0.0.1", 2**16, 30.0)
        self.epoch = 0

    def spec(self, model: Any, version: Version, rendezvous: dict[str, Any], seconds: float = 30.0) -> dict[str, Any]:
        return {
            **rendezvous,
            "version": list(version),
            "epoch": self.epoch,
            "attempt": 1,
            "rank": 1,
            "world": 1 + self.started.config.engine_ranks,
            "seconds": seconds,
            "manifest": manifest_of(tensors_of(model).items()),
            "canary": {"tokens": CANARY},
        }

    async def receive(self, model: Any, version: Version) -> list[float]:
        """Send the weights of ``model`` to the paused engine; returns the canary's logprobs."""
        self.epoch += 1
        spec = self.spec(model, version, await self.sender.rendezvous())
        tensors = list(tensors_of(model).items())
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(self.host.receive(spec))
            group.create_task(self.sender.broadcast(tensors, spec["manifest"], self.epoch, 1, spec["world"]))
        logprobs: list[float] = receiving.result()["logprobs"]
        return logprobs

    async def sync(self, model: Any, version: Version) -> list[float]:
        """Pause, send, commit; returns the canary's logprobs."""
        await self.host.pause()
        logprobs = await self.receive(model, version)
        await self.host.commit(version, version[1])
        self.version = version
        return logprobs

    async def complete(self, **body: Any) -> dict[str, Any]:
        """Return the answer to a completion request with token ids."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60.0) as client:
            response = await client.post("/v1/completions", json={"return_token_ids": True, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@contextlib.asynccontextmanager
async def adopted(started: Started) -> AsyncIterator[Engine]:
    host = EngineHost(started.config, started.config.path, "e0")
    await host.start()
    try:
        yield Engine(started, host)
    finally:
        await host.detach()


@pytest.fixture
async def waiting(waiting_engine: Started) -> AsyncIterator[Engine]:
    async with adopted(waiting_engine) as engine:
        yield engine


@pytest.fixture
async def keeping(keeping_engine: Started) -> AsyncIterator[Engine]:
    async with adopted(keeping_engine) as engine:
        yield engine


@pytest.fixture
async def aborting(aborting_engine: Started) -> AsyncIterator[Engine]:
    async with adopted(aborting_engine) as engine:
        yield engine


def reference(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the logprobs of a response by one plain forward pass of the Hugging Face model."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]


__all__ = ["CANARY", "Engine", "Started", "adopted", "new_weights", "reference", "started_engine", "untied"]
