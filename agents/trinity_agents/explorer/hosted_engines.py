"""The engines hosted by an agent: policy engines, each a member of the sync gate, and auxiliary engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from trinity_mq.config import Config
from trinity_mq.messages import GateStatus, Heartbeat, MemberStatus, SyncEvent, TrainerStatus, Version
from trinity_mq.models.engine_selection import announced_model
from trinity_mq.models.inference import ModelRole
from trinity_mq.runtime.agent import HEARTBEAT_LEASE, Agent
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier
from trinity_mq.sync.channels.base import manifest_bytes, source_copies, transfer_seconds
from trinity_mq.sync.gate.member_driver import COORDINATOR_VERBS, MEMBER_LEASE, MemberDriver
from trinity_mq.sync.gate.records import Key

if TYPE_CHECKING:
    from trinity_mq.engines.host.host import EngineHost

ENGINE_LEASE = 3 * HEARTBEAT_LEASE
"""Lease of an engine's heartbeat in seconds; longer than its host's lease, because the engine survives a restart of the
host."""


class HostedEngines:
    """Starts and watches engines, and drives their members of the sync gate.

    Each policy engine is a member under its own id, so that a dead engine costs the other engines only the current sync
    attempt. Auxiliary engines are not members.

    Args:
        agent: The hosting agent, whose bus, heartbeats and peers are used.
        engines: Hosts of engines that serve the policy; at least one host.
        auxiliaries: Hosts of auxiliary engines.
        on_commit: Called with the version and the progress of each commit; the version is None if only the progress
            changes.
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
        self._started_ids: set[str] = set()
        """Ids of the engines that have run; a dead engine among them is reported as ``gone`` until it runs again."""

    def _member(self, engine: EngineHost | Any) -> MemberDriver:
        member = MemberDriver(
            name=engine.snapshot.id,
            lease=MEMBER_LEASE,
            engine=engine,
            publish=self._publish,
            last_commit=lambda: self._committed(engine.snapshot.id),
            ranks=self._agent.config.engine_ranks,
        )
        member.on_commit = self._handle_commit
        member.changed = self.changed
        return member

    # -- weight sync

    @property
    def version(self) -> Version | None:
        """The newest version that an engine of any host serves; None if no engine serves."""
        own_versions = [member.version for member in self._members if member.version is not None]
        return max(own_versions + self._remote_versions(), default=None)

    @property
    def idle(self) -> bool:
        """Whether no sync attempt is running at these engines, and all of them know the end of their last attempt."""
        return all(member.idle for member in self._members)

    @property
    def any_alive(self) -> bool:
        """Whether a policy engine is alive here or serves at another host."""
        return any(engine.snapshot.alive for engine in self.engines) or bool(self._remote_versions())

    async def leave(self) -> None:
        """Remove this host's members from the sync gate."""
        for member in self._members:
            await member.leave()

    # -- life cycle of the engines

    async def start(self) -> None:
        """Start or adopt all engines concurrently; raises the errors of :meth:`EngineHost.start`.

        The lease of an engine that is ready before the other engines is renewed until all have started.
        """
        async with asyncio.TaskGroup() as group:
            starting = [group.create_task(host.start()) for host in self._all()]
            holding = [group.create_task(_hold(start, host)) for start, host in zip(starting, self._all(), strict=True)]
            await asyncio.wait(starting)
            for task in holding:
                task.cancel()

    async def background(self) -> list[Coroutine[Any, Any, None]]:
        """Subscribe to sync events and return the coroutines that keep engines and members running."""
        agent = self._agent
        subscription = agent.topology.listener(
            agent.id, agent.incarnation, "sync", *(f"weights.{verb}" for verb in COORDINATOR_VERBS)
        )
        await agent.bus.declare(subscription)
        consumer = await agent.bus.consume(subscription)
        for host in self._all():
            host.on_change = self._refresh
        self._refresh()
        return [
            agent.each(consumer, self._receive),
            *(member.run() for member in self._members),
            *(host.keep() for host in self._all()),
            self._watch(),
            self._compare_tokenizers(),
            self._rejoin_unlisted(),
        ]

    async def close(self, *, stop: bool) -> None:
        """Stop the engines, or leave them running so that the next host process can adopt them."""
        async with asyncio.TaskGroup() as group:
            for host in self._all():
                group.create_task(host.stop() if stop else host.detach())

    def heartbeats(self) -> list[Heartbeat]:
        """Return the engines' current heartbeats. A dead engine has the state ``gone`` until it runs again; an engine
        that has not run yet has no heartbeat.
        """
        policy = [self._heartbeat(engine, "rollout", member) for engine, member in self._pairs()]
        auxiliary = [self._heartbeat(engine, "auxiliary", None) for engine in self.auxiliaries]
        return [beat for beat in (*policy, *auxiliary) if beat is not None]

    # -- private

    def _all(self) -> list[EngineHost | Any]:
        return [*self.engines, *self.auxiliaries]

    def _pairs(self) -> list[tuple[EngineHost | Any, MemberDriver]]:
        return list(zip(self.engines, self._members, strict=True))

    def _heartbeat(self, engine: EngineHost | Any, role: ModelRole, member: MemberDriver | None) -> Heartbeat | None:
        snapshot = engine.snapshot
        version = snapshot.version if member is None else member.version
        if snapshot.alive:
            self._started_ids.add(snapshot.id)
        elif snapshot.id not in self._started_ids:
            return None
        if not snapshot.alive:
            state, waits_for = "gone", None
        elif member is None:
            serves = snapshot.state == "current"
            state, waits_for = ("working", None) if serves else ("holding", f"its server ({snapshot.state})")
        else:
            state, waits_for = ("working", None) if version else ("holding", self._missing_weights(snapshot.id))
        return Heartbeat(
            role="engine",
            id=snapshot.id,
            seq=self._agent.heartbeat_seq,
            incarnation=self._agent.incarnation,
            lease=ENGINE_LEASE,
            state=state,
            waits_for=waits_for,
            detail=snapshot.detail(role).model_copy(
                update={"version": version, "unanswered": snapshot.unanswered(asyncio.get_running_loop().time())}
            ),
            **self._agent.compatibility.fields(self._agent.peers.uptime),
        )

    def _remote_versions(self) -> list[Version]:
        """Return the versions that the engines of other hosts serve."""
        own_ids = {engine.snapshot.id for engine in self.engines}
        models = [announced_model(beat) for beat in self._agent.peers.alive("engine") if beat.id not in own_ids]
        return [
            model.version
            for model in models
            if model is not None and model.role == "rollout" and model.version is not None
        ]

    async def _receive(self, message: Any, delivery: Any) -> None:
        for member in self._members:
            await member.receive_event(message, delivery)

    async def _watch(self) -> None:
        """Call :meth:`_refresh` after each change of a member, until cancelled.

        That an engine lost its weights during a sync attempt becomes visible only at the end of the attempt.
        """
        while True:
            await self.changed.wait()
            self._refresh()

    async def _compare_tokenizers(self) -> None:
        """Compare the engines' fingerprints of tokenizer and chat template with the trainer's, until cancelled.

        The trainer's fingerprint is in its heartbeats.

        Raises:
            FatalError: The fingerprints differ, so that the trainer would send no weights to this host's engines.
        """
        while True:
            trained = (self._agent.peers.trainer.sync or GateStatus()).fingerprint
            for engine in self.engines:
                served = engine.snapshot.fingerprint
                if trained and served and served != trained:
                    raise FatalError(
                        f"engine {engine.snapshot.id} has another tokenizer or chat template (fingerprint {served}) "
                        f"than the trainer ({trained}), so it would get no weights: start the hosts of engines and "
                        "the trainer with the same model.model_path and the same files in it"
                    )
            await self._agent.peers.changed.wait()

    async def _rejoin_unlisted(self) -> None:
        """Let an engine's member join again after each heartbeat of a trainer that does not list the engine, until
        cancelled.

        A join that was sent before the trainer subscribed is lost.
        """
        answered: set[tuple[str, int]] = set()
        while True:
            beats = {(beat.incarnation, beat.seq): beat.detail for beat in self._agent.peers.alive("trainer")}
            for key in beats.keys() - answered:
                detail = beats[key]
                listed = detail.sync.members if isinstance(detail, TrainerStatus) and detail.sync else None
                for engine, member in self._pairs():
                    if listed is not None and engine.snapshot.id not in listed:
                        member.join_again()
            answered = set(beats)
            await self._agent.peers.changed.wait()

    def _refresh(self) -> None:
        """Update the members of engines that started, died, or lost their weights, and wake the agent."""
        for engine, member in self._pairs():
            snapshot = engine.snapshot
            if snapshot.alive and not member.engine_ready:
                member.engine_up(snapshot.version, snapshot.fingerprint or None)
                self._agent.heartbeat_now()
            elif not snapshot.alive and member.engine_ready:
                member.engine_down()
                self._agent.heartbeat_now()
            elif snapshot.state in {"empty", "dirty"} and member.idle and member.version is not None:
                member.engine_up(None, snapshot.fingerprint or None)
            elif snapshot.state == "current" and snapshot.alive and member.idle and member.version is None:
                # a transfer was aborted before it changed any weight
                member.engine_up(snapshot.version, snapshot.fingerprint or None)
        if any(engine.snapshot.alive != (engine.snapshot.id in self._started_ids) for engine in self.auxiliaries):
            self._agent.heartbeat_now()
        self._agent.woken.notify()

    def _reported(self, engine: str) -> MemberStatus:
        """Return the member status of an engine in the trainer's heartbeat, an empty status if it is not listed."""
        sync = self._agent.peers.trainer.sync or GateStatus()
        return sync.members.get(engine) or MemberStatus()

    def _missing_weights(self, engine: str) -> str:
        quarantined = self._reported(engine).state == "quarantined"
        return "weights that pass the canary check: it is quarantined" if quarantined else "weights"

    def _committed(self, engine: str) -> Key | None:
        """Return the version last committed at an engine, with epoch and attempt of the sync, from the trainer's
        heartbeat. Return None if the heartbeat has none.
        """
        reported = self._reported(engine)
        return (reported.version, *reported.given) if reported.version and reported.given else None

    def _handle_commit(self, version: Version | None, progress: int) -> None:
        self._on_commit(version, progress)
        self._agent.heartbeat_soon()

    async def _publish(self, event: SyncEvent) -> None:
        await self._agent.publish("sync", f"weights.{event.verb}", event)


async def _hold(start: asyncio.Task[None], host: EngineHost | Any) -> None:
    """Renew the lease of an engine from the end of its start until cancelled; return if the start failed."""
    await asyncio.wait({start})
    if not start.cancelled() and start.exception() is None:
        await host.hold()


async def receive_broadcast(
    engines: Sequence[EngineHost | Any], config: Config, address: str, port: int, tensors: Sequence[Any]
) -> None:
    """Connect every engine to rank 0 at ``address:port`` and receive one broadcast of ``tensors``, without the gate.

    Args:
        engines: Hosts of engines, in the order of their ranks. Ranks begin at 1, and each engine has
            ``config.engine_ranks`` of them.
        config: Configuration of the run.
        address: Address of the sender's TCPStore.
        port: Port of the sender's TCPStore.
        tensors: ``(name, dtype, shape)`` of each tensor, in the order of the broadcast.
    """
    sync, ranks = config.synchronizer, config.engine_ranks
    copies = source_copies("collective", ranks * len(engines))
    seconds = transfer_seconds(sync.sync_timeout, manifest_bytes(tensors), copies)
    spec = {
        "host": address,
        "port": port,
        "bucket_bytes": sync.bucket_bytes,
        "epoch": 0,
        "attempt": 0,
        "world": ranks * len(engines) + 1,
        "seconds": seconds,
        "step_seconds": sync.sync_timeout,
        "manifest": list(tensors),
        "canary": {},
    }

    async def receive(rank: int, engine: EngineHost | Any) -> None:
        await engine.pause(sync.sync_timeout)
        await engine.receive({**spec, "rank": rank}, seconds + 5.0)

    async with asyncio.TaskGroup() as group:
        for number, engine in enumerate(engines):
            group.create_task(receive(1 + ranks * number, engine))
