"""Agents for tests of whole runs in mode serve: sessions over HTTP that go on whatever dies behind the gateway."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from trinity_mq.local_broker.ports import free_ports
from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[1] / "examples" / "serve.yaml"
SESSIONS = 160
"""Sessions of an example program."""
AGAIN = 0.25
"""Seconds until a request that found nobody is sent again."""
PASSING = {502, 503, 429}
SETTLED = {"trained", "dropped", "evaluated"}


@dataclass
class Told:
    """A session as its agent knows it."""

    id: str
    answered: bool = False
    rewarded: bool = False


@dataclass
class Agents:
    """Agents that hold sessions at the same time, each as an agent of its own would."""

    url: str
    http: aiohttp.ClientSession
    seed: int = 0
    sessions: list[Told] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Requests that found nobody, by status or error."""

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and answer; what finds nobody is sent again."""
        while True:
            try:
                async with self.http.request(method, self.url + path, json=body) as response:
                    if response.status not in PASSING:
                        return response.status, await response.json()
                    self.failures[str(response.status)] += 1
            except (aiohttp.ClientError, OSError) as error:
                self.failures[type(error).__name__] += 1
            await asyncio.sleep(AGAIN)

    async def session(self, draw: random.Random) -> Told:
        """Hold one session: a question, sometimes two, and rewards before or after its end, late, or twice."""
        _, made = await self.send("POST", "/sessions", {})
        told = Told(made["id"])
        self.sessions.append(told)
        path = f"/s/{told.id}"
        digits = [str(draw.randrange(10)) for _ in range(3)]
        said = ""
        for _ in range(draw.choice([1, 1, 2])):
            body = {"messages": [{"role": "user", "content": f"{','.join(digits)}="}]}
            status, answer = await self.send("POST", f"{path}/v1/chat/completions", body)
            assert status == 200, answer
            told.answered = True
            said = answer["choices"][0]["message"]["content"] or ""
        worth = 1.0 if said == max(digits) else 0.4 * said.startswith(max(digits))
        way = draw.choice(["with the end", "before", "late", "twice"])
        if way in {"before", "twice"}:
            for _ in range(2 if way == "twice" else 1):
                await self.send("POST", f"{path}/reward", {"reward": worth, "key": "judge"})
        await self.send("POST", f"{path}/end", {"reward": worth} if way == "with the end" else {})
        if way == "late":
            await asyncio.sleep(draw.uniform(0.5, 3.0))
            await self.send("POST", f"{path}/reward", {"reward": worth})
        told.rewarded = True
        return told

    async def work(self, at_once: int, stop: asyncio.Event) -> None:
        """Hold sessions, so many at once, until ``stop``; those that have begun are held to their end."""

        async def one(number: int) -> None:
            draw = random.Random(1000 * self.seed + number)
            while not stop.is_set():
                await self.session(draw)

        async with asyncio.TaskGroup() as group:
            for number in range(at_once):
                group.create_task(one(number))

    async def states(self) -> dict[str, dict[str, Any]]:
        """Return what ``GET`` tells of each session."""
        found: dict[str, dict[str, Any]] = {}
        for told in self.sessions:
            status, shown = await self.send("GET", f"/s/{told.id}")
            assert status == 200, shown
            found[told.id] = shown
        return found


async def until_settled(agents: Agents, sessions: int, seconds: float = 120.0) -> dict[str, Any]:
    """Return what the gateway says of all sessions once that many are settled and no other is open.

    A gateway that is killed after it has opened a session, and before it answers, leaves one that no agent knows; it
    ends by its ``idle_ttl``. Where ``agents`` kept count of their sessions, it is not waited for.
    """
    async with asyncio.timeout(seconds):
        while True:
            _, found = await agents.send("GET", "/sessions")
            settled = sum(count for state, count in found["states"].items() if state in SETTLED)
            if settled == sum(found["states"].values()) >= sessions:
                return dict(found)
            if settled >= sessions and agents.sessions:
                own = await agents.states()
                if all(shown["state"] in SETTLED for shown in own.values()):
                    return dict(found)
            await asyncio.sleep(AGAIN)


@asynccontextmanager
async def served(folder: Path, *settings: str, seconds: float = 60.0) -> AsyncIterator[tuple[LocalRun, Agents]]:
    """A run in mode serve whose gateway answers within so many seconds."""
    [port] = free_ports(1)
    words = (
        "mode=serve",
        f"gateway.port={port}",
        "gateway.batch_wait=1",
        "buffer.batch_size=32",
        "trainer.save_interval=4",
        "explorer.eval_on_startup=false",
        "explorer.eval_interval=10000",
        *settings,
    )
    async with LocalRun(EXAMPLE, folder / "run", words) as run, aiohttp.ClientSession() as http:
        agents = Agents(f"http://127.0.0.1:{port}", http)
        async with asyncio.timeout(seconds):
            assert (await agents.send("GET", "/health"))[0] == 200
        yield run, agents


async def done(*words: str) -> str:
    """Return what a command says that succeeds."""
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(240):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def train_by_program(words: Sequence[str], run: LocalRun, agents: Agents, earlier: int = 0) -> None:
    """Let an example program hold its sessions, and check that they and the earlier ones are trained on."""
    await done(*words, "--url", agents.url, "--sessions", str(SESSIONS))
    settled = await until_settled(agents, SESSIONS + earlier)
    assert settled["states"] == {"trained": SESSIONS + earlier}
    assert settled["counts"]["calls"] == SESSIONS + earlier
    assert max(step for step, _ in run.values("trainer/step")) >= SESSIONS // 32
    check_the_logprobs(run)


def check_the_logprobs(run: LocalRun) -> None:
    """Check that tokens have the logprobs that they were sampled with, where the weights are still the same.

    Those of older weights have moved as far as the weights have, which depends on how late they come.
    """
    ratios, ages = dict(run.values("actor/ratio_max")), dict(run.values("sample/staleness/tokens/max"))
    assert ages[1] == 0
    assert ratios[1] == pytest.approx(1, abs=1e-4)
    # a token after a sync in the middle of its answer comes from new weights and a cache of the old ones
    assert all(k3 < 0.01 for _, k3 in run.values("mismatch/k3/age_0"))
