"""Programs that know only a base URL train a model: the examples as they are, each with its own client."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.serve_clients import Agents, check_the_logprobs, until_settled
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "agents"
SESSIONS = 160

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(300)]


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[LocalRun, Agents]]:
    [port] = free_ports(1)
    words = (
        "mode=serve",
        f"gateway.port={port}",
        "gateway.batch_wait=1",
        "buffer.batch_size=32",
        "explorer.eval_on_startup=false",
        "explorer.eval_interval=10000",
    )
    async with (
        LocalRun(ROOT / "examples" / "serve.yaml", folder / "run", words) as run,
        aiohttp.ClientSession() as http,
    ):
        agents = Agents(f"http://127.0.0.1:{port}", http)
        async with asyncio.timeout(60):
            assert (await agents.send("GET", "/health"))[0] == 200
        yield run, agents


async def program(name: str, folder: Path) -> list[str]:
    """Return the command of an example, whose client is installed where that takes a moment."""
    path = PROGRAMS / name
    if path.suffix == ".py":
        return [sys.executable, str(path)]
    if path.suffix == ".sh":
        return [str(path)]
    tool = shutil.which("go" if path.suffix == ".go" else "node")
    if tool is None:
        pytest.skip(f"{path.suffix} programs need {'Go' if path.suffix == '.go' else 'Node'}")
    if path.suffix == ".go":
        built = folder / "agent"
        await done(tool, "build", "-o", str(built), str(path))
        return [str(built)]
    copy = shutil.copy(path, folder)
    await done("npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "openai")
    return [tool, str(copy)]


async def done(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(240):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize(
    "name",
    [
        "openai_python.py",
        pytest.param("anthropic_python.py", marks=pytest.mark.extended),
        pytest.param("agents_sdk.py", marks=pytest.mark.extended),
        pytest.param("openai_node.mjs", marks=pytest.mark.extended),
        pytest.param("agent.go", marks=pytest.mark.extended),
        pytest.param("curl.sh", marks=pytest.mark.extended),
    ],
)
async def test_an_unmodified_client_trains(tmp_path: Path, name: str) -> None:
    async with served(tmp_path) as (run, agents):
        words = await program(name, tmp_path)
        await done(*words, "--url", agents.url, "--sessions", str(SESSIONS))
        found = await until_settled(agents, SESSIONS)
        assert found["states"] == {"trained": SESSIONS}
        assert found["counts"]["calls"] == SESSIONS
        steps = [step for step, _ in run.values("trainer/step")]
        assert max(steps) >= SESSIONS // 32
        check_the_logprobs(run)
