"""Observes a run for some seconds and returns the diagnosis."""

from __future__ import annotations

import asyncio
import contextlib

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.observability.diagnosis import Observation, RunFinding, diagnose
from trinity_mq.observability.follow import QUEUES, depths, follow_telemetry
from trinity_mq.observability.run_state import RunState
from trinity_mq.targets.connection import Target, connect_bus
from trinity_mq.targets.probe import broker_problem

LISTEN_SECONDS = 12.0
"""Default of ``--seconds``. It exceeds the time after which work counts as overdue."""
LEAST_SECONDS = 5.5
"""Minimum seconds of listening before a culprit other than the broker ends it, because progress may be imminent."""
LOOK_SECONDS = 0.5
"""Interval in seconds between checks of the collected messages."""
SURE_MOVES = 2
"""Number of progress changes after which listening to a moving run ends before its time is over."""


async def observe(target: Target, seconds: float) -> RunFinding:
    """Listen to the run's heartbeats until the finding is certain, for at most ``seconds``, and return the finding. If
    the connection to the broker fails, the broker is the culprit.
    """
    try:
        async with connect_bus(target.run, target.broker, "why") as (bus, topology):
            return await _listen(target, bus, topology, seconds)
    except (BusUnavailable, TimeoutError) as error:
        return diagnose(Observation(broker=str(error) or "it does not answer"))


async def _listen(target: Target, bus: Bus, topology: Topology, seconds: float) -> RunFinding:
    clock = asyncio.get_running_loop().time
    state = RunState(target.run, config=target.config)

    async def probe() -> None:
        state.broker_trouble = await broker_problem(bus, topology)

    async def look() -> RunFinding:
        state.set_depths(await depths(bus, topology, QUEUES) if not state.broker_trouble else {})
        return diagnose(state.observation(clock()))

    began = clock()
    state.trends.begin(began)
    async with asyncio.TaskGroup() as group:
        background = [
            group.create_task(follow_telemetry(bus, topology, "why", lambda message: state.receive(message, clock()))),
            group.create_task(probe()),
        ]
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await asyncio.wait(background, return_when=asyncio.FIRST_EXCEPTION)
                finding = await look()
                passed = clock() - began
                if passed >= seconds or _is_sure(finding, state.trends.moves, passed):
                    return finding
        finally:
            for task in background:
                task.cancel()


def _is_sure(finding: RunFinding, moves: int, passed: float) -> bool:
    """Return whether further listening would not change the finding."""
    if finding.culprit == "broker" or finding.state == "over":
        return True
    if finding.state in {"stuck", "waiting"} and finding.culprit is not None:
        return passed >= LEAST_SECONDS
    # a suspect is only evidence while the run still progresses, so keep listening
    suspect = any(line.startswith("but ") for line in finding.evidence)
    return finding.state == "moving" and moves >= SURE_MOVES and not suspect and passed >= LOOK_SECONDS
