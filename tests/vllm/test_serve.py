"""Programs that know only a base URL train a model that vLLM serves: a whole run, and OpenAI's client as it is."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.serve_clients import Agents, check_the_logprobs, until_settled
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]
SESSIONS = 160
START_SECONDS = 300.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


async def test_a_client_trains_what_vllm_serves(tmp_path: Path) -> None:
    [port] = free_ports(1)
    words = (
        "mode=serve",
        f"gateway.port={port}",
        "gateway.batch_wait=1",
        "gateway.not_ready_timeout=300",
        "buffer.batch_size=32",
        "explorer.eval_on_startup=false",
        "explorer.eval_interval=10000",
        "explorer.rollout_model.engine=vllm",
        "explorer.rollout_model.vllm.kv_cache_memory_bytes=67108864",
    )
    async with (
        LocalRun(ROOT / "examples" / "serve.yaml", tmp_path / "run", words) as run,
        aiohttp.ClientSession() as http,
    ):
        agents = Agents(f"http://127.0.0.1:{port}", http)
        async with asyncio.timeout(START_SECONDS):
            assert (await agents.send("GET", "/health"))[0] == 200
            asked = {"messages": [{"role": "user", "content": "3,7,2="}]}
            status, answer = await agents.send("POST", "/v1/chat/completions", asked)  # waits for vLLM to have started
        assert status == 200, answer
        program = ROOT / "examples" / "agents" / "openai_python.py"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(program), "--url", agents.url, "--sessions", str(SESSIONS)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(240):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        status, _ = await agents.send("POST", "/feedback", {"reward": 1.0, "msg_ids": [answer["id"]]})
        assert status == 200
        found = await until_settled(agents, SESSIONS + 1)
        assert found["states"] == {"trained": SESSIONS + 1}
        assert max(step for step, _ in run.values("trainer/step")) >= SESSIONS // 32
        check_the_logprobs(run)
