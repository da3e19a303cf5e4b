"""A cluster of three nodes whose leaders are killed and frozen in the middle of a run: every run of every task is in
the processed batches exactly once, none is missing. Follow it with ``pytest -s``.

On 3.10 the runs are played only with ``CHAOS_ALL=1``: after the death of a node some of its quorum queues confirm
nothing for a minute and longer, from whichever node they are asked and with all members online, so batches can fail
(CONTRIBUTING).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.arena import BATCHES, Arena
from tests.chaos.cluster import PrivateCluster
from trinity_mq.bus.topology import Topology
from trinity_mq.local_broker.node import find_rabbitmq

EVERYBODY = ("explorer-0", "runner-0", "runner-1", "operator-0", "operator-1")
SETTINGS = ["broker.heartbeat=4"]
DOWN = 5.0
"""Seconds: a queue that is declared while its leader dies may have no majority before that node is back."""
FROZEN = 25.0
"""Seconds: the agents miss its heartbeats, and the other nodes give it up."""
LIMIT = 350.0
"""Seconds: three brokers and six agents share what a single broker has in the other tests."""

pytestmark = [
    pytest.mark.extended,
    pytest.mark.chaos,
    pytest.mark.broker,
    pytest.mark.e2e,
    pytest.mark.timeout(500),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]
not_on_3_10 = pytest.mark.skipif(
    "rabbitmq_server-3." in str(find_rabbitmq()) and not os.environ.get("CHAOS_ALL"),
    reason="queues of a 3.10 cluster may answer nobody for a minute after a node's death: CHAOS_ALL=1",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PrivateCluster]:
    """Three nodes, all alive before and after each test."""
    base = Path(tempfile.mkdtemp(prefix="tmq-"))
    made = PrivateCluster(base)
    try:
        asyncio.run(made.start())
        yield made
    finally:
        asyncio.run(made.kill())
        shutil.rmtree(base, ignore_errors=True)


async def test_every_queue_lives_on_all_nodes(cluster: PrivateCluster, topology: Topology, tmp_path: Path) -> None:
    arena = Arena(tmp_path / "run", cluster.url, topology.run)
    batch = topology.batch_queue(1, "t1")
    async with arena.connected() as bus:
        await bus.declare(*topology.durable, batch)
        rows = await cluster.listed("queues", "name", "type", "members")
        members = {row["name"]: len(row["members"]) for row in rows if row["name"].startswith(topology.prefix)}
        await bus.delete(batch.name)
    assert members == {queue.name: 3 for queue in (*topology.durable, batch)}


@not_on_3_10
async def test_the_leader_of_the_busiest_queue_and_the_explorers_node_are_killed(
    cluster: PrivateCluster, topology: Topology, tmp_path: Path
) -> None:
    arena = Arena(tmp_path / "run", cluster.url, topology.run, overrides=SETTINGS, limit=LIMIT)
    cluster.tell, arena.ask_broker = arena.say, cluster.described

    async def violence() -> None:
        arena.may_do(5)  # so far, and five more are under way: asking the cluster takes a while
        await arena.progress(3)
        # every slice passes through it, and none is known to be there at any moment
        leader = await cluster.leader(topology.tasks_train.name)
        arena.say(f"the slices' queue is led by {leader}")
        cluster.crash(leader)
        arena.may_do(15)
        await asyncio.sleep(DOWN)
        await cluster.restart(leader)
        await arena.progress(10)
        host = await cluster.host_of("explorer-0 consumes")
        arena.say(f"explorer-0 is connected to {host}")
        cluster.crash(host)
        arena.may_do(BATCHES)
        await asyncio.sleep(DOWN)
        await cluster.restart(host)

    await arena.play(violence, *EVERYBODY)
    await arena.check()
    await cluster.all_run()


@not_on_3_10
async def test_a_frozen_leader_is_replaced(cluster: PrivateCluster, topology: Topology, tmp_path: Path) -> None:
    """It must not thaw: RabbitMQ then goes on with two views of one stream until one of them is started anew."""
    arena = Arena(tmp_path / "run", cluster.url, topology.run, overrides=SETTINGS, limit=LIMIT)
    cluster.tell, arena.ask_broker = arena.say, cluster.described

    async def violence() -> None:
        arena.may_do(5)
        await arena.progress(3)
        leader = await cluster.leader(topology.tasks_train.name)
        arena.say(f"the slices' queue is led by {leader}")
        cluster.freeze(leader)
        arena.may_do(15)
        await asyncio.sleep(FROZEN)
        cluster.crash(leader)
        arena.may_do(BATCHES)
        await asyncio.sleep(DOWN)
        await cluster.restart(leader)

    await arena.play(violence, *EVERYBODY)
    await arena.check()
    await cluster.all_run()
