"""The ranks of a trainer as real processes over gloo: led by commands, ended together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from trinity_mq.training.parallel.ranks import own_device, own_rank, world_size

RANK = """
import asyncio, json, os, sys
import psutil, torch
from trinity_mq.training.parallel.ranks import RankError, RankProcesses, Ranks, begin_follower, own_rank

def say(**what):
    sys.stderr.write(json.dumps({"rank": own_rank(), **what}) + "\\n")  # gloo writes to stdout

def follow():
    begin_follower()
    ranks = Ranks(own_rank(), 2, seconds=20.0)
    ranks.connect_store()
    while True:
        command = ranks.next()
        say(got=command.name)
        if command.name == "open":
            ranks.open(torch.device("cpu"))
        elif command.name == "sum":
            value = torch.tensor([command.arguments["value"] * 10.0])
            ranks.sum(value)
            say(sum=value.item(), body=len(command.body))
        elif command.name == "stall":
            torch.tensor([1.0])
            sys.stdin.read()
            __import__("time").sleep(60)
        elif command.name == "end":
            os._exit(0)

async def lead():
    ranks = Ranks(0, 2, seconds=20.0)
    processes = RankProcesses(ranks, grace=5.0)
    await processes.start()
    ranks.connect_store()
    watching = asyncio.create_task(processes.watch())
    say(children=[child.pid for child in psutil.Process().children()])
    for line in iter(sys.stdin.readline, ""):
        name, *rest = line.split()
        try:
            if name == "watch":
                await watching
            else:
                ranks.announce(name, b"x" * 1000 if rest else b"", **({"value": float(rest[0])} if rest else {}))
            if name == "open":
                ranks.open(torch.device("cpu"))
            if name == "sum":
                value = torch.tensor([float(rest[0])])
                ranks.sum(value)
                say(sum=value.item())
            if name == "end":
                break
            say(done=name)
        except RankError as error:
            say(failed=name, why=str(error))
            break
    await processes.end()
    os._exit(0)  # gloo's threads may abort a process that takes itself apart

asyncio.run(lead()) if own_rank() == 0 else follow()
"""

pytestmark = pytest.mark.timeout(90)  # two processes import torch


class Leader:
    """The process of rank 0, told what to do by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[dict[str, object]] = []

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def until(self, **wanted: object) -> dict[str, object]:
        """Read on until somebody says this."""
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while line := await self.process.stderr.readline():
                if not line.startswith(b"{"):
                    continue
                self.said.append(json.loads(line))
                if wanted.items() <= self.said[-1].items():
                    return self.said[-1]
        raise AssertionError(f"{wanted} was not said, but {self.said}")


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    yield Leader(process)
    if process.returncode is None:
        process.kill()
    await process.wait()


async def child_of(leader: Leader) -> psutil.Process:
    said = await leader.until(rank=0)
    [pid] = said["children"]  # type: ignore[misc]
    return psutil.Process(pid)


async def gone(child: psutil.Process) -> None:
    async with asyncio.timeout(20):
        await asyncio.to_thread(child.wait, 20)


async def test_they_do_what_rank_0_announces_and_end_with_it(leader: Leader) -> None:
    child = await child_of(leader)
    leader.tell("open")
    leader.tell("sum 3")
    assert (await leader.until(rank=0, sum=33.0))["sum"] == 33.0
    leader.tell("sum 4")
    await leader.until(rank=0, done="sum")
    child.send_signal(signal.SIGTERM)  # as torchrun and Ctrl-C do: rank 0 decides when a rank ends
    leader.tell("sum 5")
    await leader.until(rank=0, sum=55.0)
    leader.tell("end")
    assert await leader.process.wait() == 0
    await gone(child)


@pytest.mark.parametrize("opened", [False, True])
async def test_rank_0_learns_at_once_that_one_was_killed(leader: Leader, opened: bool) -> None:
    child = await child_of(leader)
    if opened:
        leader.tell("open")
        await leader.until(rank=0, done="open")
    child.kill()
    leader.tell("watch")
    said = await leader.until(rank=0, failed="watch")
    assert said["why"] == "rank 1 ended with exit code -9"


async def test_a_collective_with_a_dead_rank_fails_at_once(leader: Leader) -> None:
    child = await child_of(leader)
    leader.tell("open")
    leader.tell("sum 1")
    await leader.until(rank=0, done="sum")
    child.suspend()
    leader.tell("sum 2")
    child.kill()
    said = await leader.until(rank=0, failed="sum")
    assert "another rank is gone, or took longer than 20 s" in str(said["why"])


@pytest.mark.parametrize("during", ["open", "sum 1"])
async def test_without_rank_0_the_others_end(leader: Leader, during: str) -> None:
    child = await child_of(leader)
    leader.tell("open")
    leader.tell(during)
    await leader.until(rank=1, got=during.split(maxsplit=1)[0])
    leader.process.kill()
    await gone(child)


def test_what_a_cluster_says_of_ranks_of_its_own_is_not_about_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (own_rank(), own_device(0), world_size(1)) == (0, 0, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (own_rank(), own_device(0), world_size(1)) == (3, 1, 8)
