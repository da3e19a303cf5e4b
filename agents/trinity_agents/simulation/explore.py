"""Explores fault schedules: plays the schedules of seeds, checks the invariants, and shrinks failing schedules."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from trinity_agents.simulation.coverage import ALL_STATES, STATES, Coverage, Transition
from trinity_agents.simulation.invariants import NO_ERROR, NO_FAILURE, NO_HANG, Evidence, violations
from trinity_agents.simulation.schedule import FaultSchedule, draw
from trinity_agents.simulation.scheduled_run import AgentFailed, RunHung, ScheduledRun, play_to_end
from trinity_agents.simulation.sessions.invariants import SessionEvidence, note_sessions, session_violations
from trinity_agents.simulation.sessions.run import SessionRun
from trinity_mq.testing.virtual_time import DeadlockError

SHOWN = 8
"""Maximum number of violations listed in a report."""
CHUNK = 20
"""Number of seeds that a worker plays before it reports."""


@dataclass
class ScheduleOutcome:
    """Outcome of a played schedule."""

    schedule: FaultSchedule
    violations: list[tuple[str, str]]
    """Pairs of (violated invariant, description of the violation)."""
    trail: list[str]
    """The last events, one line each."""
    transitions: set[Transition]
    seconds: float
    """Duration of the run in virtual seconds."""

    @property
    def invariant(self) -> str | None:
        """The first violated invariant. None: all invariants hold."""
        return self.violations[0][0] if self.violations else None

    def report(self) -> str:
        """Return a report for a person: the schedule, the violations, the last events, and the command to repeat the
        run.
        """
        lines = [f"seed {self.schedule.seed}", *(f"  {line}" for line in self.schedule.lines())]
        lines.append("the last events:")
        lines += [f"  {line}" for line in self.trail]
        lines.append("violated:" if self.violations else f"every invariant holds ({self.seconds:.0f} virtual seconds)")
        lines += [f"  {name}: {text}" for name, text in self.violations[:SHOWN]]
        if len(self.violations) > SHOWN:
            lines.append(f"  and {len(self.violations) - SHOWN} more")
        return "\n".join([*lines, f"again: {self.schedule.command}"])


def play_schedule(schedule: FaultSchedule | int, kind: type[ScheduledRun] | None = None) -> ScheduleOutcome:
    """Play a schedule, or the schedule of a seed, and check the invariants. ``kind`` is the class of the run; None: the
    class for the schedule's mode.
    """
    schedule = draw(schedule) if isinstance(schedule, int) else schedule
    if kind is None:
        kind = ScheduledRun if schedule.sessions is None else SessionRun
    try:
        return play_to_end(schedule, _judge, kind)
    except DeadlockError as error:
        return ScheduleOutcome(schedule, [(NO_HANG, str(error))], [], set(), 0.0)


def _judge(run: ScheduledRun, error: BaseException | None) -> ScheduleOutcome:
    evidence = SessionEvidence(run) if isinstance(run, SessionRun) else Evidence(run)
    if isinstance(error, RunHung):
        found_violations = [(NO_HANG, f"not over after {run.seconds:.0f} virtual seconds: {error}")]
    elif isinstance(error, AgentFailed):
        found_violations = [(NO_FAILURE, str(error))]
    elif error is not None:
        found_violations = [(NO_ERROR, f"{type(error).__name__}: {error!r}")]
    else:
        found_violations = (
            session_violations(evidence) if isinstance(evidence, SessionEvidence) else violations(evidence)
        )
    if isinstance(evidence, SessionEvidence):
        note_sessions(evidence)
    run.observer.read(evidence.messages)
    trail = [f"{time:9.3f} {who:<12} {text}" for time, who, text in run.faults.trail]
    return ScheduleOutcome(run.schedule, found_violations, trail, run.observer.transitions, run.seconds)


def minimize_faults(failed: ScheduleOutcome, kind: type[ScheduledRun] | None = None) -> ScheduleOutcome:
    """Return the failure with a minimal set of faults that violates the same invariant. Single faults are removed until
    no further removal keeps the violation.
    """
    smallest, before = failed, None
    while before is not smallest:
        before = smallest
        for index in before.schedule.places:
            fewer = smallest.schedule.only(
                [kept_place for kept_place in smallest.schedule.places if kept_place != index]
            )
            replayed = play_schedule(fewer, kind)
            if replayed.invariant == failed.invariant:
                smallest = replayed
    return smallest


def explore(seeds: Iterable[int], *, sessions: bool = False) -> tuple[Coverage, list[ScheduleOutcome]]:
    """Play the schedules of seeds one after another. Return (the reached states, the outcomes with violations).
    ``sessions`` selects runs with sessions.
    """
    coverage, failed = Coverage(states=ALL_STATES if sessions else STATES), []
    for seed in seeds:
        outcome = play_schedule(draw(seed, sessions=sessions))
        coverage.add(outcome.transitions)
        if outcome.violations:
            failed.append(outcome)
    return coverage, failed


def explore_in_processes(
    seeds: Sequence[int], workers: int, done: Callable[[int, list[ScheduleOutcome]], None], *, sessions: bool = False
) -> tuple[Coverage, list[ScheduleOutcome]]:
    """Play the schedules of seeds in ``workers`` processes. Return (the reached states, the outcomes with violations).

    Args:
        seeds: The seeds.
        workers: Number of processes.
        sessions: True for runs with sessions.
        done: Called after each chunk of seeds with the number of seeds played so far and the outcomes with violations
            of the chunk.
    """
    coverage, failed, count = Coverage(states=ALL_STATES if sessions else STATES), [], 0
    chunks = [list(chunk) for chunk in _chunks(seeds)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for chunk, (reached, chunk_failed) in zip(
                chunks, pool.map(partial(explore, sessions=sessions), chunks), strict=True
            ):
                coverage.merge(reached)
                failed += chunk_failed
                count += len(chunk)
                done(count, chunk_failed)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # on interruption, wait only for the chunks in progress
            raise
    return coverage, failed


def _chunks(seeds: Sequence[int]) -> Iterator[Sequence[int]]:
    return (seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK))
