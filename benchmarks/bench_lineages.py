"""What a long session costs a gateway, against another checkout in the same run.

    python benchmarks/bench_lineages.py [--against CHECKOUT] [--calls 500] [--tokens 200000] [--quick] [--json FILE]

Gateways of this checkout and of ``--against`` (such as ``git worktree add ../before COMMIT``) take turns in front of
one engine, which computes nothing: its tokens follow from the messages. Three measurements:

* a session of so many calls whose last prompt has so many tokens, one call after another, at the engine and at each
  gateway in turn: milliseconds that the gateway adds to a call, its processor time for a call, and the memory that it
  needs for the session;
* a session with two calls of ten sub-agents after each turn: the number of breaks;
* 32 agents with sessions of three short calls: calls a second, and the processor time for a call.

This checkout runs with ``gateway.merge`` ``renderer``, its default, which also sends the tokens of the continued answer
to the engine, and with ``prefix``, the default of the releases before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

HERE = Path(__file__).resolve().parents[1]
AGENTS = 32
CHARACTERS = 4
"""Characters of a token."""
SERVE = "--serve"
"""Option of the gateway's own process; its values are the URL of the engine and ``gateway.merge``."""


# -- the engine


class Engine:
    """Answers chats with tokens that follow from the messages, and with as many tokens as the last message has."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def _of(self, text: str) -> list[int]:
        if text not in self._tokens:
            base = 1 + hash(text) % 100_000
            self._tokens[text] = [base + place % 977 for place in range(max(1, len(text) // CHARACTERS))]
        return self._tokens[text]

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a chat."""
        body = json.loads(await request.read())
        texts = [message["content"] for message in body["messages"]]
        ids = self._of(f"answer {len(texts)} to {texts[0]} {texts[-1]}")
        content = f"{ids[0]:08d}" * (len(ids) * CHARACTERS // 8)
        self._tokens.setdefault(content, ids)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": content},
            "token_ids": ids,
            "token_logprobs": [-0.5] * len(ids),
            "finish_reason": "stop",
        }
        prompt = [token for text in texts for token in self._of(text)]
        # the text, as the template of a model without marks would write it
        return web.json_response(
            {"choices": [choice], "prompt_token_ids": prompt, "prompt_text": "".join(texts), "weight_version": [1, 0]}
        )


@contextlib.asynccontextmanager
async def serving(application: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve an application on loopback; yield its URL."""
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{site.port}"
    finally:
        await runner.cleanup()


# -- the gateway, in a process with the code of its checkout


async def serve_gateway(engine: str, merge: str) -> None:
    """Serve a gateway with a store in memory until the standard input ends."""
    from trinity_mq.config import Config
    from trinity_mq.gateway.access import Access
    from trinity_mq.gateway.app import GatewayApp
    from trinity_mq.gateway.engines import EngineCalls
    from trinity_mq.gateway.session_store import MemorySessionStore
    from trinity_mq.gateway.settings import AppSettings
    from trinity_mq.models.clients import EngineClients
    from trinity_mq.models.inference import InferenceModel

    class OneEngine:
        def __call__(self, prefer: str = "") -> InferenceModel:
            return model

        def lost(self, engine: InferenceModel) -> None:
            raise RuntimeError(f"{engine.url} is lost")

    model = InferenceModel("e0", engine, "none", version=(1, 0))
    algorithm = {"repeat_times": 1, "estimator": {"kind": "group", "baseline": "none", "scale": "none"}}
    limits = {"calls_per_minute": 10**9, "max_calls": 10**6, "merge": merge}
    content = {"name": "b", "mode": "serve", "model": {"tiny": {}}, "algorithm": algorithm, "gateway": limits}
    settings = AppSettings.of(Config.model_validate(content))
    async with EngineClients() as clients:
        calls = EngineCalls(OneEngine(), clients, not_ready_timeout=1.0, request_timeout=60.0)
        app = GatewayApp(settings, MemorySessionStore(), calls, Access(None), lambda: "")
        async with serving(app.application()) as url:
            print(url, flush=True)
            await asyncio.to_thread(sys.stdin.read)


@dataclass
class Gateway:
    """A running gateway of a checkout, and what was measured of it."""

    name: str
    url: str
    process: psutil.Process
    seen: dict[str, list[float]] = field(default_factory=dict)

    def note(self, what: str, value: float) -> None:
        """Keep a measured value."""
        self.seen.setdefault(what, []).append(value)

    def median(self, what: str) -> float:
        """Return the median of what was measured."""
        return statistics.median(self.seen[what])

    @property
    def seconds(self) -> float:
        """Processor seconds so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.asynccontextmanager
async def gateway_of(name: str, checkout: Path, merge: str, engine: str) -> AsyncIterator[Gateway]:
    """Start a gateway with the code of a checkout."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'agents'}"}
    command = [sys.executable, str(Path(__file__).resolve()), SERVE, engine, merge]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment, cwd=checkout)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = await process.stdout.readline()
        yield Gateway(name, url.decode().strip(), psutil.Process(process.pid))
    finally:
        process.stdin.close()
        await process.wait()


# -- the agents


class Agent:
    """A conversation with a URL."""

    def __init__(self, http: aiohttp.ClientSession, url: str, name: str) -> None:
        self.http, self.url = http, f"{url}/v1/chat/completions"
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": name}]

    async def ask(self, text: str) -> float:
        """Ask, keep the answer, and return the milliseconds of the call."""
        self.messages.append({"role": "user", "content": text})
        began = time.perf_counter()
        async with self.http.post(self.url, json={"messages": self.messages}) as response:
            response.raise_for_status()
            answer = await response.json()
        took = time.perf_counter() - began
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        return took * 1000


async def opened(http: aiohttp.ClientSession, gateway: Gateway) -> str:
    """Open a session and return its URL."""
    async with http.post(f"{gateway.url}/sessions", json={}) as response:
        response.raise_for_status()
        return f"{gateway.url}/s/{(await response.json())['id']}"


async def long_sessions(
    http: aiohttp.ClientSession, urls: Sequence[str], calls: int, tokens: int, name: str
) -> list[list[float]]:
    """Hold the same conversation with each URL, in turns; return the milliseconds of the calls of each."""
    agents, text = [Agent(http, url, name) for url in urls], "x" * (tokens * CHARACTERS // (2 * calls))
    times: list[list[float]] = [[] for _ in agents]
    for number in range(calls):
        for agent, agent_times in zip(agents, times, strict=True):
            agent_times.append(await agent.ask(f"{number:06d}{text}"))
    return times


async def with_sub_agents(http: aiohttp.ClientSession, url: str, calls: int) -> int:
    """Ask with sub-agents in between; return the number of breaks."""
    parent = Agent(http, url, "lead")
    for turn in range(max(2, calls // 50)):
        await parent.ask(f"turn {turn}")
        for number in range(10):
            helper = Agent(http, url, f"help {turn} {number}")
            await helper.ask("part")
            await helper.ask("is that all?")
    async with http.get(url) as response:
        shown = await response.json()
    # a sub-agent's first call begins a lineage; earlier releases count it as a break too
    return len(shown["breaks"])


async def short_sessions(http: aiohttp.ClientSession, gateway: Gateway, seconds: float) -> tuple[float, int]:
    """Return the calls a second of many agents, and the number of calls."""
    until, calls = time.perf_counter() + seconds, 0

    async def work(number: int) -> None:
        nonlocal calls
        while time.perf_counter() < until:
            agent = Agent(http, await opened(http, gateway), f"agent {number}")
            for text in ("one", "two", "three"):
                await agent.ask(text)
                calls += 1

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            group.create_task(work(number))
    return calls / (time.perf_counter() - began), calls


async def measure(
    http: aiohttp.ClientSession, engine: str, gateways: Sequence[Gateway], options: argparse.Namespace
) -> None:
    """Let the gateways take turns."""
    for number in range(-1, options.rounds):
        urls = [await opened(http, gateway) for gateway in gateways]
        before = [(gateway.seconds, gateway.process.memory_info().rss) for gateway in gateways]
        calls, tokens = (options.calls, options.tokens) if number >= 0 else (3, 100)
        direct, *times = await long_sessions(http, [engine, *urls], calls, tokens, f"agent {number}")
        if number < 0:
            continue  # a warm-up
        for gateway, through, (seconds, memory) in zip(gateways, times, before, strict=True):
            added = [slow - fast for slow, fast in zip(through, direct, strict=True)]
            gateway.note("ms added to a call", statistics.median(added))
            gateway.note("ms added to the last tenth", statistics.median(added[-(-len(added) // 10) :]))
            gateway.note("processor ms of a call", 1000 * (gateway.seconds - seconds) / calls)
            gateway.note("MiB of the session", (gateway.process.memory_info().rss - memory) / 2**20)
        for gateway in gateways:
            breaks = await with_sub_agents(http, await opened(http, gateway), options.calls)
            gateway.note("breaks with sub-agents", breaks)
        for gateway in gateways:
            seconds = gateway.seconds
            rate, calls = await short_sessions(http, gateway, options.seconds)
            gateway.note("short calls a second", rate)
            gateway.note("processor ms of a short call", 1000 * (gateway.seconds - seconds) / calls)


async def main(options: argparse.Namespace) -> dict[str, float]:
    """Measure and print; return ratios of this checkout to the other one."""
    engine = Engine()
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/chat/completions", engine.answer)
    rows = [("now", HERE, "renderer"), ("prefix", HERE, "prefix")]
    if options.against:
        rows.append(("before", options.against.resolve(), "prefix"))
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(application))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        gateways = [await stack.enter_async_context(gateway_of(*row, url)) for row in rows]
        await measure(http, url, gateways, options)
    now, prefix, *others = gateways
    ratios: dict[str, float] = {}
    for what in now.seen:
        print(f"{what:30}" + "".join(f"   {gateway.name} {gateway.median(what):9.2f}" for gateway in gateways))
        for other in others:
            if other.median(what) > 0:
                ratios |= {
                    f"{gateway.name}: {what}, of before": gateway.median(what) / other.median(what)
                    for gateway in (now, prefix)
                }
    return ratios


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        asyncio.run(serve_gateway(sys.argv[2], sys.argv[3]))
        sys.exit()
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to compare with")
    parser.add_argument("--calls", type=int, default=500, help="of the long session (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200_000, help="of the long session (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the short sessions (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    figures.add_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.calls, options.tokens, options.seconds, options.rounds = 20, 2000, 0.5, 1
    figures.write(options, asyncio.run(main(options)))
