"""Base class of the daemons: bus connection, heartbeats, commands and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, ClassVar

import structlog

from trinity_mq.bus import Bus, Consumer, Delivery, Lock, LockHeld, MessageTooLarge, Topology
from trinity_mq.config import Config
from trinity_mq.messages import OWN, Compatibility, ControlEvent, ExplorerStatus, Heartbeat, Message, Metrics, Role
from trinity_mq.messages.status import STATUS_BY_ROLE, AnyStatus
from trinity_mq.roles import ROLES
from trinity_mq.runtime.deliveries import (
    acknowledge,
    acknowledge_foreign,
    decode_or_dead_letter,
    envelope,
    handle_or_set_aside,
)
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import (
    HEARTBEAT_INTERVAL,
    HEARTBEAT_LEASE,
    MEETING_SECONDS,
    HeartbeatPublisher,
    Peers,
    heartbeat_patterns,
)
from trinity_mq.runtime.process import is_run_over, other_run_error, read_run_id
from trinity_mq.telemetry import MetricsWriter

log = structlog.get_logger(__name__)

__all__ = ["HEARTBEAT_INTERVAL", "HEARTBEAT_LEASE", "Agent"]

LOCK_RETRY = 2.0
"""Seconds between two attempts to take a lock that another agent holds."""
TAKEN_OVER = "another {0.role} of this run may have taken over while {0.id} was disconnected"


class Agent(ABC):
    """Base class of the daemons.

    A subclass implements :meth:`serve`, which returns when its work is done or soon after :attr:`draining` is set. It
    overrides :meth:`detail`, which returns the status in each heartbeat.
    """

    role: ClassVar[Role]
    compatibility: ClassVar[Compatibility] = OWN
    """The message schemas that the agent reads and writes."""

    def __init__(
        self, config: Config, *, bus: Bus, topology: Topology, agent_id: str, metrics: MetricsWriter | None = None
    ) -> None:
        self.config, self.bus, self.topology, self.id = config, bus, topology, agent_id
        self._metrics = metrics
        self._unsent: asyncio.Queue[Metrics] = asyncio.Queue()
        self.incarnation = uuid.uuid4().hex[:12]
        self.peers = Peers(self.compatibility)
        self._met = bus.met = asyncio.Event()
        self.draining = asyncio.Event()
        self.serving = asyncio.Event()
        """Set once the agent is connected, subscribed and about to serve."""
        self.run_folder: Path | None = None
        """The run's folder, with the run's id and, after the end of the run, the marker of a finished run: an agent
        that was not started or not connected at that moment has missed the explorer's last heartbeat. None: an
        explorer, which does not stop at the marker."""
        self._reconnected = asyncio.Event()
        self.woken = Notifier()
        """Notified on every change that an agent's main loop may wait for."""
        self.state = "starting"
        self.heartbeat_seq = 0
        self.lock: Lock | None = None
        """The run's lock that this agent holds while it acts. None: it does not hold a lock."""
        self._drain_within = math.inf
        self.waits_for: str | None = None
        """Description of the awaited event, None while the agent works."""
        self._waits_since = 0.0
        self._other_runs: set[str | None] = set()
        """Ids of other runs of the same name whose messages are dropped at once."""
        self._heartbeats = HeartbeatPublisher(bus, topology, agent_id, self._current_heartbeats)

    @abstractmethod
    async def serve(self) -> None:
        """Do the agent's work."""

    def detail(self) -> AnyStatus:
        """Return the role's status, which each heartbeat carries."""
        return STATUS_BY_ROLE[self.role]()

    def hosted_heartbeats(self) -> list[Heartbeat]:
        """Return the heartbeats of processes that this agent hosts."""
        return []

    def report(self, step: int, values: dict[str, float]) -> None:
        """Write metrics to the run's files, and publish them. ``step`` is their position in the run: in most roles a
        batch number or the number of batches that the trainer has consumed, in gateways the trainer's train step.
        """
        if self._metrics is not None:
            self._metrics.write(step, values)
        self._unsent.put_nowait(Metrics(role=self.role, id=self.id, step=step, values=values))

    def set_state(self, state: str, waits_for: str | None = None) -> None:
        """Set the agent's state and the event that it waits for; a heartbeat reports a change within half a second."""
        if (state, waits_for) != (self.state, self.waits_for):
            if waits_for != self.waits_for:
                self._waits_since = asyncio.get_running_loop().time()
            self.state, self.waits_for = state, waits_for
            self.heartbeat_soon()

    def heartbeat_soon(self) -> None:
        """Schedule a heartbeat that reports a change within half a second."""
        self._heartbeats.send_soon()

    def heartbeat_now(self) -> None:
        """Send a heartbeat at once, since another agent may be waiting for its content."""
        self._heartbeats.now()

    def drain(self, within: float | None = None) -> None:
        """Ask the agent to finish its work in hand and end; ``within`` limits its ``drain_timeout``, in seconds."""
        if within is not None:
            self._drain_within = within
        if not self.draining.is_set():
            log.info("draining", agent=self.id)
            self.draining.set()
            self.woken.notify()

    @property
    def drain_timeout(self) -> float:
        """Seconds that a draining agent has for its work in hand: ``runner.drain_timeout``, or less if :meth:`drain`
        limits it.
        """
        return min(self.config.runner.drain_timeout, self._drain_within)

    def restart(self, why: RestartRequested) -> None:
        """End this process so that a new process replaces it. Agents that can return their work to the queue do so
        first.
        """
        raise why

    async def run(self) -> None:
        """Connect, serve, send a last heartbeat, and close the connection. An agent that is asked to drain before it
        has connected returns at once.
        """
        if not await self.woken.unless(self.draining.is_set, self.bus.connect()):
            return
        if self.run_folder is not None and ROLES[self.role].takes_work:
            self.bus.run_id = read_run_id(self.run_folder)
        try:
            await self.bus.declare(*self.topology.durable)
            self.bus.on_change(self._bus_changed)
            # subscribed before the first heartbeat, so that no answer to it is missed
            subscribed = asyncio.Event()
            await self.run_with_background(
                self._serve_once(subscribed),
                self._listen(subscribed),
                self._send_metrics(),
                self._wait_for_peers(subscribed),
                self._look_for_end(),
            )
            self.state, self.waits_for = "gone" if self.draining.is_set() else "finished", None
            await self._heartbeats.once()
        finally:
            await self.bus.close()

    async def _wait_for_peers(self, subscribed: asyncio.Event) -> None:
        await subscribed.wait()
        await asyncio.sleep(MEETING_SECONDS)
        self._met.set()
        self.woken.notify()

    async def _serve_once(self, subscribed: asyncio.Event) -> None:
        await subscribed.wait()
        if self.compatibility.writes > 1:  # an agent of release 0.1.0, if any runs, cannot read our messages
            await self.woken.until(lambda: self.draining.is_set() or self._met.is_set())
        self.serving.set()
        # checked after subscribing: an earlier end is seen in the folder, a later end is heard
        if self.run_folder is not None and is_run_over(self.run_folder):
            log.info("run_is_over", agent=self.id)
            return
        await self.serve()

    async def _look_for_end(self) -> None:
        """End the agent if the run has ended: check after each outage, and while no explorer is heard. A process that
        was frozen at the end of the run may miss the end without an outage.
        """
        while self.run_folder is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_LEASE):
                    await self._reconnected.wait()
            if not self._reconnected.is_set() and self.peers.statuses("explorer", ExplorerStatus):
                continue
            self._reconnected.clear()
            if await asyncio.to_thread(is_run_over, self.run_folder):
                log.info("run_is_over", agent=self.id)
                self.peers.end_run()
                self.woken.notify()

    def _bus_changed(self) -> None:
        if self.bus.usable:
            self._reconnected.set()
            self.peers.refresh()
            self.heartbeat_now()
        elif self.state not in {"gone", "finished"}:
            self.peers.suspend()
            log.warning("bus_unusable", agent=self.id, trouble=self.bus.trouble)
        self.woken.notify()

    async def _listen(self, subscribed: asyncio.Event) -> None:
        telemetry = self.topology.listener(self.id, self.incarnation, "telemetry", *heartbeat_patterns(self.role))
        control = self.topology.listener(
            self.id, self.incarnation, "control", f"*.{self.id}", f"*.{self.role}", "*.all"
        )
        await self.bus.declare(telemetry, control)
        async with (
            await self.bus.consume(telemetry) as heartbeats,
            await self.bus.consume(control) as commands,
            asyncio.TaskGroup() as group,
        ):
            subscribed.set()
            group.create_task(self._heartbeats.run())
            quiet = self.role != "explorer"
            group.create_task(self.each(heartbeats, self._on_heartbeat, quiet=quiet, at_once=True))
            group.create_task(self.each(commands, self._on_control))

    async def run_with_background(self, main: Awaitable[Any], *background: Coroutine[Any, Any, None]) -> None:
        """Await ``main`` and run ``background`` tasks until it returns. An exception in any of them ends all."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in background]
            await main
            for task in tasks:
                task.cancel()

    async def each(self, feed: Consumer, handle: Callable[[Any, Delivery], Awaitable[None]], **how: Any) -> None:
        """Pass every message of ``feed`` to ``handle`` and acknowledge it. A body that does not decode, or a message
        that cannot be handled because of its content, is dead-lettered, or only logged with ``quiet``.

        ``how`` is passed to :func:`trinity_mq.runtime.deliveries.decode_or_dead_letter`.
        """

        async def receive(delivery: Delivery) -> None:
            message = await decode_or_dead_letter(self.bus, self.topology, delivery, self.id, **how)
            if message is not None:
                await handle(message, delivery)
                await acknowledge(delivery)

        quiet = bool(how.get("quiet"))
        async for delivery in feed:
            work = functools.partial(receive, delivery)
            await handle_or_set_aside(self.bus, self.topology, delivery, self.id, work, quiet=quiet)

    async def _on_heartbeat(self, message: Message, delivery: Delivery) -> None:
        if not isinstance(message, Heartbeat):
            return
        if isinstance(message.detail, ExplorerStatus):
            if message.detail.run_id:
                self.follow_run(message.detail)
        elif self.bus.is_foreign(delivery):
            return  # its counters belong to another run
        self.peers.receive(message)
        self.woken.notify()

    def follow_run(self, explorer: ExplorerStatus) -> None:
        """Join the run of the explorer that schedules. Agents that save the run's id themselves override this method.

        Raises:
            FatalError: The agent's run folder belongs to another run.
        """
        if self.run_folder is not None and read_run_id(self.run_folder) not in {None, explorer.run_id}:
            raise other_run_error(self.topology.run, self.run_folder, "explorer", explorer.run_id, explorer.place)
        self.bus.run_id = explorer.run_id

    async def drop_foreign(self, delivery: Delivery) -> bool:
        """Acknowledge and count a message of another run of the same name; return whether it was such a message.

        A message may arrive before the first heartbeat of the explorer that began its run. The first message of each
        other run is therefore held until two conditions are met: a whole lease has passed without a heartbeat that
        confirms that run, and the explorer of this agent's run is heard. Before that, the message may belong to the run
        that is active on the broker. If the agent is asked to drain while it holds the message, it leaves the message
        unanswered to the broker, and the result is also True.
        """
        if self.bus.is_foreign(delivery) and delivery.run_id not in self._other_runs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_LEASE):
                    await self.woken.until(lambda: not self.bus.is_foreign(delivery) or self.draining.is_set())
            await self.woken.until(
                lambda: not self.bus.is_foreign(delivery) or self._is_run_confirmed or self.draining.is_set()
            )
            if self.bus.is_foreign(delivery) and not self._is_run_confirmed:
                return True
            if self.bus.is_foreign(delivery):
                self._other_runs.add(delivery.run_id)
        return await acknowledge_foreign(self.bus, delivery)

    @property
    def _is_run_confirmed(self) -> bool:
        """Whether a live explorer announces the run that this agent belongs to."""
        return any(status.run_id == self.bus.run_id for status in self.peers.statuses("explorer", ExplorerStatus))

    async def _on_control(self, message: Message, delivery: Delivery) -> None:
        if not isinstance(message, ControlEvent) or message.target not in {self.id, self.role, "all"}:
            return
        log.info("control", verb=message.verb, reason=message.reason)
        if message.verb == "drain":
            self.drain()
        elif message.verb == "restart":
            self.restart(RestartRequested(message.reason or "asked to restart"))
        else:
            await self.on_control(message)

    async def on_control(self, event: ControlEvent) -> None:
        """Act on a pause or resume command; by default both are ignored."""
        log.info("control_ignored", verb=event.verb)

    async def take_lock(self, name: str, state: str, waits_for: str, *, until: Callable[[], bool]) -> bool:
        """Take the run's lock ``name`` once it is free; return False if ``until`` becomes true first.

        While waiting, the heartbeats report ``state`` and ``waits_for``.
        """
        while not until():
            try:
                self.lock = await self.bus.lock(self.topology.lock(name))
            except LockHeld:
                self.set_state(state, waits_for or None)
                await self.woken.wait(LOCK_RETRY)
            else:
                return True
        return False

    async def restart_when_lock_lost(self) -> None:
        """Wait until the lock is lost.

        Raises:
            RestartRequested: The lock is lost.
        """
        assert self.lock is not None
        await self.lock.wait_lost()
        raise RestartRequested(TAKEN_OVER.format(self))

    async def ensure_lock(self) -> None:
        """Check that this agent still holds its lock. If the connection is lost, wait for it first. An agent without a
        lock passes.

        Raises:
            RestartRequested: Another agent took the lock, so that only that agent may write.
        """
        if self.lock is None or self.lock.held:
            return
        await self.bus.wait_usable()
        if not self.lock.held:
            raise RestartRequested(TAKEN_OVER.format(self))

    async def publish(self, exchange: str, key: str, message: Message, *, message_id: str | None = None) -> bool:
        """Publish a control-plane message of this run and wait for its confirm; return whether a queue took it."""
        return await self.bus.publish(self.topology.exchange(exchange), key, envelope(message, message_id=message_id))

    async def _send_metrics(self) -> None:
        while True:
            metrics = await self._unsent.get()
            try:
                await self.publish("telemetry", f"metrics.{self.role}.{self.id}", metrics)
            except MessageTooLarge as error:
                log.warning("metrics_not_sent", step=metrics.step, reason=f"{error}; the run's files have them")

    def _current_heartbeats(self) -> Iterable[Heartbeat]:
        now = asyncio.get_running_loop().time()
        self.peers.changed.notify()  # no message reports an expired lease
        self.woken.notify()
        self.heartbeat_seq += 1
        heartbeat = Heartbeat(
            role=self.role,
            id=self.id,
            seq=self.heartbeat_seq,
            incarnation=self.incarnation,
            lease=HEARTBEAT_LEASE,
            state=self.state,
            waits_for=self.waits_for,
            waits_seconds=now - self._waits_since if self.waits_for else 0.0,
            foreign=self.bus.foreign,
            detail=self.detail(),
            **self.compatibility.fields(self.peers.uptime),
        )
        return heartbeat, *self.hosted_heartbeats()
