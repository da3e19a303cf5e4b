"""Trace of a batch laid out as a waterfall: kinds of work with their times, agents and counts, and gaps without work.

All times are milliseconds from the first span of the batch, unless stated otherwise. ``trinity-mq timeline RUN --batch
N`` prints the waterfall of one batch, from its admission to the commit of its weights.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trinity_mq.errors import CommandError
from trinity_mq.telemetry import read_trace
from trinity_mq.telemetry.trace import TRACE_FOLDER, TraceSpan

LISTED = 10
"""Maximum number of gaps shown as text. JSON lists all gaps of at least half a millisecond."""
HEAD = f"{'start ms':>9} {'took ms':>8} {'times':>5} {'sum ms':>8} {'cpu ms':>7} {'bytes':>8}  who: what"
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
    """Waits for the batch that cover at least the share :data:`COVERED` of the gap, each with the role that waited."""
    meanwhile: tuple[str, ...] = ()
    """Work for other batches during the gap: at most three kinds, longest first."""


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
    """Milliseconds of work on other batches, by role, between the first and the last span of the batch."""
    idle: float
    """Milliseconds without work on the batch by any agent."""


def batches_of(spans: Iterable[TraceSpan]) -> list[str]:
    """Return the batches that have spans, ordered by their first start. Spans of weight syncs do not count."""
    first: dict[str, float] = {}
    for span in spans:
        if span.version is None:
            first[str(span.batch)] = min(span.start, first.get(str(span.batch), span.start))
    return sorted(first, key=lambda batch: first[batch])


def lay_out(spans: Sequence[TraceSpan], batch: str) -> Waterfall:
    """Return the waterfall of a single batch of a run.

    Raises:
        KeyError: The batch has no span.
    """
    batch_spans: list[TraceSpan] = []
    others: list[TraceSpan] = []
    for span in spans:
        (batch_spans if str(span.batch) == batch else others).append(span)
    if not batch_spans:
        raise KeyError(batch)
    began, end = min(span.start for span in batch_spans), max(span.end for span in batch_spans)
    concurrent = [span for span in others if span.end > began and span.start < end]
    gaps = _gaps(batch_spans, concurrent, began, end)
    return Waterfall(
        batch=batch,
        began=began,
        took=1000 * (end - began),
        stages=_stages(batch_spans, began),
        rows=_rows(batch_spans, began),
        gaps=[gap for gap in gaps if gap.took >= LEAST_GAP],
        worked=_worked(batch_spans, began, end),
        worked_elsewhere=_worked(concurrent, began, end),
        idle=sum(gap.took for gap in gaps),
    )


def median_waterfall(waterfalls: Sequence[Waterfall]) -> Waterfall:
    """Return a waterfall with the medians of several waterfalls. Its rows and gaps are found in at least half of them;
    gaps of a waterfall between the same two kinds of work count as one gap.
    """
    enough = len(waterfalls) / 2
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for waterfall in waterfalls:
        for row in waterfall.rows:
            rows[row.who, row.what].append(row)
        together: dict[tuple[str, str], Gap] = {}
        for gap in waterfall.gaps:
            earlier_gap = together.get((gap.after, gap.before))
            together[gap.after, gap.before] = (
                gap if earlier_gap is None else replace(earlier_gap, took=earlier_gap.took + gap.took)
            )
        for key, gap in together.items():
            gaps[key].append(gap)
    return Waterfall(
        batch=f"{waterfalls[0].batch} to {waterfalls[-1].batch}",
        began=waterfalls[0].began,
        took=statistics.median(waterfall.took for waterfall in waterfalls),
        stages=_medians([waterfall.stages for waterfall in waterfalls]),
        rows=sorted(
            (_median_row(matching) for matching in rows.values() if len(matching) >= enough), key=lambda row: row.start
        ),
        gaps=sorted(
            (_median_gap(matching) for matching in gaps.values() if len(matching) >= enough), key=lambda gap: gap.start
        ),
        worked=_medians([waterfall.worked for waterfall in waterfalls]),
        worked_elsewhere=_medians([waterfall.worked_elsewhere for waterfall in waterfalls]),
        idle=statistics.median(waterfall.idle for waterfall in waterfalls),
    )


def _medians(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for mapping in mappings for name in mapping)
    return {name: statistics.median(mapping.get(name, 0.0) for mapping in mappings) for name in names}


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


def _usual(name_lists: Sequence[Sequence[str]]) -> list[str]:
    names = dict.fromkeys(name for names_of_gap in name_lists for name in names_of_gap)
    return [name for name in names if sum(name in names_of_gap for names_of_gap in name_lists) >= len(name_lists) / 2]


def _stages(batch_spans: Sequence[TraceSpan], began: float) -> dict[str, float]:
    durations_ms: dict[str, float] = {}
    last = began
    for stage, (role, what, at_end) in MARKS.items():
        marks = [span for span in batch_spans if (span.role, span.what) == (role, what)]
        if not marks:
            continue
        # a reader may start before the confirm has returned to the publisher
        mark = max(last, max(span.end for span in marks) if at_end else min(span.start for span in marks))
        durations_ms[stage], last = 1000 * (mark - last), mark
    return durations_ms


def _rows(batch_spans: Sequence[TraceSpan], began: float) -> list[Row]:
    kinds: dict[tuple[str, str], list[TraceSpan]] = defaultdict(list)
    for span in batch_spans:
        kinds[span.role, span.what].append(span)
    rows = []
    for (who, what), kind_spans in kinds.items():
        start = min(span.start for span in kind_spans)
        cpu = [span.cpu for span in kind_spans if span.cpu is not None]
        rows.append(
            Row(
                who,
                what,
                start=1000 * (start - began),
                took=1000 * (max(span.end for span in kind_spans) - start),
                times=len(kind_spans),
                total=1000 * sum(span.end - span.start for span in kind_spans),
                cpu=1000 * sum(cpu) if cpu else None,
                bytes=sum(span.bytes for span in kind_spans),
                wait=kind_spans[0].wait,
            )
        )
    return sorted(rows, key=lambda row: (row.start, row.who, row.what))


def _worked(spans: Iterable[TraceSpan], began: float, end: float) -> dict[str, float]:
    by_role: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        if not span.wait:
            by_role[span.role].append((max(span.start, began), min(span.end, end)))
    return {
        role: 1000 * sum(last - first for first, last in union(intervals))
        for role, intervals in sorted(by_role.items())
    }


def _gaps(batch_spans: Sequence[TraceSpan], concurrent: Sequence[TraceSpan], began: float, end: float) -> list[Gap]:
    work = sorted((span for span in batch_spans if not span.wait), key=lambda span: span.start)
    waits = [span for span in batch_spans if span.wait]
    busy = union([(span.start, span.end) for span in work])
    edges = [began, *(edge for interval in busy for edge in interval), end]
    gaps = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        if last <= first:
            continue
        before = next((_name(span) for span in work if span.start >= last), "the end")
        after = max((span for span in work if span.end <= first), key=lambda span: span.end, default=None)
        covering = [span for span in waits if _overlap(span, first, last) >= COVERED * (last - first)]
        elsewhere: dict[str, float] = defaultdict(float)
        for span in concurrent:
            if not span.wait and (shared := _overlap(span, first, last)) > 0:
                elsewhere[_name(span)] += shared
        longest = sorted(elsewhere, key=lambda name: -elsewhere[name])[:3]
        gaps.append(
            Gap(
                start=1000 * (first - began),
                took=1000 * (last - first),
                after="the beginning" if after is None else _name(after),
                before=before,
                waits=tuple(dict.fromkeys(_name(span) for span in sorted(covering, key=lambda span: -span.start))),
                meanwhile=tuple(longest),
            )
        )
    return gaps


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return sorted intervals that cover the same times and do not touch each other.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _overlap(span: TraceSpan, first: float, last: float) -> float:
    return min(span.end, last) - max(span.start, first)


def _name(span: TraceSpan) -> str:
    return f"{span.role}: {span.what}"


def batch_waterfall(folder: Path, selection: str) -> Waterfall:
    """Return the waterfall of batch ``selection``, or the medians of several batches for ``FIRST-LAST``.

    Raises:
        CommandError: The run has no trace, or the trace has no span of the batch.
    """
    spans = read_trace(folder)
    if not spans:
        raise CommandError(
            f"{folder / TRACE_FOLDER} has no trace: the run was made without monitor.trace=true. Start one with it"
        )
    batches = batches_of(spans)
    if not batches:
        raise CommandError(
            f"--batch is {selection!r}, but the {len(spans)} spans in {folder / TRACE_FOLDER} belong to no batch: try "
            "again once the run has worked on a batch"
        )
    chosen = [selection] if selection in batches else []
    if not chosen and (match := re.fullmatch(r"(\d+)-(\d+)", selection)):
        chosen = [batch for batch in batches if batch.isdecimal() and int(match[1]) <= int(batch) <= int(match[2])]
    if not chosen:
        raise CommandError(
            f"--batch is {selection!r}, but {folder / TRACE_FOLDER} has no span of it; wanted {batches[0]} to "
            f"{batches[-1]}, or FIRST-LAST for the medians of several batches"
        )
    waterfalls = [lay_out(spans, batch) for batch in chosen]
    return waterfalls[0] if len(waterfalls) == 1 else median_waterfall(waterfalls)


def as_json(waterfall: Waterfall) -> str:
    """Return a waterfall as JSON. Times are in milliseconds, except for ``began``."""
    return json.dumps(asdict(waterfall), indent=2)


def as_text(waterfall: Waterfall) -> str:
    """Return a waterfall as text for a terminal."""
    head = f"batch {waterfall.batch}: {waterfall.took:.0f} ms, no process worked on it for {waterfall.idle:.0f} ms"
    stages = ", ".join(f"{name} {took:.0f}" for name, took in waterfall.stages.items())
    lines = [head, f"stages (ms): {stages}", "", HEAD, *map(_row_text, waterfall.rows), ""]
    listed = sorted(waterfall.gaps, key=lambda gap: -gap.took)[:LISTED]
    lines += [f"the longest times without work on it (ms), {sum(gap.took for gap in listed):.0f} in all:"]
    for gap in sorted(listed, key=lambda gap: gap.start):
        lines.append(f"{gap.start:9.1f} {gap.took:8.1f}  between {gap.after!r} and {gap.before!r}")
        for label, names in (("waiting", gap.waits), ("other batches", gap.meanwhile)):
            if names:
                lines.append(f"{'':20}{label}: {', '.join(names)}")
    lines += ["", "worked (ms)    on it   on other batches"]
    for role in dict.fromkeys([*waterfall.worked, *waterfall.worked_elsewhere]):
        own_ms, other_ms = waterfall.worked.get(role, 0.0), waterfall.worked_elsewhere.get(role, 0.0)
        lines.append(f"{role:10} {own_ms:9.1f} {other_ms:18.1f}")
    return "\n".join(lines)


def _row_text(row: Row) -> str:
    cpu = "" if row.cpu is None else f"{row.cpu:.1f}"
    size = f"{row.bytes:.0f}" if row.bytes else ""
    activity = f"{row.who}: {row.what}" + (" (waits)" if row.wait else "")
    return f"{row.start:9.1f} {row.took:8.1f} {row.times:5.0f} {row.total:8.1f} {cpu:>7} {size:>8}  {activity}"
