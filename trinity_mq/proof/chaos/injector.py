"""Injects the faults of a schedule into a run in order, and records when the run has recovered from each fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trinity_mq.errors import CommandError
from trinity_mq.messages import EngineStatus, Heartbeat
from trinity_mq.proof.chaos.points import INSIDE
from trinity_mq.proof.chaos.schedule import ENDS, Fault
from trinity_mq.proof.chaos.targets.base import FaultTargets, Victim, VictimGoneError
from trinity_mq.proof.chaos.targets.marks import ArmedPoints, Hit
from trinity_mq.proof.chaos.witness import RunObserver, life_of

POINT_SECONDS = 30.0
"""Seconds to wait for a marked point; after that the fault is injected anyway."""
FIND_SECONDS = 0.5
"""Seconds between two searches for a living process of a role."""
POINT_MISSED = "its point was not reached"
TRIES = 5
"""Maximum number of victims chosen for a fault. If all of them end before they are struck, the fault is skipped."""


@dataclass
class InjectedFault:
    """A fault and its outcome. Times are in seconds of the event loop's clock."""

    fault: Fault
    at: float | None = None
    """Time of the fault; None: it was not injected."""
    victim: Victim | None = None
    note: str = ""
    """Why the fault was not injected, or that its marked point was not reached."""
    ended: float | None = None
    """Time at which the injector ended a lasting fault; for other faults the time of the fault. None: it still lasts,
    or was not injected.
    """
    is_inside: bool = False
    """True if its victim had stopped itself at the fault's point."""
    known: frozenset[tuple[str, str]] = frozenset()
    """Agents and their lives, as ``(agent, life)``, that were known at the time of the fault."""
    back: float | None = None
    """Time of the first heartbeat that shows that the victim, or its replacement, works again after the fault."""
    recovered: float | None = None
    """Time after ``back`` at which the trainer consumed a batch, or time at which the run was over."""

    @property
    def is_open(self) -> bool:
        """True if the fault was injected and the run has not recovered from it yet."""
        return self.at is not None and self.recovered is None


class Injector:
    """Injects faults into a run that a witness observes.

    Args:
        targets: Access to the run's processes.
        witness: Observes the run.
        timeout: Maximum seconds for the recovery from a fault.
        tell: Called with a line of text for each action.
        budget: (maximum number of ends of one process, time window in seconds). After more ends in the window, the
            process's supervisor gives up, so such faults are skipped. None: without limit.
        marks: Arms points inside agents. None: the run was started without such points, so they are never reached.
    """

    def __init__(
        self,
        targets: FaultTargets,
        witness: RunObserver,
        *,
        timeout: float,
        tell: Callable[[str], None],
        budget: tuple[int, float] | None = None,
        marks: ArmedPoints | None = None,
    ) -> None:
        self._targets, self._witness, self._timeout, self._tell = targets, witness, timeout, tell
        self._budget, self._marks = budget, marks
        self._clock = asyncio.get_running_loop().time
        self._lasting: dict[str, tuple[Victim, str]] = {}
        self._relieving: list[asyncio.Task[None]] = []
        self._ends: dict[str, deque[float]] = {}
        self.done: list[InjectedFault] = []
        self.stuck: InjectedFault | None = None
        """The fault from which the run did not recover in time. None: it has recovered from all faults so far."""
        witness.on_beat, witness.on_step = self._beat, self._step

    async def run(self, faults: Iterable[Fault], *, over: Callable[[], bool]) -> None:
        """Inject the faults until all are done, the run is over, or it does not recover. On return all victims are
        thawed and reconnected.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    done = InjectedFault(fault)
                    self.done.append(done)
                    if not await self._wait_until_due(fault, over):
                        done.note = "the run was over" if over() else "the run had not recovered"
                        break
                    await self._inject(done, group, over)
                await self._wait_until_recovered(over)
                for task in self._relieving:
                    task.cancel()
        finally:
            await self._relieve_all()

    async def _wait_until_due(self, fault: Fault, over: Callable[[], bool]) -> bool:
        """Wait until a fault is due. Return False if it will not become due, because the run is over or has not
        recovered from an earlier fault.
        """
        if not fault.together and not await self._wait_until_recovered(over):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(fault.wait):
                await self._witness.changed.until(over)
        return not over()

    async def _wait_until_recovered(self, over: Callable[[], bool]) -> bool:
        """Wait until the run has recovered from all faults so far, or is over, which counts as recovery. Return False
        if it has not recovered in time.
        """

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
            if done.is_open:  # the end of the run counts as recovery
                done.back = done.back or now
                done.recovered = now
        return True

    async def _inject(self, done: InjectedFault, group: asyncio.TaskGroup, over: Callable[[], bool]) -> None:
        fault = done.fault
        for _ in range(TRIES):
            victim = await self._choose(fault, over)
            if victim is None:
                done.note = done.note or f"no {fault.role} was running"
                return
            if self._exceeds_budget(victim, fault):
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
            except VictimGoneError as error:  # the victim ended in the meantime: choose another victim at once
                done.at, done.victim = None, None
                self._tell(str(error))
                continue
            except CommandError as error:
                done.at, done.note = None, str(error)
                self._tell(f"fault {fault.number} was not injected: {error}")
                if self._lasts(fault):  # a part of the fault may have taken effect
                    await self._relieve(victim, fault.kind)
                return
            self._note_injection(done, group)
            return
        done.note = f"every {fault.role} ended before the fault"

    def _note_injection(self, done: InjectedFault, group: asyncio.TaskGroup) -> None:
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
        """Return the victim that a fault selects among the living processes of its role. Wait for such a process;
        return None if the run ends or the timeout passes first.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                while not over():
                    candidates = [
                        candidate
                        for candidate in await self._targets.find(fault.role)
                        if candidate.identity not in self._lasting
                    ]
                    if candidates:
                        return candidates[min(int(fault.pick * len(candidates)), len(candidates) - 1)]
                    await asyncio.sleep(FIND_SECONDS)  # a started process does not announce itself
        return None

    async def _strike(self, done: InjectedFault, victim: Victim) -> None:
        """Inject the fault. If the victim has stopped itself at its point and survives the fault, resume it."""
        try:
            await self._targets.strike(victim, done.fault.kind)
        finally:
            if done.is_inside and done.fault.kind not in {"kill", "freeze"}:
                await self._relieve(victim, "freeze")

    async def _at_point(self, done: InjectedFault, chosen: Victim, over: Callable[[], bool]) -> Victim | None:
        """Wait for the marked point of a fault, and return its victim: the chosen victim, or the process that has
        stopped itself at an inside point. None: the point was not reached.
        """
        fault = done.fault
        if fault.point is None or fault.point not in INSIDE:
            return chosen if await self._wait_for_point(fault, over) else None
        if self._marks is None:
            return None
        hit = await self._marks.hit(fault.point, fault.occurrence, over, POINT_SECONDS)
        stopped = None if hit is None else await self._stopped_victim(fault.role, hit)
        done.is_inside = stopped is not None
        return stopped

    async def _stopped_victim(self, role: str, hit: Hit) -> Victim | None:
        victims = await self._targets.find(role)
        return next((victim for victim in victims if victim.agent == hit.agent and _is_process(victim, hit.pid)), None)

    async def _wait_for_point(self, fault: Fault, over: Callable[[], bool]) -> bool:
        """Wait until messages show the marked point of a fault as often as the fault requires. Return False if they do
        not in time, or the run is over before.
        """
        counts, point = self._witness.points.passed, fault.point
        assert point is not None
        target = counts[point] + fault.occurrence
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POINT_SECONDS):
                await self._witness.changed.until(lambda: over() or counts[point] >= target)
        return counts[point] >= target

    def _exceeds_budget(self, victim: Victim, fault: Fault) -> bool:
        if self._budget is None or fault.kind not in ENDS:
            return False
        most, window = self._budget
        ends, now = self._ends.get(victim.name, deque()), self._clock()
        while ends and ends[0] < now - window:
            ends.popleft()
        return len(ends) >= most

    async def _relieve_later(self, done: InjectedFault, victim: Victim) -> None:
        await asyncio.sleep(done.fault.seconds)
        await self._relieve(victim, done.fault.kind)
        done.ended = self._clock()
        self._witness.changed.notify()

    async def _relieve(self, victim: Victim, kind: str) -> None:
        try:
            await self._targets.relieve(victim, kind)
        except CommandError as error:
            self._tell(f"{kind} of {victim.name} could not be ended: {error}")
        # not reached if this was cancelled: the relief is then retried at the end
        self._lasting.pop(victim.identity, None)

    async def _relieve_all(self) -> None:
        for victim, kind in tuple(self._lasting.values()):
            await self._relieve(victim, kind)

    def _beat(self, beat: Heartbeat, at: float) -> None:
        for done in self.done:
            if done.is_open and done.back is None and self._is_back(done, beat, at):
                done.back = at

    def _step(self, at: float) -> None:
        for done in self.done:
            if done.is_open and done.back is not None and at > done.back:
                done.recovered = at

    def _is_back(self, done: InjectedFault, beat: Heartbeat, at: float) -> bool:
        """Return whether a heartbeat shows that the victim, or its replacement, works again."""
        victim, kind = done.victim, done.fault.kind
        assert victim is not None
        assert done.at is not None
        if done.ended is None or at <= done.ended:
            return False
        if victim.role == "broker":
            # messages that passed the broker before it was ended may arrive later
            through = kind not in ENDS or victim.shared or self._witness.broker_back > done.at
            return through and self._witness.reachable and beat.role == "trainer"
        has_no_weights = isinstance(beat.detail, EngineStatus) and beat.detail.version is None
        if beat.role != victim.role or has_no_weights:
            return False
        known_agents = {agent for agent, _ in done.known}
        is_same_or_new = beat.id == victim.agent or victim.agent not in known_agents
        if kind in ENDS:
            return (beat.id, life_of(beat)) not in done.known and (is_same_or_new or beat.id not in known_agents)
        return is_same_or_new


def by_role(done: Iterable[InjectedFault]) -> dict[str, int]:
    """Return the number of injected faults by the role of the victim. Faults that were not injected do not count."""
    return dict(Counter(injection.fault.role for injection in done if injection.at is not None))


def _is_process(victim: Victim, pid: int) -> bool:
    return victim.identity.partition("@")[0] == str(pid)
