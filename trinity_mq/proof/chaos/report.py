"""The report of a trial: faults, verdicts and the command to repeat it, as text and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trinity_mq.proof.chaos.injector import InjectedFault
from trinity_mq.proof.chaos.trial import TrialOutcome
from trinity_mq.terminal import align_columns

SIGNS = {"holds": "holds", "violated": "VIOLATED", "not checked": "not checked"}
HEADS = ("fault", "at s", "kind", "victim", "marked point", "back s", "recovered s", "")


def lines(outcome: TrialOutcome, schedule: Path, again: str) -> Iterator[str]:
    """Yield the report for a person.

    Args:
        outcome: Outcome of the trial.
        schedule: File with the trial's schedule.
        again: Command that repeats the trial.
    """
    yield from align_columns([HEADS, *(_row(done, outcome.began) for done in outcome.done)])
    yield ""
    width = max(len(verdict.name) for verdict in outcome.verdicts)
    for verdict in outcome.verdicts:
        yield f"{SIGNS[verdict.result]:<11}  {verdict.name:<{width}}  {verdict.text}"
        for line in verdict.evidence:
            yield f"{'':<11}    {line}"
    yield ""
    yield from _counts(outcome)
    yield _summary(outcome)
    if (remaining := len(outcome.schedule.faults) - len(_injected(outcome))) > 0:
        yield (
            f"{remaining} of {len(outcome.schedule.faults)} faults were not injected; if the run was over before "
            "them, give it more batches (buffer.total_steps=N)"
        )
    yield f"schedule: {schedule}"
    yield f"repeat it: {again}"


def as_json(outcome: TrialOutcome, schedule: Path, again: str) -> Mapping[str, Any]:
    """Return the report for programs. Times are in seconds since the start of the trial."""
    return {
        "holds": outcome.holds,
        "where": outcome.where,
        "over": outcome.over,
        "seconds": round(outcome.seconds, 1),
        "steps": outcome.steps,
        "steps_per_minute": {"before": outcome.rate_before, "while": outcome.rate_while},
        "faults": [_as_json(done, outcome.began) for done in outcome.done],
        "by_role": _by_role(outcome),
        "traffic": None if outcome.traffic is None else dict(outcome.traffic.counts),
        "invariants": [asdict(verdict) for verdict in outcome.verdicts],
        "seed": outcome.schedule.seed,
        "schedule": str(schedule),
        "again": again,
    }


def _as_json(done: InjectedFault, began: float) -> Mapping[str, Any]:
    return {
        **asdict(done.fault),
        "victim": done.victim.name if done.victim else None,
        "at": _since(done.at, began),
        "back": _since(done.back, began),
        "recovered": _since(done.recovered, began),
        "note": done.note,
        "inside": done.is_inside,
    }


def _row(done: InjectedFault, began: float) -> tuple[str, ...]:
    fault = done.fault
    lasts = f" {fault.seconds:.1f} s" if fault.kind in {"freeze", "cut"} else ""
    at = _since(done.at, began)
    return (
        str(fault.number),
        "-" if at is None else f"{at:.1f}",
        f"{fault.kind}{lasts}",
        done.victim.name if done.victim else fault.role,
        fault.point or "-",
        _after(done.back, done.at),
        _after(done.recovered, done.at),
        ("together with the previous fault; " if fault.together else "") + done.note,
    )


def _counts(outcome: TrialOutcome) -> Iterator[str]:
    """Yield a line for each role with its numbers of injected faults by kind and by point, then the counts of the
    clients of sessions, if there were any.
    """
    for role, (kinds, points) in _by_role(outcome).items():
        at = ", ".join(f"{count} at {point}" for point, count in points.items())
        yield f"{role:<9}  {', '.join(f'{count} {kind}' for kind, count in kinds.items())}{'; ' if at else ''}{at}"
    if outcome.traffic is not None:
        yield f"clients    {', '.join(f'{count} {what}' for what, count in outcome.traffic.counts.items())}"
    yield ""


def _by_role(outcome: TrialOutcome) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Return, by role, the counts of injected faults by kind and by marked point."""
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    points: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for done in _injected(outcome):
        kinds[done.fault.role][done.fault.kind] += 1
        if done.fault.point is not None and not done.note:
            points[done.fault.role][done.fault.point] += 1
    return {role: (dict(kinds[role].most_common()), dict(points[role].most_common())) for role in sorted(kinds)}


def _summary(outcome: TrialOutcome) -> str:
    struck = _injected(outcome)
    took = sorted(done.recovered - done.at for done in struck if done.recovered is not None and done.at is not None)
    words = [f"{len(struck)} faults in {outcome.seconds:.0f} s, {outcome.steps} batches trained on"]
    if took:
        words.append(f"recovered in {took[len(took) // 2]:.1f} s (median), {took[-1]:.1f} s at most")
    before, during = outcome.rate_before, outcome.rate_while
    if before and during:
        words.append(
            f"{before:.0f} batches a minute before, {during:.0f} during the faults: {1 - during / before:.0%} lost"
        )
    verdict = "every invariant that was checked holds" if outcome.holds else "AN INVARIANT IS VIOLATED"
    return f"{verdict}; {'; '.join(words)}"


def _injected(outcome: TrialOutcome) -> list[InjectedFault]:
    return [done for done in outcome.done if done.at is not None]


def _since(at: float | None, began: float) -> float | None:
    return None if at is None else round(at - began, 2)


def _after(moment: float | None, at: float | None) -> str:
    return "-" if moment is None or at is None else f"{max(moment - at, 0.0):.1f}"
