"""Measures what the gateway adds to a call, asking the engine directly and through a session, in one run that trains.

    python benchmarks/bench_gateway.py [--sessions 200] [--seconds 10] [--rounds 3] [--quick] [--json FILE]

It starts ``examples/serve.yaml`` (a real RabbitMQ, engine, trainer and gateway). In each round one agent alone, then
all of them, ask the engine and then the gateway for so many seconds. The sessions of a round end with a reward, so that
the trainer works and the weights change while the next ones ask. Any call that fails ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from trinity_mq.local_broker.ports import free_ports
from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[1] / "examples" / "serve.yaml"
HEADERS = {"X-TMQ-Logprobs": "numbers"}
FOR_TRAINING = {"return_token_ids": True, "return_prompt_text": True, "logprobs": True, "max_tokens": 3}
WARM_UP = 20

Ask = Callable[[str], Awaitable[None]]


def body(draw: random.Random) -> dict[str, Any]:
    digits = ",".join(str(draw.randrange(10)) for _ in range(3))
    return {"messages": [{"role": "user", "content": f"{digits}="}]}


async def measured(ask: Ask, names: list[str], seconds: float) -> list[float]:
    """Return the milliseconds of each call while all ``names`` ask one call after another."""
    times: list[float] = []
    until = time.perf_counter() + seconds

    async def one(name: str) -> None:
        while (began := time.perf_counter()) < until:
            await ask(name)
            times.append(1000 * (time.perf_counter() - began))

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))
    return times


def line(what: str, times: list[float], seconds: float) -> str:
    cuts = statistics.quantiles(times, n=100)
    return (
        f"{what:34} {len(times) / seconds:7.0f} calls/s   median {statistics.median(times):7.2f} ms   "
        f"p99 {cuts[98]:7.1f} ms   max {max(times):7.1f} ms"
    )


class Bench:
    def __init__(self, http: aiohttp.ClientSession, gateway: str, engine: str) -> None:
        self.http, self.gateway, self.engine = http, gateway, engine
        self.draw = random.Random(0)
        self.answers = self.unrecorded = 0

    async def direct(self, _: str) -> None:
        url = f"{self.engine}/v1/chat/completions"
        async with self.http.post(url, json={**body(self.draw), **FOR_TRAINING}, headers=HEADERS) as response:
            response.raise_for_status()
            await response.read()

    async def through(self, session: str) -> None:
        url = f"{self.gateway}/s/{session}/v1/chat/completions"
        async with self.http.post(url, json=body(self.draw)) as response:
            response.raise_for_status()
            self.answers += 1
            self.unrecorded += response.headers["X-TMQ-Recorded"] != "yes"
            await response.read()

    async def open(self, count: int) -> list[str]:
        async def one() -> str:
            async with self.http.post(f"{self.gateway}/sessions", json={}) as response:
                response.raise_for_status()
                return str((await response.json())["id"])

        return list(await asyncio.gather(*(one() for _ in range(count))))

    async def end(self, sessions: list[str]) -> None:
        async def one(name: str) -> None:
            async with self.http.post(f"{self.gateway}/s/{name}/end", json={"reward": self.draw.random()}) as response:
                response.raise_for_status()

        await asyncio.gather(*map(one, sessions))


async def main(sessions: int, seconds: float, rounds: int) -> dict[str, float]:
    """Measure and print; return medians over the rounds: the gateway's calls a second by those of the engine itself."""
    shares: dict[str, list[float]] = {"one agent": [], "many agents": []}
    [port] = free_ports(1)
    words = [
        "mode=serve",
        f"gateway.port={port}",
        "gateway.batch_wait=1",
        "gateway.calls_per_minute=1000000",
        "gateway.max_calls=1000000",
        "explorer.eval_on_startup=false",
        "buffer.batch_size=64",
    ]
    with tempfile.TemporaryDirectory() as folder:
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            LocalRun(EXAMPLE, Path(folder) / "run", words) as run,
            aiohttp.ClientSession(connector=connector) as http,
        ):
            gateway = f"http://127.0.0.1:{port}"
            await run.until(lambda: any((run.run_dir / "engines").glob("*.ready.json")), 60.0)
            while True:
                try:
                    async with http.get(f"{gateway}/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    pass  # it does not listen yet
                await asyncio.sleep(0.2)
            [ready] = (run.run_dir / "engines").glob("*.ready.json")
            bench = Bench(http, gateway, json.loads(ready.read_text())["url"])
            for number in range(rounds):
                names = await bench.open(sessions)
                one = names[:1]
                for ask in (bench.through, bench.direct):  # the gateway waits until the engine has weights
                    for _ in range(WARM_UP):
                        await ask(one[0])
                alone = [await measured(ask, one, seconds / 2) for ask in (bench.direct, bench.through)]
                many = [await measured(ask, names, seconds) for ask in (bench.direct, bench.through)]
                print(f"round {number + 1}")
                for what, took, pair in (("1 agent", seconds / 2, alone), (f"{sessions} agents", seconds, many)):
                    for how, times in zip(("engine", "gateway"), pair, strict=True):
                        print(line(f"  {what}, {how}", times, took))
                added = statistics.median(alone[1]) - statistics.median(alone[0])
                share = len(many[0]) / len(many[1])
                shares["one agent"].append(statistics.median(alone[0]) / statistics.median(alone[1]))
                shares["many agents"].append(1 / share)
                print(
                    f"  the gateway adds {added:.2f} ms to a call alone; {sessions} agents: 1/{share:.2f} of the calls"
                )
                await bench.end(names)
            steps = [step for step, _ in run.values("trainer/step")]
            said = f"{bench.answers} answers through the gateway, {bench.unrecorded} not recorded"
            print(f"{said}; {max(steps, default=0)} train steps meanwhile")
    return {f"{name}: calls a second, of the engine's": statistics.median(found) for name, found in shares.items()}


if __name__ == "__main__":
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200, help="agents at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round of few sessions: does it run?")
    figures.add_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.seconds, options.rounds = 8, 1.0, 1
    figures.write(options, asyncio.run(main(options.sessions, options.seconds, options.rounds)))
