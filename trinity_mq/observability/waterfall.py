"""``trinity-mq timeline RUN --batch N``: prints one batch from its admission to the commit of its weights."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from trinity_mq.errors import CommandError
from trinity_mq.telemetry import read_trace
from trinity_mq.telemetry.trace import TRACE_FOLDER
from trinity_mq.telemetry.waterfall import Row, Waterfall, batches_of, lay_out, median_waterfall

LISTED = 10
"""Maximum number of gaps shown as text. JSON lists all gaps of at least half a millisecond."""


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
    """Return a waterfall as JSON with times in milliseconds."""
    return json.dumps(asdict(waterfall), indent=2)


def as_text(waterfall: Waterfall) -> str:
    """Return a waterfall as text for a terminal."""
    head = f"batch {waterfall.batch}: {waterfall.took:.0f} ms, no process worked on it for {waterfall.idle:.0f} ms"
    stages = ", ".join(f"{name} {took:.0f}" for name, took in waterfall.stages.items())
    lines = [head, f"stages (ms): {stages}", "", HEAD, *map(_row, waterfall.rows), ""]
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


HEAD = f"{'start ms':>9} {'took ms':>8} {'times':>5} {'sum ms':>8} {'cpu ms':>7} {'bytes':>8}  who: what"


def _row(row: Row) -> str:
    cpu = "" if row.cpu is None else f"{row.cpu:.1f}"
    size = f"{row.bytes:.0f}" if row.bytes else ""
    activity = f"{row.who}: {row.what}" + (" (waits)" if row.wait else "")
    return f"{row.start:9.1f} {row.took:8.1f} {row.times:5.0f} {row.total:8.1f} {cpu:>7} {size:>8}  {activity}"
