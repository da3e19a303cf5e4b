"""Gateway, engine, trainer, explorer and runner are killed while agents hold sessions: each answered session is trained
on, and no agent is left without an answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tests.serve_clients import Agents, until_settled
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.yaml"
VICTIMS = ("gateway-0", "engine", "trainer-0", "runner-0", "explorer-0", "gateway-0")
AT_ONCE = 16

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(400)]


async def test_every_answered_session_ends_in_one_state(tmp_path: Path) -> None:
    [port] = free_ports(1)
    words = (
        "mode=serve",
        f"gateway.port={port}",
        "gateway.batch_wait=2",
        "buffer.batch_size=32",
        "trainer.save_interval=4",
        "explorer.eval_on_startup=false",
        "explorer.eval_interval=10000",
    )
    async with LocalRun(EXAMPLE, tmp_path / "run", words) as run, aiohttp.ClientSession() as http:
        agents, stop = Agents(f"http://127.0.0.1:{port}", http), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            working = group.create_task(agents.work(AT_ONCE, stop))
            await run.until_progress(2, 120.0)
            for victim in VICTIMS:
                killed = run.kill(victim)
                await run.until(lambda who=victim, old=killed: run.pid(who) not in {None, old}, 60.0)  # type: ignore[misc]
                enough = len(agents.sessions) + 4 * AT_ONCE
                await run.until(lambda enough=enough: len(agents.sessions) > enough, 90.0)  # type: ignore[misc]
                assert not working.done()
            stop.set()
        assert all(told.answered and told.rewarded for told in agents.sessions)
        await until_settled(agents, len(agents.sessions))
        states = await agents.states()
        assert Counter(shown["state"] for shown in states.values()) == {"trained": len(agents.sessions)}
        assert all(shown["trained"]["step"] > 0 for shown in states.values())
        assert agents.failures, "somebody was gone for a while"
