"""The engines that one agent hosts: those of the policy, each with a place in the gate, and auxiliary ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from trinity_mq.messages import GateStatus, Heartbeat, MemberStatus, SyncEvent, Version
from trinity_mq.models.engine_selection import known_model
from trinity_mq.models.inference import ModelRole
from trinity_mq.runtime.agent import HEARTBEAT_LEASE, Agent
from trinity_mq.runtime.notify import Notifier
from trinity_mq.sync.gate.member import Key
from trinity_mq.sync.gate.member_driver import HEARD, MemberDriver

if TYPE_CHECKING:
    from trinity_mq.models import EngineHost

ENGINE_LEASE = 3 * HEARTBEAT_LEASE
"""An engine is believed in for longer than its host: it outlives the host's restart."""


class HostedEngines:
    """What its engines have in common; to whoever schedules it is one gate.

    Each engine is a member of the gate under its own id, so that one of them dying costs the others nothing but the try
    under way. Auxiliary engines are no members.

    Args:
        agent: Whose bus, beats and peers are used.
        engines: Hosts of engines that serve the policy; at least one.
        auxiliaries: Hosts of auxiliary engines.
        on_commit: Called with what a commit says; the version is None where only the progress moves.
    """

    def __init__(
        self,
        agent: Agent,
        engines: Sequence[EngineHost | Any],
        auxiliaries: Sequence[EngineHost | Any] = (),
        *,
        on_commit: Callable[[Version | None, int], None] = lambda version, progress: None,
    ) -> None:
        self._agent, self.engines, self.auxiliaries = agent, list(engines), list(auxiliaries)
        self.changed = Notifier()
        """Notified when a member's stage or version may have changed."""
        self._on_commit = on_commit
        self._members = [self._member(engine) for engine in self.engines]
        self._seen: set[str] = set()
        """Ids of the engines that have lived: those that die are called gone until they are back."""

    def _member(self, engine: EngineHost | Any) -> MemberDriver:
        member = MemberDriver(
            name=engine.snapshot.id,
            lease=self._agent.config.synchronizer.member_lease,
            engine=engine,
            publish=self._publish,
            given=lambda: self._given(engine.snapshot.id),
        )
        member.on_commit = self._committed_here
        member.changed = self.changed
        return member

    # -- as one gate

    @property
    def version(self) -> Version | None:
        """The newest version that an engine serves, here or at another host; None: there is none to ask."""
        own = [member.version for member in self._members if member.version is not None]
        return max(own + self._elsewhere(), default=None)

    @property
    def idle(self) -> bool:
        """No try is under way here, and the engines have heard of the last one's end."""
        return all(member.idle for member in self._members)

    @property
    def lives(self) -> bool:
        """An engine of the policy lives, here or at another host."""
        return any(engine.snapshot.alive for engine in self.engines) or bool(self._elsewhere())

    def hold(self, seconds: float) -> None:
        """Delay ready for up to so many seconds: an evaluation of the present version is open."""
        for member in self._members:
            member.hold(seconds)

    def release(self) -> None:
        """Lift :meth:`hold`."""
        for member in self._members:
            member.release()

    async def leave(self) -> None:
        """Say goodbye for all."""
        for member in self._members:
            await member.leave()

    # -- their lives

    async def start(self) -> None:
        """Start or adopt all engines, side by side; errors as :meth:`EngineHost.start`."""
        async with asyncio.TaskGroup() as group:
            for host in self._all():
                group.create_task(host.start())

    async def background(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that keep engines and memberships going; what they need to be ready is."""
        agent = self._agent
        ears = agent.topology.listener(agent.id, agent.incarnation, "sync", *(f"weights.{verb}" for verb in HEARD))
        await agent.bus.declare(ears)
        feed = await agent.bus.consume(ears)
        for host in self._all():
            host.on_change = self._look
        self._look()
        return [
            agent.each(feed, self._heard),
            *(member.run() for member in self._members),
            *(host.keep() for host in self._all()),
            self._watch(),
        ]

    async def close(self, *, stop: bool) -> None:
        """End the engines for good, or leave them living for our successor to adopt."""
        async with asyncio.TaskGroup() as group:
            for host in self._all():
                group.create_task(host.stop() if stop else host.detach())

    def beats(self) -> list[Heartbeat]:
        """Return what the engines' beats say now; one that has died is gone until it is back."""
        policy = [self._beat(engine, "rollout", member) for engine, member in self._pairs()]
        beside = [self._beat(engine, "auxiliary", None) for engine in self.auxiliaries]
        return [beat for beat in (*policy, *beside) if beat is not None]

    # -- inside

    def _all(self) -> list[EngineHost | Any]:
        return [*self.engines, *self.auxiliaries]

    def _pairs(self) -> list[tuple[EngineHost | Any, MemberDriver]]:
        return list(zip(self.engines, self._members, strict=True))

    def _beat(self, engine: EngineHost | Any, role: ModelRole, member: MemberDriver | None) -> Heartbeat | None:
        snapshot = engine.snapshot
        version = snapshot.version if member is None else member.version
        if snapshot.alive:
            self._seen.add(snapshot.id)
        elif snapshot.id not in self._seen:
            return None
        if not snapshot.alive:
            state, waits_for = "gone", None
        elif member is None:
            serves = snapshot.state == "current"
            state, waits_for = ("working", None) if serves else ("holding", f"its server ({snapshot.state})")
        else:
            state, waits_for = ("working", None) if version else ("holding", self._lack(snapshot.id))
        return Heartbeat(
            role="engine",
            id=snapshot.id,
            seq=self._agent.heartbeat_seq,
            incarnation=self._agent.incarnation,
            lease=ENGINE_LEASE,
            state=state,
            waits_for=waits_for,
            detail=snapshot.detail(role).model_copy(update={"version": version}),
        )

    def _elsewhere(self) -> list[Version]:
        """Return the versions that the engines of other hosts serve."""
        ours = {engine.snapshot.id for engine in self.engines}
        models = [known_model(beat) for beat in self._agent.peers.alive("engine") if beat.id not in ours]
        return [
            model.version
            for model in models
            if model is not None and model.role == "rollout" and model.version is not None
        ]

    async def _heard(self, message: Any, delivery: Any) -> None:
        for member in self._members:
            await member.heard(message, delivery)

    async def _watch(self) -> None:
        """Wake who waits for a version or for the gate to stand still, and look at the engines again: what one lost in
        the middle of a try shows only after that.
        """
        while True:
            await self.changed.wait()
            self._look()

    def _look(self) -> None:
        """Tell the gate of engines that have come, gone, or lost their weights by themselves."""
        for engine, member in self._pairs():
            snapshot = engine.snapshot
            if snapshot.alive and not member.engine_ready:
                member.engine_up(snapshot.version, snapshot.fingerprint or None)
                self._agent.heartbeat_soon()
            elif not snapshot.alive and member.engine_ready:
                member.engine_down()
                self._agent.heartbeat_soon()
            elif snapshot.state in {"empty", "dirty"} and member.idle and member.version is not None:
                member.engine_up(None, snapshot.fingerprint or None)
            elif snapshot.state == "current" and snapshot.alive and member.idle and member.version is None:
                # a transfer was cut off before it touched anything
                member.engine_up(snapshot.version, snapshot.fingerprint or None)
        if any(engine.snapshot.alive != (engine.snapshot.id in self._seen) for engine in self.auxiliaries):
            self._agent.heartbeat_soon()
        self._agent.woken.notify()

    def _told(self, engine: str) -> MemberStatus:
        """Return what the trainer's heartbeat says of an engine."""
        sync = self._agent.peers.trainer.sync or GateStatus()
        return sync.members.get(engine) or MemberStatus()

    def _lack(self, engine: str) -> str:
        quarantined = self._told(engine).state == "quarantined"
        return "weights that its canary shows: it is quarantined" if quarantined else "weights"

    def _given(self, engine: str) -> Key | None:
        """Return what the trainer's beat says was last committed at an engine, and in which try."""
        told = self._told(engine)
        return (told.version, *told.given) if told.version and told.given else None

    def _committed_here(self, version: Version | None, progress: int) -> None:
        self._on_commit(version, progress)
        self._agent.heartbeat_soon()

    async def _publish(self, event: SyncEvent) -> None:
        await self._agent.publish("sync", f"weights.{event.verb}", event)
