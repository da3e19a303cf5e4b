"""The start of a run: its id, and its stream offsets after the messages of earlier runs with the same name."""

from __future__ import annotations

import structlog

from trinity_agents.explorer.state import ExplorerState
from trinity_mq.bus import Bus, Queue, Topology
from trinity_mq.bus.streams import read_up_to_now
from trinity_mq.runtime.deliveries import new_mark

log = structlog.get_logger(__name__)


async def begin_run(state: ExplorerState, bus: Bus, topology: Topology, run_id: str) -> None:
    """Set the unique run id in the state; a fresh state also begins after the present content of the streams.

    The stream offsets in a state of an older release do not change.
    """
    state.run_id = run_id
    if state.incarnations:
        return
    state.results_offset = await _end(bus, topology.results)
    state.ready_offset = await _end(bus, topology.ready)
    work = (topology.tasks_train, topology.tasks_eval, topology.closed)
    waiting = [await bus.depth(queue.name) or 0 for queue in work]
    # Only the results stream is counted, because a trainer that has just started may have put its mark on the ready
    # stream. 1 is subtracted for the mark that _end publishes.
    state.left_over = state.results_offset - 1 + sum(waiting)
    if state.left_over:
        log.warning(
            "earlier_run_on_the_broker", run=topology.run, messages=state.left_over, reason="this run ignores them"
        )


async def _end(bus: Bus, stream: Queue) -> int:
    """Publish a mark on a stream and return the offset after the mark, which follows all present messages."""
    end = 0
    async for delivery in read_up_to_now(bus, stream, new_mark()):
        assert delivery.offset is not None
        end = delivery.offset + 1
    return end
