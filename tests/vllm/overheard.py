"""Our API before a real vLLM, in the test's own process: what passes between the two is overheard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.processes import descendants
from trinity_mq.engines.generation.request import Completion
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.engines.server.server import EngineServer, ServerSettings
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.client import VllmClient
from trinity_mq.engines.vllm.flow import VllmBatcher
from trinity_mq.engines.vllm.generator import model_limits
from trinity_mq.messages import Version

from .conftest import Started


class Overheard(VllmClient):
    """The client of vLLM, which keeps what vLLM says it has sampled, as it says it."""

    def __init__(self, socket: Path, codec: TextCodec) -> None:
        super().__init__(socket)
        self._codec = codec
        self.sampled: list[Completion] = []
        self.prompts: list[list[int]] = []

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        answer = await super().post(path, body, **query)
        if path == api.GENERATE and body is not None:
            self._keep(body, answer["choices"])
        return answer

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        parts: list[dict[str, Any]] = []
        try:
            async with contextlib.aclosing(super().events(path, body)) as events:
                async for event in events:
                    parts += event["choices"]
                    yield event
        finally:
            self._keep(body, parts)

    def _keep(self, body: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
        sampling = body["sampling_params"]
        for index in range(sampling["n"]):
            tokens: list[int] = []
            logprobs: list[float] = []
            ended = None
            for part in parts:
                if part["index"] == index:
                    tokens += part["token_ids"]
                    logprobs += [entry["logprob"] for entry in part["logprobs"]["content"]]
                    ended = part["finish_reason"] or ended
            shown = tokens[:-1] if tokens and tokens[-1] in sampling["stop_token_ids"] else tokens
            [text] = self._codec.decode([shown])
            self.sampled.append(Completion(tokens, logprobs, text, "stop" if ended == "stop" else "length"))
            self.prompts.append(list(body["token_ids"]))


@contextlib.asynccontextmanager
async def serving(started: Started, version: Version) -> AsyncIterator[tuple[EngineServer, Overheard]]:
    """Serve the vLLM of ``started``, whose weights are of ``version``, a second time."""
    codec = TextCodec.load(started.folder)
    vocabulary, max_model_len = model_limits(started.config.model, started.folder)
    generator = SimpleNamespace(codec=codec, vocabulary=vocabulary, max_model_len=max_model_len)
    settings = ServerSettings(
        engine_id="e0", model_name="tiny", model_path=str(started.folder), token="secret", max_response_tokens=120
    )
    heard = Overheard(_socket(started), codec)

    def flow(state: EngineState) -> VllmBatcher:
        return VllmBatcher(heard, state, codec, max_sequences=64)

    async def no_weights(spec: Mapping[str, Any]) -> Mapping[str, Any]:
        raise AssertionError("weights come through the engine's own process")

    async with heard, asyncio.TaskGroup() as group:
        server = EngineServer(generator, settings, no_weights, flow)
        ready = asyncio.Event()
        group.create_task(server.run(lambda url: ready.set()))
        await ready.wait()
        server.state.phase, server.state.version = "current", version
        try:
            yield server, heard
        finally:
            server.stop("test is over")


def _socket(started: Started) -> Path:
    """Where vLLM listens: its command line says so."""
    ready = ReadyFile.read(started.config.path / "engines" / "e0.ready.json")
    assert ready is not None
    for _, words in descendants(ready.pid):
        if "--uds" in words:
            return Path(words[words.index("--uds") + 1])
    raise AssertionError("no vLLM runs below the engine")
