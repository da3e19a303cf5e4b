"""200 tasks on a real broker while processes die, freeze and lose the network: every run is in the processed batches
exactly once, none is missing. Follow it with ``pytest -s``.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.arena import BATCHES, Arena
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.testing.tcp_proxy import FaultProxy

RUNNER_POINTS = [
    "received task_slice",
    "workflow",
    "publishing experience_part",
    "confirmed experience_part",
    "publishing task_result",
    "confirmed task_result",
    "acked task_slice",
]
"""After receive, in the workflow, in the publish, between experience and result, between result and ack."""
OPERATOR_POINTS = [
    "received batch_closed",
    "received experience_part",
    "publishing experience_chunk",
    "confirmed experience_chunk",
    "confirmed batch_ready",
    "acked batch_closed",
]
EXPLORER_POINTS = [
    "publishing task_slice",
    "received task_result",
    "publishing batch_closed",
    "confirmed batch_closed",
]
CUT = 30.0
"""Seconds."""
EVERYBODY = ("explorer-0", "runner-0", "runner-1", "operator-0", "operator-1")

pytestmark = [
    pytest.mark.extended,
    pytest.mark.chaos,
    pytest.mark.broker,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]


@pytest.fixture(scope="module")
def node() -> Iterator[PrivateNode]:
    """A broker that only these tests stop and starve."""
    base = Path(tempfile.mkdtemp(prefix="tmq-"))
    node = PrivateNode(base / "broker")

    async def start() -> None:
        await node.start()
        await node.wait_ready()

    try:
        asyncio.run(start())
        yield node
    finally:
        asyncio.run(node.kill())
        shutil.rmtree(base, ignore_errors=True)


async def test_runners_killed_at_each_marked_point(tmp_path: Path, node: PrivateNode, unique_run: str) -> None:
    ends = [(point, 8) for point in RUNNER_POINTS]
    points = {"runner-0": ends[::2], "runner-1": ends[1::2]}
    arena = Arena(tmp_path / "run", node.url, unique_run, points=points)

    async def violence() -> None:
        await arena.all_dead("runner")

    await arena.play(violence, *EVERYBODY)
    assert sorted(where for _, where in arena.deaths) == sorted(RUNNER_POINTS)
    await arena.check()


async def test_explorer_and_operators_killed_and_an_operator_frozen(
    tmp_path: Path, node: PrivateNode, unique_run: str
) -> None:
    points = {
        "explorer-0": [(point, 2) for point in EXPLORER_POINTS],
        # five batches are open at a time: each life dies of the first that it gets
        "operator-0": [(point, 1) for point in OPERATOR_POINTS],
    }
    # it holds a batch then, and all the parts of it
    frozen = {"operator-1": "publishing experience_chunk"}
    heartbeat = 3.0
    settings = [f"broker.heartbeat={heartbeat}"]
    arena = Arena(tmp_path / "run", node.url, unique_run, points=points, frozen=frozen, overrides=settings)

    async def violence() -> None:
        arena.may_do(BATCHES - 8)
        await asyncio.gather(arena.all_dead("operator"), arena.all_dead("explorer"))
        await asyncio.sleep(max(0.0, 4 * heartbeat - arena.frozen_seconds("operator-1")))
        arena.say(f"operator-1 was frozen for {arena.frozen_seconds('operator-1'):.1f} s, a batch in its hands")
        arena.send("operator-1", signal.SIGCONT)
        arena.may_do(BATCHES)

    await arena.play(violence, *EVERYBODY)
    assert sorted(where for _, where in arena.deaths) == sorted(EXPLORER_POINTS + OPERATOR_POINTS)
    await arena.check()


async def test_broker_restarted_and_a_memory_alarm(tmp_path: Path, node: PrivateNode, unique_run: str) -> None:
    arena = Arena(tmp_path / "run", node.url, unique_run)

    async def violence() -> None:
        arena.may_do(6)
        await arena.progress(3)
        await node.ctl("set_vm_memory_high_watermark", "0.0001")
        arena.say("memory alarm")
        arena.may_do(14)
        await asyncio.sleep(2.0)
        arena.send("runner-0", signal.SIGKILL)  # its slices come back while nobody can publish
        await asyncio.sleep(2.0)
        await node.ctl("set_vm_memory_high_watermark", "0.4")
        arena.say("memory alarm over")
        await arena.progress(10)
        await node.stop()
        arena.say("the broker has stopped")
        await node.start()
        await node.wait_ready()
        arena.say("the broker is back")
        arena.may_do(BATCHES)

    await arena.play(violence, *EVERYBODY)
    await arena.check()


async def test_connections_cut_for_30_seconds(tmp_path: Path, node: PrivateNode, unique_run: str) -> None:
    async with FaultProxy(node.url) as silent, FaultProxy(node.url) as refused:
        urls = {"explorer-0": silent.url, "runner-0": refused.url, "operator-0": silent.url}
        arena = Arena(tmp_path / "run", node.url, unique_run, urls=urls)

        async def violence() -> None:
            await arena.progress(3)
            arena.say("nothing passes between the broker and explorer-0, operator-0; runner-0 is refused")
            silent.hold_requests()
            silent.hold_replies()
            refused.refuse()
            await asyncio.sleep(CUT)
            refused.accept()
            silent.cut()
            arena.say("the network is back")

        await arena.play(violence, *EVERYBODY)
        await arena.check()
