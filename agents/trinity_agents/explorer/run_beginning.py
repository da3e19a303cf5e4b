"""The beginning of a run: its identity, and its place behind what earlier runs of the same name left on the broker."""

from __future__ import annotations

import structlog

from trinity_agents.explorer.state import ExplorerState
from trinity_mq.bus import Bus, Queue, Topology
from trinity_mq.bus.streams import read_up_to_now
from trinity_mq.runtime.deliveries import new_mark

log = structlog.get_logger(__name__)


async def begin_run(state: ExplorerState, bus: Bus, topology: Topology, run_id: str) -> None:
    """Give the run its id, which no other run has had. A fresh state begins behind the present content of the streams;
    that of an older release stays where it is.
    """
    state.run_id = run_id
    if state.incarnations:
        return
    state.results_offset = await _end(bus, topology.results)
    state.ready_offset = await _end(bus, topology.ready)
    work = (topology.tasks_train, topology.tasks_eval, topology.closed)
    waiting = [await bus.depth(queue.name) or 0 for queue in work]
    # of the streams only this one counts: on the other a trainer that has just started may have put its mark
    state.left_over = state.results_offset - 1 + sum(waiting)
    if state.left_over:
        log.warning(
            "earlier_run_on_the_broker", run=topology.run, messages=state.left_over, reason="this run ignores them"
        )


async def _end(bus: Bus, stream: Queue) -> int:
    """Return the offset behind what is on a stream now, and behind the mark by which that was found."""
    end = 0
    async for delivery in read_up_to_now(bus, stream, new_mark()):
        assert delivery.offset is not None
        end = delivery.offset + 1
    return end
