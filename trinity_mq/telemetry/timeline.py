"""What each agent did when, read from a run's metrics and drawn: the periods of exploring, training and sync."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard
from xml.etree import ElementTree

What = Literal["explore", "eval", "operators", "train", "skip", "sync", "save"]

DURATIONS: Mapping[tuple[str, str], What] = {
    ("explorer", "time/explore"): "explore",
    ("explorer", "time/eval"): "eval",
    ("operator", "time/operators"): "operators",
    ("trainer", "time/batch"): "train",
    ("trainer", "time/sync_weight"): "sync",
    ("trainer", "time/save_checkpoint"): "save",
}
"""By role and metric: the seconds that something took which ended when the metric was written."""
COLORS: Mapping[What, str] = {
    "explore": "#4e79a7",
    "eval": "#76b7b2",
    "operators": "#b07aa1",
    "train": "#59a14f",
    "skip": "#bab0ac",
    "sync": "#e15759",
    "save": "#edc948",
}
PHASES = ("wait", "pause", "transfer", "apply", "resume")
"""Of a sync, as ``sync/<phase>_ms`` in the same line."""
MAX_SPANS = 4000
"""More than a browser draws at ease; of a longer run the last ones are drawn."""
SLACK = 0.002
"""Seconds by which one may begin before the other ends, both being rounded."""
WIDTH, LEFT, LANE, GAP, TOP = 1400, 130, 16, 10, 46


@dataclass(frozen=True, slots=True)
class Span:
    """Something an agent did, in seconds since the epoch."""

    agent: str
    role: str
    what: What
    step: int
    start: float
    end: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Of a sync, in milliseconds, as far as known."""

    @property
    def words(self) -> str:
        """For a person who points at it."""
        name = "batch" if self.role != "trainer" else "progress"
        phases = ", ".join(f"{phase} {value:.0f} ms" for phase, value in self.phases.items())
        return f"{self.what}, {name} {self.step}: {self.end - self.start:.3f} s" + (f" ({phases})" if phases else "")


def spans(lines: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return what the lines of a metrics file tell, by its start; lines that tell nothing are passed over."""
    found: list[Span] = []
    for line in lines:
        agent, role, step, end = (line.get(name) for name in ("agent", "role", "step", "time"))
        if not (isinstance(agent, str) and isinstance(role, str) and isinstance(step, int) and _is_number(end)):
            continue
        for (whose, name), what in DURATIONS.items():
            seconds = line.get(name)
            if whose != role or not _is_number(seconds) or seconds < 0:
                continue
            kind: What = "skip" if what == "train" and line.get("sample/skipped_step") else what
            found.append(Span(agent, role, kind, step, end - seconds, end, _phases(line) if what == "sync" else {}))
    return sorted(found, key=lambda span: (span.start, span.end))


def lanes(of_agent: Sequence[Span]) -> list[list[Span]]:
    """Spread one agent's spans, by their start, over as few lanes as let none cover another."""
    found: list[list[Span]] = []
    for span in of_agent:
        for lane in found:
            if lane[-1].end <= span.start + SLACK:
                lane.append(span)
                break
        else:
            found.append([span])
    return found


def draw(title: str, every: Sequence[Span]) -> str:
    """Return an SVG picture: a row of lanes for each agent, a dashed line where a sync ends and a period begins.

    Raises:
        ValueError: There is nothing to draw.
    """
    if not every:
        raise ValueError("no line of the metrics says how long something took: nothing to draw")
    shown = sorted(every, key=lambda span: (span.start, span.end))[-MAX_SPANS:]
    first, last = min(span.start for span in shown), max(span.end for span in shown)
    scale = (WIDTH - LEFT - 10) / max(last - first, 1e-3)
    syncs = [span for span in shown if span.what == "sync"]
    rows = {agent: lanes(own) for agent, own in _by_agent(shown, syncs).items()}
    height = TOP + sum(len(own) * LANE + GAP for own in rows.values()) + 30
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", width=str(WIDTH), height=str(height))
    svg.set("font-family", "sans-serif")
    svg.set("font-size", "11")
    _add(svg, "rect", width=WIDTH, height=height, fill="white")
    left_out = f"; the last {len(shown)} of {len(every)} spans" if len(shown) < len(every) else ""
    _add(svg, "text", f"{title}: {last - first:.1f} s{left_out}", x=LEFT, y=16, font_size=13)
    for number, (what, color) in enumerate(COLORS.items()):
        _add(svg, "rect", x=LEFT + 100 * number, y=24, width=10, height=10, fill=color)
        _add(svg, "text", what, x=LEFT + 100 * number + 14, y=33)
    for span in syncs:
        x = round(LEFT + (span.end - first) * scale, 2)
        _add(svg, "line", x1=x, x2=x, y1=TOP - 4, y2=height - 26, stroke="#e15759", stroke_dasharray="2 4")
    top = TOP
    for agent, own in rows.items():
        _add(svg, "text", agent, x=6, y=top + LANE - 4)
        for number, lane in enumerate(own):
            for span in lane:
                _bar(svg, span, LEFT + (span.start - first) * scale, top + number * LANE, scale)
        top += len(own) * LANE + GAP
    _axis(svg, last - first, scale, height)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _by_agent(shown: Sequence[Span], syncs: Sequence[Span]) -> dict[str, list[Span]]:
    """Return the spans of each agent, explorers first: in a sync their engines take the weights, so it is theirs."""
    found: dict[str, list[Span]] = {}
    order = ("explorer", "operator", "trainer")
    for span in sorted(shown, key=lambda span: (order.index(span.role), span.agent)):
        found.setdefault(span.agent, []).append(span)
    for agent, own in found.items():
        if own[0].role == "explorer":
            own += [Span(agent, "explorer", "sync", one.step, one.start, one.end, one.phases) for one in syncs]
        own.sort(key=lambda span: (span.start, span.end))
    return found


def _bar(svg: ElementTree.Element, span: Span, x: float, y: float, scale: float) -> None:
    width = max((span.end - span.start) * scale, 0.5)
    bar = _add(svg, "rect", x=round(x, 2), y=y, width=round(width, 2), height=LANE - 3, rx=2, fill=COLORS[span.what])
    _add(bar, "title", span.words)
    if width > 9 * len(str(span.step)) and span.what in {"explore", "train", "skip"}:
        _add(svg, "text", str(span.step), x=round(x + 3, 2), y=y + LANE - 6, fill="white", pointer_events="none")


def _axis(svg: ElementTree.Element, seconds: float, scale: float, height: int) -> None:
    """Draw the time since the beginning, in about ten round steps."""
    rough = max(seconds, 1e-3) / 10
    power = 10.0 ** math.floor(math.log10(rough))
    pace = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    for number in range(int(seconds / pace) + 1):
        x = round(LEFT + number * pace * scale, 2)
        _add(svg, "line", x1=x, x2=x, y1=height - 26, y2=height - 20, stroke="#888")
        _add(svg, "text", f"{number * pace:g} s", x=x, y=height - 8, text_anchor="middle", fill="#444")


def _add(parent: ElementTree.Element, tag: str, text: str | None = None, **attributes: object) -> ElementTree.Element:
    names = {name.replace("_", "-"): str(value) for name, value in attributes.items()}
    child = ElementTree.SubElement(parent, tag, names)
    child.text = text
    return child


def _phases(line: Mapping[str, Any]) -> dict[str, float]:
    values = {phase: line.get(f"sync/{phase}_ms") for phase in PHASES}
    return {phase: float(value) for phase, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
