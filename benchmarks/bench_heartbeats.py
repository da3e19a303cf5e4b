"""Cost to one agent of the heartbeats of many runners, on a real RabbitMQ: the share of a core that its process takes.

    python benchmarks/bench_heartbeats.py [--runners 2000] [--engines 16] [--seconds 10] [--check]

A sender publishes synthetic heartbeats of so many runners and engines, four operators, an explorer and a trainer, each
every two seconds as the agents do. Measured one after the other, each in a process of its own, with the processor time
of the whole process (AMQP client, decoding, reactions):

- an idle runner while nobody else is there;
- an idle runner, which hears by role (``hears`` in trinity_mq.roles);
- the same runner made to hear everybody, the baseline;
- an idle agent that hears everybody because it is the explorer.

``--check`` fails where the heartbeats cost a runner 2 % of its loop or more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import aio_pika

from trinity_agents.runner.agent import Runner
from trinity_mq.bus import Topology, create_bus
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import load_config
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.messages import (
    EngineStatus,
    ExplorerStatus,
    Heartbeat,
    OperatorStatus,
    RunnerStatus,
    TrainerStatus,
    encode,
)
from trinity_mq.roles import ROLES
from trinity_mq.runtime import peers
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.serve import tune_garbage_collection

LIMIT = 0.02
WARM_UP = 3.0
CONFIG = {"name": "bench", "model": {"tiny": {}}, "monitor": {"tensorboard": False}}


class Listener(Agent):
    """An explorer as far as heartbeats go."""

    role = "explorer"

    async def serve(self) -> None:
        """Hear until drained."""
        await self.draining.wait()


def status(role: str, number: int) -> object:
    """Return the status of an agent that is busy."""
    ticket = f"{number:032x}"
    if role == "runner":
        return RunnerStatus(running=4, slices=[(ticket, task, 0, 12.3) for task in range(4)], done=1000, given_back=2)
    if role == "engine":
        return EngineStatus(
            id=f"engine-{number}", url="http://127.0.0.1:9", name="m", model_path="m", version=(1, 7), role="rollout",
            load=17, state="current", fingerprint=ticket, progress=7, tokens=1_000_000,
        )  # fmt: skip
    if role == "operator":
        return OperatorStatus(ticket=ticket)
    if role == "trainer":
        return TrainerStatus(generation=1, step=7, progress=7, committed=(1, 7), committed_progress=7)
    return ExplorerStatus(opened=9, closed=8, following=[ticket], open=[ticket] * 2)


async def send(url: str, exchange: str, agents: list[tuple[str, int]]) -> None:
    """Publish a heartbeat of each agent every two seconds, evenly, until cancelled."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=False)
        target = await channel.get_exchange(exchange, ensure=False)
        started, pause = time.monotonic(), peers.HEARTBEAT_INTERVAL / len(agents)
        for sent in itertools.count():
            role, number = agents[sent % len(agents)]
            beat = Heartbeat(
                role=role, id=f"{role}-{number}", seq=sent, incarnation="x", lease=peers.HEARTBEAT_LEASE,
                state="working", detail=status(role, number),
            )  # fmt: skip
            message = aio_pika.Message(encode(beat), content_type="application/msgpack", headers={"kind": beat.kind})
            await target.publish(message, f"beat.{role}.{beat.id}", mandatory=False)
            ahead = started + sent * pause - time.monotonic()
            if ahead > 0.005:
                await asyncio.sleep(ahead)


async def measured(what: str, seconds: float) -> None:
    """Run one agent and print the share of a core that its process takes."""
    config = load_config(CONFIG)
    topology = Topology(config.name)
    if what == "everybody":
        peers.ROLES = {role: row._replace(hears=None) for role, row in ROLES.items()}  # type: ignore[attr-defined]
    bus = create_bus(config.broker, topology, what)
    kind = Listener if what == "explorer" else Runner
    agent = kind(config, bus=bus, topology=topology, agent_id="measured")
    tune_garbage_collection()
    task = asyncio.create_task(agent.run())
    await agent.serving.wait()
    await asyncio.sleep(WARM_UP)
    busy, started = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    found = (time.process_time() - busy) / (time.monotonic() - started)
    agent.drain()
    await task
    print(found)  # behind what the agent has logged


async def share(what: str, seconds: float) -> float:
    """Measure in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--measured", what, "--seconds", str(seconds), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"measuring {what} ended with {process.returncode}")
    return float(out.split()[-1])


async def compared(options: argparse.Namespace) -> bool:
    """Measure and print; return whether a runner stays below the limit."""
    many = [("runner", options.runners), ("engine", options.engines), ("operator", 4), ("explorer", 1), ("trainer", 1)]
    agents = [(role, number) for role, count in many for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        node = PrivateNode(Path(folder) / "broker")
        await node.start()
        try:
            await node.wait_ready()
            os.environ[URL_VARIABLE] = node.url
            alone = await share("role", options.seconds)
            sending = asyncio.create_task(send(node.url, Topology(str(CONFIG["name"])).exchange("telemetry"), agents))
            try:
                shares = {what: await share(what, options.seconds) for what in ("role", "everybody", "explorer")}
            finally:
                sending.cancel()
                await asyncio.wait([sending])
        finally:
            await node.stop()
    print(f"{options.runners} runners, {options.engines} engines, 4 operators, a heartbeat of each every 2 s")
    print(f"a runner alone              : {alone:6.2%} of a core")
    cost = {what: found - alone for what, found in shares.items()}
    print(f"a runner, hears by role     : {shares['role']:6.2%}, the heartbeats {cost['role']:6.2%}")
    print(
        f"a runner, hears everybody   : {shares['everybody']:6.2%}, the heartbeats {cost['everybody']:6.2%}, "
        f"{cost['everybody'] / max(cost['role'], 1e-4):.0f} times that"
    )
    print(f"the explorer                : {shares['explorer']:6.2%}")
    return cost["role"] < LIMIT


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runners", type=int, default=2000)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--check", action="store_true", help="fail where a runner pays 2 %% of its loop or more")
    parser.add_argument("--measured", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measured:
        asyncio.run(measured(options.measured, options.seconds))
    elif not asyncio.run(compared(options)) and options.check:
        raise SystemExit("the heartbeats cost a runner more than they may")


if __name__ == "__main__":
    main()
