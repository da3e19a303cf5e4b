"""Programs that know only a base URL train a model: the examples as they are, each with its own client. Each answered
session is trained on, whatever is killed meanwhile.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.serve_clients import SESSIONS, done, served, train_by_program, until_settled

PROGRAMS = Path(__file__).parents[2] / "examples" / "agents"
VICTIMS = ("gateway-0", "engine", "trainer-0", "runner-0", "explorer-0", "gateway-0")
AT_ONCE = 16

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


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


@pytest.mark.extended
@pytest.mark.any_broker
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["anthropic_python.py", "agents_sdk.py", "openai_node.mjs", "agent.go", "curl.sh"])
async def test_an_unmodified_client_trains(tmp_path: Path, name: str) -> None:
    async with served(tmp_path) as (run, agents):
        await train_by_program(await program(name, tmp_path), run, agents)


@pytest.mark.chaos
async def test_every_answered_session_ends_in_one_state(tmp_path: Path) -> None:
    """First those of an OpenAI client; then gateway, engine, trainer, runner and explorer are killed while agents hold
    sessions, and no agent is left without an answer.
    """
    async with served(tmp_path) as (run, agents):
        await train_by_program(await program("openai_python.py", tmp_path), run, agents)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            working = group.create_task(agents.work(AT_ONCE, stop))
            for victim in VICTIMS:
                killed = run.kill(victim)
                await run.until(lambda who=victim, old=killed: run.pid(who) not in {None, old}, 60.0)  # type: ignore[misc]
                enough = len(agents.sessions) + 4 * AT_ONCE
                await run.until(lambda enough=enough: len(agents.sessions) > enough, 90.0)  # type: ignore[misc]
                assert not working.done()
            stop.set()
        assert all(session.answered and session.rewarded for session in agents.sessions)
        await until_settled(agents, SESSIONS + len(agents.sessions))
        states = await agents.states()
        assert Counter(shown["state"] for shown in states.values()) == {"trained": len(agents.sessions)}
        assert all(shown["trained"]["step"] > 0 for shown in states.values())
        assert agents.failures, "somebody was gone for a while"
