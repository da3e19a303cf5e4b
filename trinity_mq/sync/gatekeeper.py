"""The coordinator on the bus: takes members' events in, performs the machine's commands, runs tries until a version is
committed.
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
from trinity_mq.messages import Message, SyncEvent, Version
from trinity_mq.runtime.notify import Notifier
from trinity_mq.sync.coordinator import (
    AbandonCollective,
    Command,
    Committed,
    Coordinator,
    Failed,
    Phase,
    Send,
    StartCollective,
)

log = structlog.get_logger(__name__)

CANARY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest allowed difference of a canary token's logprob between trainer and engine, by dtype of the weights. In
bfloat16 0.07 was seen between two sound sides of a sharply trained tiny model."""


RETRY_PAUSE = 0.5
"""Seconds after a failed try, times the failures of this version so far."""
LONGEST_PAUSE = 10.0


class Channel(Protocol):
    """How weights travel to the members that entered the barrier."""

    async def rendezvous(self) -> dict[str, Any]:
        """Return what a member needs to find us."""

    async def broadcast(self, tensors: Any, manifest: Any, epoch: int, attempt: int, world: int) -> None:
        """Send the tensors to ``world - 1`` members, or raise."""

    def abandon(self) -> None:
        """Drop everything that a failed try has touched."""


class Weights(Protocol):
    """Whose weights are sent; read between train steps only."""

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return name, dtype and shape of every tensor, in order."""

    async def weights(self) -> Any:
        """Return the tensors by name, in the same order."""

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the policy's own logprobs of the canary prompt."""


class Gatekeeper:
    """Leads the weight sync of one trainer."""

    def __init__(
        self,
        *,
        name: str,
        config: SyncConfig,
        dtype: str,
        max_wait: float,
        weights: Weights,
        channel: Channel,
        canary: Sequence[int],
        publish: Callable[[SyncEvent], Awaitable[None]],
        fingerprint: str | None = None,
    ) -> None:
        self.config = config
        self.machine = Coordinator(name=name, timeout=config.sync_timeout, lease=config.member_lease, max_wait=max_wait)
        self.changed = Notifier()
        """Notified when membership, phase or committed version may have changed."""
        self.syncs = 0
        self.aborts = 0
        self.last_seconds = 0.0
        self._tolerance = CANARY_TOLERANCE.get(dtype, 1e-4)
        self._weights, self._channel, self._canary = weights, channel, list(canary)
        self._publish = publish
        self._fingerprint = fingerprint
        self._own_canary: list[float] = []
        self._outcome: asyncio.Future[Committed | Failed] | None = None
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._rescheduled = Notifier()

    @property
    def phase(self) -> str:
        """The phase of the try under way."""
        return self.machine.phase.value

    @property
    def has_members(self) -> bool:
        """Somebody is there to receive weights."""
        return bool(self.machine.members)

    @property
    def someone_is_behind(self) -> bool:
        """A member does not hold the committed version."""
        return bool(self.machine.stale_members())

    async def run(self, feed: Consumer, each: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Serve the gate until cancelled; ``each`` is the agent's own loop over a feed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(each(feed, self._heard), name="sync-events")
            group.create_task(self._perform(group), name="sync-commands")
            group.create_task(self._tick(), name="sync-clock")

    async def sync(self, version: Version, progress: int) -> None:
        """Commit ``version`` at every present member, however many tries that takes; waits for a member when there is
        none.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        for failures in itertools.count(1):
            while not self.has_members:
                await self.changed.wait()
            self._own_canary = await self._weights.canary_logprobs(self._canary)
            prepare = SyncEvent(
                verb="prepare",
                sender=self.machine.name,
                manifest=await self._weights.manifest(),
                rendezvous=await self._channel.rendezvous(),
                canary={"tokens": self._canary},
            )
            if not self.has_members:
                continue
            self._outcome = loop.create_future()
            self._enqueue(self.machine.start(version, progress, prepare, loop.time()))
            try:
                outcome = await self._outcome
            except asyncio.CancelledError:
                # members must not stand still until their leases end
                self._enqueue(self.machine.cancel("the trainer has given this try up"))
                raise
            finally:
                self._outcome = None
            if isinstance(outcome, Committed):
                self.syncs += 1
                self.last_seconds = loop.time() - started
                return
            self.aborts += 1
            log.warning("sync_aborted", version=version, reason=outcome.reason, lost=outcome.lost)
            # time for those who failed to join again, and no busy loop where every try fails at once
            await asyncio.sleep(min(LONGEST_PAUSE, RETRY_PAUSE * failures))

    async def settled(self) -> None:
        """Return when every command is performed, such as telling the members of a try given up."""
        await self._commands.join()

    async def confirm_unchanged(self, progress: int) -> None:
        """Commit the new progress with the weights everybody has."""
        self._enqueue(self.machine.unchanged(progress))
        await self.settled()

    # -- inside

    def _enqueue(self, commands: list[Command]) -> None:
        for command in commands:
            self._commands.put_nowait(command)
        self._rescheduled.notify()
        self.changed.notify()

    async def _heard(self, message: Message, delivery: Delivery) -> None:
        if not isinstance(message, SyncEvent):
            return
        now = asyncio.get_running_loop().time()
        machine = self.machine
        if message.verb == "join":
            fingerprint = message.detail.get("fingerprint")
            if self._fingerprint and fingerprint and fingerprint != self._fingerprint:
                log.error("fingerprint_differs", member=message.sender, theirs=fingerprint, ours=self._fingerprint)
                return
            self._enqueue(
                machine.join(message.sender, message.version, now, lease=message.seconds, fingerprint=fingerprint)
            )
        elif message.verb == "leave":
            self._enqueue(machine.leave(message.sender, now))
        elif message.verb == "ready":
            self._enqueue(machine.ready(message, now))
        elif message.verb == "wait":
            self._enqueue(machine.wait(message, now))
        elif message.verb == "applied":
            self._enqueue(machine.applied(message, self._canary_error(message), now))
        elif message.verb == "failed":
            self._enqueue(machine.failed(message))

    def _canary_error(self, applied: SyncEvent) -> str | None:
        theirs = applied.canary.get("logprobs")
        if not isinstance(theirs, list) or len(theirs) != len(self._own_canary):
            return f"{len(self._own_canary)} logprobs wanted, got {theirs!r:.80}"
        worst = max((abs(a - b) for a, b in zip(theirs, self._own_canary, strict=True)), default=0.0)
        if not worst <= self._tolerance:
            return f"logprobs differ by {worst:.2e}, allowed {self._tolerance:.0e}"
        return None

    async def _perform(self, group: asyncio.TaskGroup) -> None:
        while True:
            command = await self._commands.get()
            if isinstance(command, Send):
                await self._publish(command.event)
            elif isinstance(command, StartCollective):
                group.create_task(self._collective(command), name="collective")
            elif isinstance(command, AbandonCollective):
                self._channel.abandon()
            elif self._outcome is not None and not self._outcome.done():
                self._outcome.set_result(command)
            self._commands.task_done()
            self.changed.notify()

    async def _collective(self, start: StartCollective) -> None:
        try:
            tensors, manifest = await self._weights.weights(), await self._weights.manifest()
            await self._channel.broadcast(tensors, manifest, start.epoch, start.attempt, len(start.members) + 1)
        except Exception as error:
            self._enqueue(self.machine.collective_failed(start.epoch, start.attempt, str(error)))
        else:
            self._enqueue(self.machine.collective_done(start.epoch, start.attempt, asyncio.get_running_loop().time()))

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = self.machine.next_deadline
            await self._rescheduled.wait(None if math.isinf(due) else max(0.0, due - loop.time()))
            if loop.time() >= self.machine.next_deadline:
                self._enqueue(self.machine.tick(loop.time()))

    @property
    def idle(self) -> bool:
        """No try is under way."""
        return self.machine.phase is Phase.IDLE
