"""Keeps a weight sync from replacing the version that an evaluation is being done with."""

from __future__ import annotations

import asyncio

from trinity_mq.runtime.agent import HEARTBEAT_INTERVAL, Agent
from trinity_mq.sync.gate.coordinator import Coordinator


async def evaluation_ended(agent: Agent, machine: Coordinator) -> None:
    """Return once no evaluation goes on that an engine still serves, at the latest after ``explorer.eval_timeout``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + agent.config.explorer.eval_timeout
    state, waits_for = agent.state, agent.waits_for
    while _is_under_way(agent, machine) and (left := deadline - loop.time()) > 0:
        agent.set_state("holding", "the evaluation of the present version")
        await agent.woken.wait(min(left, HEARTBEAT_INTERVAL))  # the end of a dead explorer's lease wakes nobody
    agent.set_state(state, waits_for)


def _is_under_way(agent: Agent, machine: Coordinator) -> bool:
    serving = any(member.version is not None for member in machine.members.values())
    return agent.peers.explorer.evaluating is not None and serving
