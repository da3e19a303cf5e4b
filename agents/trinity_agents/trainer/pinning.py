"""Prevents a weight sync from replacing the weight version of a running evaluation."""

from __future__ import annotations

import asyncio

from trinity_mq.runtime.agent import HEARTBEAT_INTERVAL, Agent
from trinity_mq.sync.gate.coordinator import Coordinator


async def wait_for_evaluation(agent: Agent, machine: Coordinator) -> None:
    """Wait until no engine serves a running evaluation, at most ``explorer.eval_timeout`` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + agent.config.explorer.eval_timeout
    state, waits_for = agent.state, agent.waits_for
    while _is_under_way(agent, machine) and (remaining_s := deadline - loop.time()) > 0:
        agent.set_state("holding", "the evaluation of the present version")
        # The lease of a dead explorer ends without a notification, so the wait is short.
        await agent.woken.wait(min(remaining_s, HEARTBEAT_INTERVAL))
    agent.set_state(state, waits_for)


def _is_under_way(agent: Agent, machine: Coordinator) -> bool:
    serving = any(member.version is not None for member in machine.members.values())
    return agent.peers.explorer.evaluating is not None and serving
