"""``trinity-mq chaos`` on a cluster of three nodes, any of which is killed, frozen or restarted like everything else.
Follow it with ``pytest -s``; ``KILLS=100 SEED=7`` does more, or others.

On 3.10 the run is played only with ``CHAOS_ALL=1``: after the death of a node some of its quorum queues confirm
nothing for a minute and longer, from whichever node they are asked and with all members online, so batches can fail
(CONTRIBUTING).
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.chaos.cluster import COUNT, PrivateCluster
from tests.waiting import until
from trinity_mq.bus import Topology, create_bus
from trinity_mq.config import BrokerConfig, load_config
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.proof.chaos.report import lines
from trinity_mq.proof.chaos.scenes import launch_run, possible_faults, settings
from trinity_mq.proof.chaos.schedule import draw, save
from trinity_mq.proof.chaos.targets.base import Victim
from trinity_mq.proof.chaos.targets.local import LocalTargets
from trinity_mq.proof.chaos.tokens import WeightArchive
from trinity_mq.proof.chaos.trial import Plan, judge, run_trial
from trinity_mq.targets.connection import connect_bus

EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
DOWN = 5.0
"""Seconds: a queue that is declared while its leader dies may have no majority before that node is back."""
FROZEN = 25.0
"""Seconds: the agents miss a node's heartbeats, and the other nodes give it up."""
PATIENCE = 240.0
"""Seconds until each node must have seen the others after one was started again."""
KILLS, SEED = int(os.environ.get("KILLS", "20")), int(os.environ.get("SEED", "7"))

pytestmark = [
    pytest.mark.extended,
    pytest.mark.chaos,
    pytest.mark.broker,
    pytest.mark.e2e,
    pytest.mark.timeout(900 + 30 * KILLS),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]
not_on_3_10 = pytest.mark.skipif(
    "rabbitmq_server-3." in str(find_rabbitmq()) and not os.environ.get("CHAOS_ALL"),
    reason="queues of a 3.10 cluster may answer nobody for a minute after a node's death: CHAOS_ALL=1",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PrivateCluster]:
    base = Path(tempfile.mkdtemp(prefix="tmq-"))
    made = PrivateCluster(base)
    try:
        asyncio.run(made.start())
        yield made
    finally:
        asyncio.run(made.kill())
        shutil.rmtree(base, ignore_errors=True)


class ClusterTargets(LocalTargets):
    """The processes of a run, and the nodes of its cluster; a node that was ended is started again some seconds later.

    A frozen node does not thaw but is ended: RabbitMQ would go on with two views of one stream (docs/operating.md).
    """

    cluster: PrivateCluster

    @property
    def possible(self) -> Mapping[str, Sequence[str]]:
        return {**super().possible, "broker": ("kill", "freeze", "restart")}

    async def find(self, role: str) -> list[Victim]:
        if role != "broker":
            return await super().find(role)
        nodes = sorted(self.cluster.nodes.items())
        return [Victim("broker", name, f"{node.pid}@0", shared=True) for name, node in nodes if node.pid is not None]

    async def strike(self, victim: Victim, kind: str) -> None:
        if victim.role != "broker":
            await super().strike(victim, kind)
            return
        if kind == "restart":
            await self.cluster.nodes[victim.name].stop()
        else:
            if kind == "freeze":
                self.cluster.freeze(victim.name)
                await asyncio.sleep(FROZEN)
            self.cluster.crash(victim.name)
            await asyncio.sleep(DOWN)
        await self.cluster.restart(victim.name)
        for node in self.cluster.nodes.values():  # else two of three are down at once, and nothing can go on
            await until(functools.partial(_sees_all, node), PATIENCE)


async def _sees_all(node: PrivateNode) -> bool:
    return (await node.ctl("eval", "length([node() | nodes()]).")).strip() == str(COUNT)


async def test_every_queue_lives_on_all_nodes(cluster: PrivateCluster, topology: Topology) -> None:
    queues = [*topology.durable, topology.batch_queue(1, "t1")]
    bus = create_bus(BrokerConfig(url=cluster.url), topology, "test")
    await bus.connect()
    try:
        await bus.declare(*queues)
        rows = await cluster.listed("queues", "name", "type", "members")
    finally:
        for queue in queues:
            await bus.delete(queue.name)
        await bus.close()
    members = {row["name"]: len(row["members"]) for row in rows if row["name"].startswith(topology.prefix)}
    assert members == {queue.name: COUNT for queue in queues}


@not_on_3_10
async def test_faults_of_agents_and_nodes_cost_time_and_nothing_else(
    tmp_path: Path, cluster: PrivateCluster, unique_run: str
) -> None:
    def tell(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    async def restart(agent: str) -> None:
        raise AssertionError(f"{agent}: no restart of an agent is drawn")

    words = [
        f"name={unique_run}",
        f"run_dir={tmp_path / 'run'}",
        "buffer.total_steps=20000",
        "trainer.save_interval=10",
    ]
    words = settings([*words, "broker.heartbeat=4"])
    config = load_config(EXAMPLE, words)
    async with launch_run(config, [str(EXAMPLE), *words], cluster.url, tmp_path / "points", tell) as run:
        broker = config.broker.model_copy(update={"url": cluster.url})
        async with connect_bus(config.name, broker, "chaos") as (bus, topology):
            targets = ClusterTargets(config.path, run.process.pid, restart=restart, mark=run.mark)
            targets.cluster, cluster.tell = cluster, tell
            possible = {
                role: [kind for kind in kinds if role == "broker" or kind in {"kill", "freeze"}]
                for role, kinds in possible_faults(targets, config).items()
            }
            schedule = draw(SEED, KILLS, possible, 1.0)
            weights = WeightArchive(config.path / "checkpoints", tmp_path / "weights")
            plan = Plan(schedule=schedule, timeout=180.0, after=3, further=3)
            ended = asyncio.ensure_future(run.process.wait())
            outcome = await run_trial(bus, topology, targets, plan, ended=ended.done, tell=tell, weights=weights)
            await run.stop()
            ended.cancel()
            outcome.over = True
            await judge(bus, topology, config, outcome, targets=targets, run_dir=config.path, weights=weights)
            targets.end_left_over()
    save(schedule, tmp_path / "schedule.json")
    report = "\n".join(lines(outcome, tmp_path / "schedule.json", f"KILLS={KILLS} SEED={SEED} pytest -s {__file__}"))
    tell(report)
    assert outcome.holds, report
    assert {verdict.result for verdict in outcome.verdicts} == {"holds"}, report
    assert sum(done.at is not None for done in outcome.done) == KILLS, report
    assert any(done.fault.role == "broker" for done in outcome.done), report
