"""Trace of a batch laid out as a waterfall: kinds of work with their times, agents and counts, and gaps without work.

Pure functions over the spans of :func:`trinity_mq.telemetry.trace_files.read_trace`. All times are milliseconds from
the first span of the batch, unless stated otherwise.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trinity_mq.telemetry.trace import TraceSpan

Interval = tuple[float, float]

MARKS: Mapping[str, tuple[str, str, bool]] = {
    "rollout": ("explorer", "make manifest", False),
    "closing": ("operator", "read parts", False),
    "operators": ("operator", "confirm batch_ready", True),
    "wait for the trainer": ("trainer", "decode chunks", False),
    "training": ("trainer", "train step", True),
    "sync": ("explorer", "commit at engine", True),
}
"""Stages of a batch, as (role, span name, at end). A stage lasts from the mark of the previous stage to the first start
of this span, or, if the flag is True, to its last end.
"""
LEAST_GAP = 0.5
"""Minimum milliseconds of a gap that is listed."""
COVERED = 0.5
"""Minimum share of a gap that a wait must cover to be named with the gap."""


@dataclass(frozen=True, slots=True)
class Row:
    """Work of a single kind, or waits of a single kind, by the agents of a role."""

    who: str
    what: str
    start: float
    took: float
    """Milliseconds from the first start to the last end."""
    times: float
    total: float
    """Sum of all durations in milliseconds. It exceeds ``took`` if several ran at once."""
    cpu: float | None
    """Processor milliseconds of the working threads. None: not measured."""
    bytes: float
    wait: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """A period without work on the batch by any agent."""

    start: float
    took: float
    after: str
    before: str
    waits: tuple[str, ...] = ()
    """Waits recorded during the gap, each with the role that waited."""
    meanwhile: tuple[str, ...] = ()
    """Work for other batches during the gap, longest first."""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Trace of a single batch, or the medians of several batches."""

    batch: str
    began: float
    """Start in seconds since the epoch."""
    took: float
    stages: Mapping[str, float]
    rows: Sequence[Row]
    gaps: Sequence[Gap]
    worked: Mapping[str, float]
    """Milliseconds of work on the batch by at least one agent of the role, by role."""
    worked_elsewhere: Mapping[str, float]
    """The same for other batches, between the first and last span of the batch."""
    idle: float
    """Milliseconds without work on the batch by any agent."""


def batches_of(spans: Iterable[TraceSpan]) -> list[str]:
    """Return the batches that have spans, ordered by their first start."""
    first: dict[str, float] = {}
    for one in spans:
        if one.batch is not None:
            first[str(one.batch)] = min(one.start, first.get(str(one.batch), one.start))
    return sorted(first, key=lambda batch: first[batch])


def lay_out(spans: Sequence[TraceSpan], batch: str) -> Waterfall:
    """Return the waterfall of a single batch of a run.

    Raises:
        KeyError: The batch has no span.
    """
    of_version = {one.version: str(one.batch) for one in spans if one.version is not None and one.batch is not None}
    own: list[TraceSpan] = []
    others: list[TraceSpan] = []
    for one in spans:
        of = str(one.batch) if one.batch is not None else of_version.get(one.version or "")
        (own if of == batch else others).append(one)
    if not own:
        raise KeyError(batch)
    began, end = min(one.start for one in own), max(one.end for one in own)
    beside = [one for one in others if one.end > began and one.start < end]
    gaps = _gaps(own, beside, began, end)
    return Waterfall(
        batch=batch,
        began=began,
        took=1000 * (end - began),
        stages=_stages(own, began),
        rows=_rows(own, began),
        gaps=[gap for gap in gaps if gap.took >= LEAST_GAP],
        worked=_worked(own, began, end),
        worked_elsewhere=_worked(beside, began, end),
        idle=sum(gap.took for gap in gaps),
    )


def typical(several: Sequence[Waterfall]) -> Waterfall:
    """Return the medians of several waterfalls, for rows and gaps that at least half of the waterfalls have."""
    enough = len(several) / 2
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for one in several:
        for row in one.rows:
            rows[row.who, row.what].append(row)
        together: dict[tuple[str, str], Gap] = {}
        for gap in one.gaps:
            known = together.get((gap.after, gap.before))
            together[gap.after, gap.before] = gap if known is None else replace(known, took=known.took + gap.took)
        for key, gap in together.items():
            gaps[key].append(gap)
    return Waterfall(
        batch=f"{several[0].batch} to {several[-1].batch}",
        began=several[0].began,
        took=statistics.median(one.took for one in several),
        stages=_medians([one.stages for one in several]),
        rows=sorted((_median_row(found) for found in rows.values() if len(found) >= enough), key=lambda row: row.start),
        gaps=sorted((_median_gap(found) for found in gaps.values() if len(found) >= enough), key=lambda gap: gap.start),
        worked=_medians([one.worked for one in several]),
        worked_elsewhere=_medians([one.worked_elsewhere for one in several]),
        idle=statistics.median(one.idle for one in several),
    )


def _medians(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in several for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in several) for name in names}


def _median_row(rows: Sequence[Row]) -> Row:
    cpu = [row.cpu for row in rows if row.cpu is not None]
    numbers = {
        name: statistics.median(getattr(row, name) for row in rows)
        for name in ("start", "took", "times", "total", "bytes")
    }
    return replace(rows[0], cpu=statistics.median(cpu) if cpu else None, **numbers)


def _median_gap(gaps: Sequence[Gap]) -> Gap:
    common = [tuple(_usual([getattr(gap, name) for gap in gaps])) for name in ("waits", "meanwhile")]
    start, took = (statistics.median(getattr(gap, name) for gap in gaps) for name in ("start", "took"))
    return replace(gaps[0], start=start, took=took, waits=common[0], meanwhile=common[1])


def _usual(several: Sequence[Sequence[str]]) -> list[str]:
    names = dict.fromkeys(name for one in several for name in one)
    return [name for name in names if sum(name in one for one in several) >= len(several) / 2]


def _stages(own: Sequence[TraceSpan], began: float) -> dict[str, float]:
    found: dict[str, float] = {}
    last = began
    for stage, (role, what, at_end) in MARKS.items():
        marks = [one for one in own if (one.role, one.what) == (role, what)]
        if not marks:
            continue
        # a reader may start before the confirm has returned to the publisher
        mark = max(last, max(one.end for one in marks) if at_end else min(one.start for one in marks))
        found[stage], last = 1000 * (mark - last), mark
    return found


def _rows(own: Sequence[TraceSpan], began: float) -> list[Row]:
    kinds: dict[tuple[str, str], list[TraceSpan]] = defaultdict(list)
    for one in own:
        kinds[one.role, one.what].append(one)
    rows = []
    for (who, what), found in kinds.items():
        start = min(one.start for one in found)
        cpu = [one.cpu for one in found if one.cpu is not None]
        rows.append(
            Row(
                who,
                what,
                start=1000 * (start - began),
                took=1000 * (max(one.end for one in found) - start),
                times=len(found),
                total=1000 * sum(one.end - one.start for one in found),
                cpu=1000 * sum(cpu) if cpu else None,
                bytes=sum(one.bytes for one in found),
                wait=found[0].wait,
            )
        )
    return sorted(rows, key=lambda row: (row.start, row.who, row.what))


def _worked(spans: Iterable[TraceSpan], began: float, end: float) -> dict[str, float]:
    by_role: dict[str, list[Interval]] = defaultdict(list)
    for one in spans:
        if not one.wait:
            by_role[one.role].append((max(one.start, began), min(one.end, end)))
    return {role: 1000 * sum(last - first for first, last in union(found)) for role, found in sorted(by_role.items())}


def _gaps(own: Sequence[TraceSpan], beside: Sequence[TraceSpan], began: float, end: float) -> list[Gap]:
    work = sorted((one for one in own if not one.wait), key=lambda one: one.start)
    waits = [one for one in own if one.wait]
    busy = union([(one.start, one.end) for one in work])
    edges = [began, *(edge for interval in busy for edge in interval), end]
    gaps = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        if last <= first:
            continue
        before = next((_name(one) for one in work if one.start >= last), "the end")
        after = max((one for one in work if one.end <= first), key=lambda one: one.end, default=None)
        covering = [one for one in waits if _overlap(one, first, last) >= COVERED * (last - first)]
        elsewhere: dict[str, float] = defaultdict(float)
        for one in beside:
            if not one.wait and (shared := _overlap(one, first, last)) > 0:
                elsewhere[_name(one)] += shared
        longest = sorted(elsewhere, key=lambda name: -elsewhere[name])[:3]
        gaps.append(
            Gap(
                start=1000 * (first - began),
                took=1000 * (last - first),
                after="the beginning" if after is None else _name(after),
                before=before,
                waits=tuple(dict.fromkeys(_name(one) for one in sorted(covering, key=lambda one: -one.start))),
                meanwhile=tuple(longest),
            )
        )
    return gaps


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the same times as sorted intervals that do not touch.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    found: list[Interval] = []
    for first, last in sorted(intervals):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _overlap(one: TraceSpan, first: float, last: float) -> float:
    return min(one.end, last) - max(one.start, first)


def _name(one: TraceSpan) -> str:
    return f"{one.role}: {one.what}"
