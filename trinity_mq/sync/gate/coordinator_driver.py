"""Driver of the gate's coordinator: receives members' events, executes the state machine's commands and retries until a
version is committed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import structlog

from trinity_mq.bus import Consumer, Delivery
from trinity_mq.config import SyncConfig
from trinity_mq.messages import GateStatus, MemberStatus, Message, SyncEvent, Version
from trinity_mq.runtime.notify import Notifier
from trinity_mq.sync.channels.base import CatchUpSource, Channel, ChannelError, Manifest
from trinity_mq.sync.gate.canary import Canary
from trinity_mq.sync.gate.coordinator import Coordinator
from trinity_mq.sync.gate.member_driver import MEMBER_LEASE
from trinity_mq.sync.gate.records import (
    AbandonCollective,
    AttemptTimes,
    Command,
    Committed,
    Failed,
    Phase,
    StartCollective,
)
from trinity_mq.telemetry.trace import current_batch, span

log = structlog.get_logger(__name__)

RETRY_PAUSE = 0.5
"""Backoff in seconds after a failed attempt, multiplied by the number of failures of this version so far."""
LONGEST_PAUSE = 10.0


class Weights(Protocol):
    """Source of the weights to send; read only between train steps."""

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return name, dtype and shape of every tensor, in order."""

    async def weights(self) -> Any:
        """Return the tensors by name, in the order of the manifest."""

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the policy's own logprobs of the canary prompt."""


class CoordinatorDriver:
    """Leads the weight sync of one trainer."""

    def __init__(
        self,
        *,
        name: str,
        config: SyncConfig,
        dtype: str,
        weights: Weights,
        channel: Channel,
        canary: Sequence[int],
        publish: Callable[[SyncEvent], Awaitable[None]],
        may_begin: Callable[[], Awaitable[None]] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Create the driver. ``may_begin`` is awaited before each attempt; it returns once no open evaluation needs the
        committed version.
        """
        self.machine = Coordinator(name=name, timeout=config.sync_timeout, lease=MEMBER_LEASE)
        self.changed = Notifier()
        """Notified when membership, phase or committed version may have changed."""
        self.syncs = 0
        self.aborts = 0
        self.trouble = ""
        """Reason of the last aborted attempt; empty after a commit."""
        self.last_seconds = 0.0
        self._judge = Canary(dtype)
        self._weights, self._channel, self._canary = weights, channel, list(canary)
        self._publish = publish
        self._may_begin, self.fingerprint = may_begin, fingerprint
        self._own_canary: list[float] = []
        """The policy's own logprobs of the canary, under the weights of the current attempt."""
        self._committed_canary: list[float] = []
        self._committed_batch: int | str | None = None
        """The batch whose train step made the committed weights, for traces. None: no batch of this process."""
        self._catch_up_source: CatchUpSource | None = None
        """Source for the catch-up fetch of a single member."""
        self._syncing = False
        self._outcome: asyncio.Future[Committed | Failed] | None = None
        self._last = AttemptTimes()
        """Durations of the last committed attempt. Some members possibly do not serve its weights yet."""
        self._in_transfer: tuple[Any, Any] = ([], [])
        """Tensors and manifest of the current attempt."""
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._rescheduled = Notifier()

    @property
    def phase(self) -> str:
        return self.machine.phase.value

    @property
    def has_members(self) -> bool:
        """Whether any member can receive weights."""
        return bool(self.machine.members)

    @property
    def needs_full_sync(self) -> bool:
        """Whether a healthy member (any member if none is healthy) lacks the committed version and can only get it in a
        sync of all members.
        """
        if self._may_catch_up:
            return False
        stale, healthy = self.machine.stale_members(), set(self.machine.members) - set(self.machine.quarantined())
        return bool(stale) and (not healthy or bool(healthy & set(stale)))

    @property
    def _may_catch_up(self) -> bool:
        return self._catch_up_source is not None and self._catch_up_source[0] == self.machine.committed

    def report(self) -> GateStatus:
        """Return the gate's part of the trainer's heartbeat: members, their versions, and the last sync by its
        phases.
        """
        machine = self.machine
        return GateStatus(
            fingerprint=self.fingerprint or "",
            version=machine.committed,
            members={
                name: MemberStatus(version=member.version, given=member.given, state=machine.state_of(name))
                for name, member in machine.members.items()
            },
            phases=self.phases,
            seconds=self.last_seconds,
            syncs=self.syncs,
            aborts=self.aborts,
            trouble=self.trouble,
            pulls=machine.pulled,
            canary_failures=machine.canary_failures,
            quarantined=len(machine.quarantined()),
            num_bytes=machine.num_bytes,
            method=machine.method,
            deadline=machine.transfer_timeout if machine.num_bytes else 0.0,
        )

    def metrics(self) -> dict[str, float]:
        """Return the report as metrics: the current numbers of members and of quarantined members, other counts since
        the trainer's start, and the last sync's phases in milliseconds.
        """
        report = self.report()
        names = ("aborts", "pulls", "canary_failures", "quarantined")
        counts = {name: float(getattr(report, name)) for name in names}
        counts["members"] = float(len(report.members))
        return {f"sync/{name}": value for name, value in counts.items()} | {
            f"sync/{name}_ms": value for name, value in self.phases.items()
        }

    async def run(self, feed: Consumer, each: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Serve the gate until cancelled, then close the channel. ``each`` is the agent's consumer loop over a feed."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(each(feed, self._receive_event), name="sync-events")
                group.create_task(self._perform(group), name="sync-commands")
                group.create_task(self._tick(), name="sync-clock")
                group.create_task(self._repair(), name="sync-repairs")
        finally:
            await self._channel.close()

    async def sync(self, version: Version, progress: int) -> None:
        """Commit ``version`` at every present member, and retry until an attempt succeeds. Wait for a member if no
        member is present.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._syncing = True
        try:
            for failures in itertools.count(1):
                while not self.has_members:
                    await self.changed.wait()
                held_since = loop.time()
                if self._may_begin is not None:
                    await self._may_begin()
                try:
                    outcome = await self._try(version, progress, loop.time() - held_since)
                except ChannelError as error:
                    outcome = Failed(version, str(error), ())
                if outcome is None:
                    continue
                if isinstance(outcome, Committed):
                    self.syncs += 1
                    self.trouble = ""
                    self.last_seconds = loop.time() - started
                    return
                self.aborts += 1
                self.trouble = outcome.reason
                log.warning("sync_aborted", version=version, reason=outcome.reason, lost=outcome.lost)
                # time for failed members to join again, and no busy loop if every attempt fails at once
                await asyncio.sleep(min(LONGEST_PAUSE, RETRY_PAUSE * failures))
        finally:
            self._syncing = False
            self.changed.notify()

    async def _try(self, version: Version, progress: int, held: float) -> Committed | Failed | None:
        """Run one attempt that was delayed for ``held`` seconds; return None if no member is left.

        Raises:
            ChannelError: The weights cannot be prepared for the transfer.
        """
        loop = asyncio.get_running_loop()
        with span("score canary", version=version, threads=True):
            self._own_canary = await self._weights.canary_logprobs(self._canary)
        with span("offer weights", version=version, threads=True):
            tensors, manifest = await self._weights.weights(), await self._weights.manifest()
            rendezvous = await self._channel.offer(version, tensors, manifest)
            prepare = self._prepare(rendezvous, manifest, current_batch())
        if not self.has_members:
            return None
        self._outcome, self._in_transfer = loop.create_future(), (tensors, manifest)
        self._enqueue(self.machine.start(version, progress, prepare, loop.time(), held=held))
        try:
            outcome = await self._outcome
        except asyncio.CancelledError:
            # members must not stay paused until their leases end
            self._enqueue(self.machine.cancel("the trainer has cancelled this attempt"))
            raise
        finally:
            self._outcome = None
        if isinstance(outcome, Committed):
            self._last.trace(version)
            with span("keep weights", version=version, threads=True):
                await self._prepare_catch_ups(version, tensors, manifest)
        return outcome

    async def _prepare_catch_ups(self, version: Version, tensors: Any, manifest: Any) -> None:
        """Make the committed version available for catch-up fetches."""
        self._committed_canary, self._committed_batch, self._catch_up_source = self._own_canary, current_batch(), None
        try:
            await self._channel.committed(version, tensors, manifest)
            self._catch_up_source = await self._channel.catch_up_source()
        except ChannelError as error:
            log.warning("catch_up_source_failed", version=version, reason=str(error))
        if not self._may_catch_up:
            self.machine.release_quarantined()  # without a source the next sync is the only way to update them

    async def settled(self) -> None:
        """Return when every command is executed, including the abort of a cancelled attempt."""
        await self._commands.join()

    async def confirm_unchanged(self, progress: int) -> None:
        """Commit a new progress, the number of batches that the trainer has consumed, for the committed version."""
        self._enqueue(self.machine.commit_progress(progress))
        await self.settled()

    # -- private methods

    def _prepare(self, rendezvous: dict[str, Any], manifest: Manifest, batch: int | str | None) -> SyncEvent:
        return SyncEvent(
            verb="prepare",
            sender=self.machine.name,
            manifest=manifest,
            rendezvous=rendezvous,
            canary={"tokens": self._canary},
            detail={} if batch is None else {"batch": batch},
        )

    def _enqueue(self, commands: list[Command]) -> None:
        if self.machine.phases.committed is not None:
            self._last = self.machine.phases
        for command in commands:
            self._commands.put_nowait(command)
        self._rescheduled.notify()
        self.changed.notify()

    async def _receive_event(self, message: Message, delivery: Delivery) -> None:
        if not isinstance(message, SyncEvent):
            return
        now = asyncio.get_running_loop().time()
        machine = self.machine
        if message.verb == "join":
            theirs = message.detail.get("fingerprint")
            if self.fingerprint and theirs and theirs != self.fingerprint:
                # the host sees the difference in our heartbeat, and exits
                log.error("fingerprint_differs", member=message.sender, theirs=theirs, ours=self.fingerprint)
                return
            ranks = message.ranks.get(message.sender, 1)
            self._enqueue(
                machine.join(
                    message.sender, message.version, now, lease=message.seconds, life=message.life, ranks=ranks
                )
            )
            self._last.resumed(message)
        elif message.verb == "leave":
            self._enqueue(machine.leave(message.sender, now, life=message.life))
        elif message.verb == "ready":
            self._enqueue(machine.ready(message, now))
        elif message.verb == "applied":
            self._enqueue(machine.applied(message, self._canary_error(message), now))
        elif message.verb == "failed":
            self._enqueue(machine.failed(message, now))

    def _canary_error(self, applied: SyncEvent) -> str | None:
        machine = self.machine
        if not machine.expects(applied):
            return None  # ignored anyway, and must not be judged by another version's logprobs
        ours = self._own_canary if applied.epoch else self._committed_canary
        problem = self._judge.problem(applied.sender, applied.life, applied.canary.get("logprobs"), ours)
        if problem is not None:
            log.warning("canary_failed", member=applied.sender, version=applied.version, reason=problem)
        return problem

    async def _perform(self, group: asyncio.TaskGroup) -> None:
        while True:
            command = await self._commands.get()
            if isinstance(command, SyncEvent):
                await self._publish(command)
            elif isinstance(command, StartCollective):
                group.create_task(self._collective(command), name="collective")
            elif isinstance(command, AbandonCollective):
                self._channel.abandon()
            elif isinstance(command, Committed) and command.pulled:
                log.info("member_caught_up", member=command.members[0], version=command.version)
            elif self._outcome is not None and not self._outcome.done():
                self._outcome.set_result(command)
            self._commands.task_done()
            self.changed.notify()

    async def _collective(self, start: StartCollective) -> None:
        try:
            tensors, manifest = self._in_transfer
            await self._channel.broadcast(tensors, manifest, start.epoch, start.attempt, start.world)
        except Exception as error:
            self._enqueue(self.machine.collective_failed(start.epoch, start.attempt, str(error)))
        else:
            self._enqueue(self.machine.collective_done(start.epoch, start.attempt, asyncio.get_running_loop().time()))

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = self.machine.next_deadline(loop.time())
            await self._rescheduled.wait(None if math.isinf(due) else max(0.0, due - loop.time()))
            if loop.time() >= due:
                self._enqueue(self.machine.tick(loop.time()))

    async def _repair(self) -> None:
        """Make members that are behind fetch the committed version at once, each alone."""
        loop = asyncio.get_running_loop()
        while True:
            await self.changed.until(lambda: bool(self._due_fetches(loop.time())))
            try:
                source = await self._channel.catch_up_source()
            except ChannelError as error:
                log.warning("catch_up_source_failed", reason=str(error))
                source = None
            if source is None or source[0] != self.machine.committed:
                self._catch_up_source = None
                self.changed.notify()
                continue
            version, rendezvous, manifest = source
            prepare = self._prepare(rendezvous, manifest, self._committed_batch)
            for name in self._due_fetches(loop.time()):
                log.info("member_catches_up", member=name, version=version)
                self._enqueue(self.machine.pull(name, prepare, loop.time()))

    def _due_fetches(self, now: float) -> tuple[str, ...]:
        """Return the members that should fetch now. During a sync these are only members that came after the start of
        the current attempt: members in the attempt are about to get a newer version. Quarantined members, and all
        members between two attempts, wait.
        """
        if not self._may_catch_up:
            return ()
        due = self.machine.due_catch_ups(now)
        if not self._syncing:
            return due
        quarantined = self.machine.quarantined()
        return tuple(name for name in due if self.machine.phase is not Phase.IDLE and name not in quarantined)

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds of the last committed sync, by phase; see :data:`trinity_mq.sync.gate.records.PHASES`."""
        return self._last.milliseconds()
