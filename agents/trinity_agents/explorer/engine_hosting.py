"""The engine host of ``--engines-only``, which hosts engines for a run whose explorer runs elsewhere.

Input: the weights that the trainer broadcasts.
Output: engines and their heartbeats.
Waits for: the end of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trinity_agents.explorer.hosted_engines import HostedEngines
from trinity_mq.bus import Bus, Topology
from trinity_mq.config import Config
from trinity_mq.messages import EngineStatus, ExplorerStatus, Heartbeat
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.runtime.serve import run_daemon

if TYPE_CHECKING:
    from trinity_mq.engines.host.host import EngineHost

NAME_TIMEOUT = 30.0
"""Maximum seconds until the broker notices that a former host of the same name is dead."""


class EngineHosting(Agent):
    """Hosts engines for a run; a run may have any number of these hosts, each with a unique agent id."""

    role = "engine"

    def __init__(
        self, config: Config, *, bus: Bus, topology: Topology, agent_id: str, engines: Sequence[EngineHost | Any]
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self.hosted = HostedEngines(self, engines)
        self._is_of_another_run = False

    def detail(self) -> EngineStatus:
        """Return the ids of the hosted engines; the status has no URL, so that the host does not count as an engine."""
        return EngineStatus(hosts=[engine.snapshot.id for engine in self.hosted.engines])

    def hosted_heartbeats(self) -> list[Heartbeat]:
        """Return the heartbeats of the hosted engines."""
        return self.hosted.heartbeats()

    def follow_run(self, explorer: ExplorerStatus) -> None:
        """Adopt the run id of the explorer that schedules.

        Raises:
            RestartRequested: The explorer has started another run, and the engines hold weights and versions of the old
                run.
        """
        before = self.bus.run_id
        self._is_of_another_run = before is not None and before != explorer.run_id
        if self._is_of_another_run:
            raise RestartRequested(f"the explorer has started another run: {explorer.run_id} instead of {before}")
        super().follow_run(explorer)

    async def serve(self) -> None:
        """Keep the engines running and synchronised until drained or the run is over.

        Raises:
            FatalError: Another host of the same name is running.
        """
        deadline = asyncio.get_running_loop().time() + NAME_TIMEOUT

        def gives_up() -> bool:
            if asyncio.get_running_loop().time() > deadline:
                raise FatalError(
                    f"another engine host of this run has the id {self.id!r}, so the ids of their engines would "
                    "clash; start this host with another --id"
                )
            return self._is_over()

        # The lock makes the host's name unique, and with it the names of its engines.
        waits_for = f"the other host called {self.id} to end"
        if not await self.take_lock(self.id, "holding", waits_for, until=gives_up) or self._is_over():
            return
        try:
            self.set_state("starting", "its engines")
            await self.hosted.start()
            self.set_state("working")
            background = await self.hosted.background()
            await self.run_with_background(self.woken.until(self._is_over), self.restart_when_lock_lost(), *background)
            await self.hosted.leave()
        finally:
            await self.hosted.close(stop=self._is_over() or self._is_of_another_run)

    def _is_over(self) -> bool:
        return self.draining.is_set() or self.peers.explorer.finished


def host_engines(config: Config, agent_id: str) -> int:
    """Host ``explorer.rollout_model.engine_num`` engines until the run is over or the process is drained; returns the
    exit code.
    """
    from trinity_mq.engines.host.host import rollout_hosts
    from trinity_mq.models import ensure_model_folder

    def build(bus: Bus, topology: Topology) -> EngineHosting:
        ensure_model_folder(config.model, config.path / "model", config.seed)
        engines = rollout_hosts(config, agent_id)
        return EngineHosting(config, bus=bus, topology=topology, agent_id=agent_id, engines=engines)

    return run_daemon(config, agent_id, "engine", build)
