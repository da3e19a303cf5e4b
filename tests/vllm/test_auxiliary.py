"""An auxiliary model on vLLM: the weights of its folder, split among two workers, in chats and as a teacher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import torch

from trinity_mq.config import Config
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.engines.host.host import EngineHost, auxiliary_hosts

from .conftest import START_SECONDS, new_weights, reference, untied

CLOSE = 1e-4
TOKENS = [3, 7, 2, 9, 4, 11, 5]


@pytest.fixture
async def judge(tmp_path: Path) -> AsyncIterator[EngineHost]:
    folder = tmp_path / "judge"
    model = untied(folder)
    new_weights(folder, 5).save_pretrained(folder)
    server = {"kv_cache_memory_bytes": 32 * 2**20, "start_timeout": START_SECONDS}
    data = {"name": "judge", "engine": "vllm", "tensor_parallel_size": 2, "model": model.model_dump(), "vllm": server}
    policy = {"tiny": {}, "max_model_len": 32, "max_prompt_tokens": 16}
    settings = {"model": policy, "run_dir": str(tmp_path / "run"), "explorer": {"auxiliary_models": [data]}}
    [host] = auxiliary_hosts(Config.model_validate(settings), "explorer-0")
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


async def test_it_chats_scores_and_takes_no_weights(judge: EngineHost) -> None:
    model = new_weights(Path(judge.snapshot.model_path), 5)
    assert (judge.snapshot.name, judge.snapshot.state, judge.snapshot.version) == ("judge", "current", (0, 0))
    async with httpx.AsyncClient(base_url=judge.snapshot.url, timeout=60.0) as client:
        asked = {"messages": [{"role": "user", "content": "2+3?"}], "max_tokens": 8, "seed": 1, "n": 2}
        chat = await client.post("/v1/chat/completions", json={**asked, "return_token_ids": True, "logprobs": True})
        assert chat.status_code == 200, chat.text
        prompt = chat.json()["prompt_token_ids"]
        for choice in chat.json()["choices"]:
            expected = reference(model, prompt, choice["token_ids"])
            seen = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
            torch.testing.assert_close(seen, expected, atol=CLOSE, rtol=0)
        for temperature in (1.0, 0.7):
            scored = await client.post("/v1/logprobs", json={"tokens": TOKENS, "temperature": temperature})
            expected = reference(model, TOKENS[:1], TOKENS[1:], temperature)
            torch.testing.assert_close(torch.tensor(scored.json()["logprobs"]), expected, atol=CLOSE, rtol=0)
    await judge.pause()
    with pytest.raises(ReceiveFailed, match="takes no weights"):
        await judge.receive({"version": [1, 1], "seconds": 1.0})
