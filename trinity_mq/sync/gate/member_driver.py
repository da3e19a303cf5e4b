"""Driver of a gate member: joins over the bus, and executes the state machine's commands on its engine."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog

from trinity_mq.bus import Delivery
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.messages import Message, SyncEvent, Version
from trinity_mq.runtime.notify import Notifier
from trinity_mq.sync.gate.member import Command, Commit, Member, MemberStage, Pause, Receive, Rejoin, Resume
from trinity_mq.sync.gate.records import Key, first_rank, world_size
from trinity_mq.telemetry.trace import span

log = structlog.get_logger(__name__)

MEMBER_LEASE = 15.0
"""Seconds without a join event after which an engine is no longer counted as a member of the sync. Members join three
times in this time, so that two lost events do no harm; a dead engine delays a sync by no more than this.
"""
TICK = 1.0
COORDINATOR_VERBS = ("prepare", "go", "commit", "abort")
"""Verbs of the events that the coordinator sends to members."""


class EnginePort(Protocol):
    """Operations of an engine's host that the gate uses."""

    async def pause(self, timeout: float) -> None:
        """Stop new batch steps; return when the running batch step has ended."""

    async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Receive the weights as described by ``spec``. Return the canary's ``logprobs``, and ``seconds`` by
        operation.
        """

    async def commit(self, version: Version, progress: int) -> None:
        """Stamp the version and serve."""

    async def resume(self) -> None:
        """Cut off a running transfer, and serve the previous version again if its weights are untouched."""


class MemberDriver:
    """Keeps one engine in the gate."""

    def __init__(
        self,
        *,
        name: str,
        lease: float,
        engine: EnginePort,
        publish: Callable[[SyncEvent], Awaitable[None]],
        last_commit: Callable[[], Key | None],
        ranks: int = 1,
    ) -> None:
        """Create the driver.

        ``last_commit`` returns version, epoch and attempt of the last commit at this engine, as the trainer's heartbeat
        reports them; None if it reports no commit. ``ranks`` is the number of ranks of the engine in a broadcast.
        """
        self.machine = Member(name)
        self.lease = lease
        self.fingerprint: str | None = None
        self.engine_ready = False
        """Whether the engine is up. Only a running engine joins."""
        self.on_commit: Callable[[Version | None, int], None] = lambda version, progress: None
        self.changed = Notifier()
        """Notified when stage or version may have changed."""
        self._engine, self._publish, self._last_commit = engine, publish, last_commit
        self._ranks = ranks
        self._batch: int | str | None = None
        """The batch that made the weights of the current attempt, for traces."""
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._unperformed = 0
        self._join_now = asyncio.Event()
        self._resume_seconds: float | None = None
        """Seconds from the latest commit to serving, until reported in a join."""

    @property
    def version(self) -> Version | None:
        return self.machine.version

    @property
    def idle(self) -> bool:
        """Whether no attempt is in progress, and the engine has processed the end of the last attempt."""
        return self.machine.stage is MemberStage.IDLE and not self._unperformed

    def engine_up(self, version: Version | None, fingerprint: str | None) -> None:
        """Record that the engine answers and holds ``version`` (None: no trustworthy weights)."""
        if not self.engine_ready:
            self.machine.life = uuid.uuid4().hex
        self.machine.version, self.fingerprint, self.engine_ready = version, fingerprint, True
        self._join_now.set()

    def join_again(self) -> None:
        """Report the engine's version again, because the coordinator does not know this member."""
        if self.engine_ready:
            self._join_now.set()

    def engine_down(self) -> None:
        self.engine_ready = False
        self._enqueue(self.machine.lost_engine())

    async def run(self) -> None:
        """Serve the gate until cancelled. The caller passes events to :meth:`receive_event`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._perform(group), name="sync-commands")
            group.create_task(self._keep_joined(), name="sync-joins")
            group.create_task(self._tick(), name="sync-clock")

    async def leave(self) -> None:
        await self._publish(SyncEvent(verb="leave", sender=self.machine.name, life=self.machine.life))

    # -- private methods

    def _enqueue(self, commands: list[Command]) -> None:
        self._unperformed += len(commands)
        for command in commands:
            self._commands.put_nowait(command)
        self.changed.notify()

    async def receive_event(self, message: Message, delivery: Delivery) -> None:
        if not isinstance(message, SyncEvent):
            return
        now = asyncio.get_running_loop().time()
        if message.verb == "prepare":
            if self.engine_ready:
                self._batch = message.detail.get("batch")
                self._enqueue(self.machine.prepare(message, now))
        elif message.verb == "go":
            self._enqueue(self.machine.go(message, now))
        elif message.verb == "abort":
            self._enqueue(self.machine.abort(message))
        elif message.verb == "commit":
            commands = self.machine.commit(message)
            self._enqueue(commands)
            if not commands and message.progress is not None:
                # not our attempt, or a commit without a transfer: only the progress changes
                self.on_commit(None, message.progress)

    async def _perform(self, group: asyncio.TaskGroup) -> None:
        while True:
            command = await self._commands.get()
            if isinstance(command, SyncEvent):
                await self._publish(command)
            elif isinstance(command, Pause):
                group.create_task(self._pause(command), name="pause")
            elif isinstance(command, Receive):
                group.create_task(self._receive(command), name="receive")
            elif isinstance(command, Rejoin):
                self._join_now.set()
            else:
                await self._serve(command)
            self._unperformed -= 1
            self.changed.notify()

    async def _serve(self, command: Commit | Resume) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if isinstance(command, Commit):
                with span("commit at engine", self._batch, version=command.version, wait=True):
                    await self._engine.commit(command.version, command.progress)
            else:
                await self._engine.resume()
        except Exception as error:
            # The host detects a dead engine by itself. The weights of a running engine that refuses are not
            # trustworthy.
            log.warning("engine_command_failed", command=type(command).__name__, error=str(error))
            self.machine.version = None
            self._join_now.set()
            return
        if isinstance(command, Commit):
            self._resume_seconds = loop.time() - began
            self._join_now.set()
            self.on_commit(command.version, command.progress)

    async def _pause(self, command: Pause) -> None:
        if command.key != self.machine.key:
            return  # that attempt is over
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with span("pause engine", self._batch, version=command.key[0], wait=True):
                await self._engine.pause(command.seconds)
        except Exception as error:
            self._enqueue(self.machine.broke(command.key, f"pause: {error}", touched=False))
        else:
            self._enqueue(self.machine.paused(command.key, loop.time() - began))

    async def _receive(self, command: Receive) -> None:
        if command.key != self.machine.key:
            return  # that attempt is over; this transfer would block the next attempt's
        prepare = command.prepare
        spec = {
            **prepare.rendezvous,
            "version": None if prepare.version is None else list(prepare.version),
            "epoch": prepare.epoch,
            "attempt": prepare.attempt,
            "rank": first_rank(prepare, self.machine.name),
            "world": world_size(prepare),
            "seconds": command.seconds,
            "manifest": prepare.manifest,
            "canary": prepare.canary,
            "batch": self._batch,
        }
        try:
            with span("have engine receive", self._batch, version=prepare.version, wait=True):
                answer = dict(await self._engine.receive(spec, command.seconds + 5.0))
        except Exception as error:
            touched = isinstance(error, ReceiveFailed) and error.touched
            self._enqueue(self.machine.broke(command.key, f"receive: {error}", touched=touched))
        else:
            seconds = answer.pop("seconds", None)
            self._enqueue(self.machine.received(command.key, answer, seconds))

    async def _keep_joined(self) -> None:
        while True:
            self._join_now.clear()
            if self.engine_ready:
                await self._publish(self._join_event())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.lease / 3):
                    await self._join_now.wait()

    def _join_event(self) -> SyncEvent:
        detail: dict[str, Any] = {"fingerprint": self.fingerprint} if self.fingerprint else {}
        if self._resume_seconds is not None:
            detail["resume"], self._resume_seconds = self._resume_seconds, None
        machine = self.machine
        return SyncEvent(
            verb="join",
            sender=machine.name,
            life=machine.life,
            version=machine.version,
            seconds=self.lease,
            ranks={} if self._ranks == 1 else {machine.name: self._ranks},
            detail=detail,
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._enqueue(self.machine.tick(asyncio.get_running_loop().time(), self._last_commit()))
