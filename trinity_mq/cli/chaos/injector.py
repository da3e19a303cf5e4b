"""Does the faults of a schedule to a run, one after the other, and notes when it has recovered from each."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trinity_mq.cli.chaos.points import INSIDE
from trinity_mq.cli.chaos.schedule import ENDS, Fault
from trinity_mq.cli.chaos.targets.base import NotOursError, Targets, Victim
from trinity_mq.cli.chaos.targets.marks import Hit, Marks
from trinity_mq.cli.chaos.witness import Beat, Witness
from trinity_mq.cli.errors import CommandError

POINT_SECONDS = 30.0
"""Seconds for which a marked point is waited for; the fault is done all the same then."""
FIND_SECONDS = 0.5
"""Seconds between two looks for a living process of a role."""
POINT_MISSED = "its point did not come"
TRIES = 5
"""Victims that may end under our hands before a fault is given up."""


@dataclass
class Done:
    """A fault, and what came of it. Times in seconds of the event loop's clock."""

    fault: Fault
    at: float | None = None
    """When it was done; None: it was not."""
    victim: Victim | None = None
    note: str = ""
    """Why it was not done; or that its marked point did not come."""
    ended: float | None = None
    """When a fault that lasts was ended by us."""
    is_inside: bool = False
    """Its victim had stopped itself at the fault's point."""
    known: frozenset[tuple[str, str]] = frozenset()
    """Agents and lives that were known when it was done."""
    back: float | None = None
    """When the victim, or what took its place, sent a heartbeat again."""
    recovered: float | None = None
    """When the trainer consumed a batch after that, or the run was over."""

    @property
    def is_open(self) -> bool:
        """It was done, and the run has not recovered from it yet."""
        return self.at is not None and self.recovered is None


class Injector:
    """Does faults to a run that a witness observes.

    Args:
        targets: Where the run's processes are.
        witness: Observes the run.
        timeout: Seconds in which the run must have recovered from a fault.
        tell: Called with a line for each act.
        budget: By role, how many times a process may be ended within so many seconds, where its supervisor gives up
            after more; None: any number.
        marks: Arms points inside agents; None: the run was started without, and none of them comes.
    """

    def __init__(
        self,
        targets: Targets,
        witness: Witness,
        *,
        timeout: float,
        tell: Callable[[str], None],
        budget: tuple[int, float] | None = None,
        marks: Marks | None = None,
    ) -> None:
        self._targets, self._witness, self._timeout, self._tell = targets, witness, timeout, tell
        self._budget, self._marks = budget, marks
        self._clock = asyncio.get_running_loop().time
        self._lasting: dict[str, tuple[Victim, str]] = {}
        self._relieving: list[asyncio.Task[None]] = []
        self._ends: dict[str, deque[float]] = {}
        self.done: list[Done] = []
        self.stuck: Done | None = None
        """The fault from which the run did not recover in time."""
        witness.on_beat, witness.on_step = self._beat, self._step

    async def run(self, faults: Iterable[Fault], *, over: Callable[[], bool]) -> None:
        """Do the faults, until they are done, the run is over, or it does not recover. Nothing is frozen or cut off
        any more on return.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    done = Done(fault)
                    self.done.append(done)
                    if not await self._due(fault, over):
                        done.note = "the run was over" if over() else "the run had not recovered"
                        break
                    await self._do(done, group, over)
                await self._recovered(over)
                for task in self._relieving:
                    task.cancel()
        finally:
            await self._relieve_all()

    async def _due(self, fault: Fault, over: Callable[[], bool]) -> bool:
        """Wait until it is time for a fault; False: it never will be."""
        if not fault.together and not await self._recovered(over):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(fault.wait):
                await self._witness.changed.until(over)
        return not over()

    async def _recovered(self, over: Callable[[], bool]) -> bool:
        """Return whether the run has recovered from all faults so far; waits for it."""

        def settled() -> bool:
            return over() or not any(done.is_open for done in self.done)

        try:
            async with asyncio.timeout(self._timeout):
                await self._witness.changed.until(settled)
        except TimeoutError:
            self.stuck = next(done for done in self.done if done.is_open)
            self._tell(f"not recovered from fault {self.stuck.fault.number} in {self._timeout:g} s")
            return False
        now = self._clock()
        for done in self.done:
            if done.is_open:  # its end is its recovery
                done.back = done.back or now
                done.recovered = now
        return True

    async def _do(self, done: Done, group: asyncio.TaskGroup, over: Callable[[], bool]) -> None:
        fault = done.fault
        for _ in range(TRIES):
            victim = await self._choose(fault, over)
            if victim is None:
                done.note = done.note or f"no {fault.role} was there"
                return
            if self._is_spent(victim, fault):
                done.note = f"{victim.name} was ended so often that its supervisor would give up"
                return
            if fault.point is not None and not done.note:
                stopped = await self._at_point(done, victim, over)
                if stopped is None:
                    done.note = POINT_MISSED
                victim = stopped or victim
            done.known = frozenset(self._witness.lives)
            done.victim, done.at = victim, self._clock()
            try:
                await self._strike(done, victim)
            except NotOursError as error:  # it ended while we waited: another one, at once
                done.at, done.victim = None, None
                self._tell(str(error))
                continue
            except CommandError as error:
                done.at, done.note = None, str(error)
                self._tell(f"fault {fault.number} was not done: {error}")
                if self._lasts(fault):  # a part of it may have been
                    await self._relieve(victim, fault.kind)
                return
            self._struck(done, group)
            return
        done.note = f"every {fault.role} ended by itself"

    def _struck(self, done: Done, group: asyncio.TaskGroup) -> None:
        fault, victim = done.fault, done.victim
        assert victim is not None
        where = f" at {fault.point}" if fault.point and not done.note else ""
        lasts = f" for {fault.seconds:g} s" if self._lasts(fault) else ""
        self._tell(f"fault {fault.number}: {fault.kind} {victim.name}{lasts}{where}")
        if fault.kind in ENDS:
            self._ends.setdefault(victim.name, deque()).append(self._clock())
        if self._lasts(fault):
            self._lasting[victim.identity] = victim, fault.kind
            self._relieving.append(group.create_task(self._relieve_later(done, victim)))
        else:
            done.ended = done.at

    def _lasts(self, fault: Fault) -> bool:
        return fault.kind in {"freeze", "cut"}

    async def _choose(self, fault: Fault, over: Callable[[], bool]) -> Victim | None:
        """Return the victim that a fault picks among those that are there; waits until one is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                while not over():
                    found = [one for one in await self._targets.find(fault.role) if one.identity not in self._lasting]
                    if found:
                        return found[min(int(fault.pick * len(found)), len(found) - 1)]
                    await asyncio.sleep(FIND_SECONDS)  # processes tell nobody that they have started
        return None

    async def _strike(self, done: Done, victim: Victim) -> None:
        """Do the fault, and have a victim that stopped itself at its point go on where it outlives that."""
        try:
            await self._targets.strike(victim, done.fault.kind)
        finally:
            if done.is_inside and done.fault.kind not in {"kill", "freeze"}:
                await self._relieve(victim, "freeze")

    async def _at_point(self, done: Done, chosen: Victim, over: Callable[[], bool]) -> Victim | None:
        """Wait for the marked point of a fault, and return its victim: the chosen one, or the one that has stopped
        itself at a point inside. None: the point did not come.
        """
        fault = done.fault
        if fault.point is None or fault.point not in INSIDE:
            return chosen if await self._passed(fault, over) else None
        if self._marks is None:
            return None
        hit = await self._marks.hit(fault.point, fault.occurrence, over, POINT_SECONDS)
        stopped = None if hit is None else await self._stopped(fault.role, hit)
        done.is_inside = stopped is not None
        return stopped

    async def _stopped(self, role: str, hit: Hit) -> Victim | None:
        there = await self._targets.find(role)
        return next((one for one in there if one.agent == hit.agent and _is_process(one, hit.pid)), None)

    async def _passed(self, fault: Fault, over: Callable[[], bool]) -> bool:
        """Wait for the marked point of a fault; False: it did not come."""
        counted, point = self._witness.points.passed, fault.point
        assert point is not None
        wanted = counted[point] + fault.occurrence
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POINT_SECONDS):
                await self._witness.changed.until(lambda: over() or counted[point] >= wanted)
        return counted[point] >= wanted

    def _is_spent(self, victim: Victim, fault: Fault) -> bool:
        if self._budget is None or fault.kind not in ENDS:
            return False
        most, window = self._budget
        ends, now = self._ends.get(victim.name, deque()), self._clock()
        while ends and ends[0] < now - window:
            ends.popleft()
        return len(ends) >= most

    async def _relieve_later(self, done: Done, victim: Victim) -> None:
        await asyncio.sleep(done.fault.seconds)
        await self._relieve(victim, done.fault.kind)
        done.ended = self._clock()
        self._witness.changed.notify()

    async def _relieve(self, victim: Victim, kind: str) -> None:
        try:
            await self._targets.relieve(victim, kind)
        except CommandError as error:
            self._tell(f"{victim.name} could not be relieved of {kind}: {error}")
        self._lasting.pop(victim.identity, None)  # not where this was cancelled: it is tried again at the end

    async def _relieve_all(self) -> None:
        for victim, kind in tuple(self._lasting.values()):
            await self._relieve(victim, kind)

    # -- recovery

    def _beat(self, beat: Beat) -> None:
        for done in self.done:
            if done.is_open and done.back is None and self._is_back(done, beat):
                done.back = beat.at

    def _step(self, at: float) -> None:
        for done in self.done:
            if done.is_open and done.back is not None and at > done.back:
                done.recovered = at

    def _is_back(self, done: Done, beat: Beat) -> bool:
        """Return whether a heartbeat shows that the victim, or what took its place, works again."""
        victim, kind = done.victim, done.fault.kind
        assert victim is not None
        assert done.at is not None
        if done.ended is None or beat.at <= done.ended:
            return False
        if victim.role == "broker":
            # what passed it before it was ended may arrive after
            through = kind not in ENDS or victim.shared or self._witness.broker_back > done.at
            return through and self._witness.reachable and beat.role == "trainer"
        if beat.role != victim.role or not beat.serves:
            return False
        known = {agent for agent, _ in done.known}
        same = beat.agent == victim.agent or victim.agent not in known
        if kind in ENDS:
            return (beat.agent, beat.life) not in done.known and (same or beat.agent not in known)
        return same


def by_role(done: Iterable[Done]) -> dict[str, int]:
    """Return how many faults were done to each role that end or interrupt it."""
    return dict(Counter(one.fault.role for one in done if one.at is not None))


def _is_process(victim: Victim, pid: int) -> bool:
    return victim.identity.partition("@")[0] == str(pid)
