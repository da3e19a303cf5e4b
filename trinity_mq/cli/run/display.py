"""Displays of a run: a live table on a terminal, plain lines anywhere else. Both draw the same View."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from trinity_mq.cli.run.metric_names import duration
from trinity_mq.cli.run.run_view import SyncRow, View

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PLAIN_SECONDS = 5.0
"""Seconds between plain lines while steps are made; three times that while they are not."""
COMING_SECONDS = 1.0
"""Seconds between plain lines while the number of living agents changes."""


class Display(Protocol):
    """An output that shows a run."""

    def show(self, view: View, news: list[str], now: float) -> None:
        """Draw the state; ``news`` are lines that stay."""

    def close(self) -> None:
        """Restore the terminal; the last table stays visible."""


def open_display(stream: TextIO | None = None) -> Display:
    """Return the display that fits ``stream`` (default: standard output)."""
    stream = sys.stdout if stream is None else stream
    return LiveDisplay(stream) if stream.isatty() else PlainDisplay(stream)


class PlainDisplay:
    """One line every few seconds, and news at once; flushed, for pipes and logs."""

    def __init__(self, stream: TextIO, clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S")) -> None:
        self._stream, self._clock = stream, clock
        self._last: tuple[float, int, int] | None = None
        self._left = False

    def show(self, view: View, news: list[str], now: float) -> None:
        for text in news:
            self._write(text)
        if self._due(view, now):
            self._last = (now, view.step, view.alive)
            self._write(plain_line(view))

    def close(self) -> None:
        self._left = True

    def _due(self, view: View, now: float) -> bool:
        if self._last is None:
            return bool(view.agents)
        when, step, alive = self._last
        if view.alive != alive:
            return now - when >= COMING_SECONDS
        return now - when >= (PLAIN_SECONDS if view.step != step else 3 * PLAIN_SECONDS)

    def _write(self, text: str) -> None:
        if self._left:
            return
        try:
            self._stream.write(f"{self._clock()} {text}\n")
            self._stream.flush()
        except OSError:
            self._left = True  # nobody reads any more: no reason to end a run


def plain_line(view: View) -> str:
    """Return the state in one line."""
    parts = [f"step {_steps(view)}", *(f"{name} {value}" for name, value in _figures(view))]
    parts.append("queues " + " ".join(f"{name} {_depth(depth)}" for name, depth in view.depths.items()))
    parts.append(f"agents {view.alive}/{len(view.agents)}")
    parts += [f"{agent.id} waits {duration(agent.waits_seconds)} for {agent.waits_for}" for agent in view.waiting]
    return " | ".join(parts)


class LiveDisplay:
    """A table that is redrawn in place; news scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        # imported here: rich costs more than the rest of the command line together
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, view: View, news: list[str], now: float) -> None:
        for text in news:
            self._console.print(text, markup=False, highlight=False)
        self._live.update(picture(view), refresh=True)

    def close(self) -> None:
        self._live.stop()


def picture(view: View) -> RenderableType:
    """Return the state as a rich renderable."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType]
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(view.run, style="bold"),
        f"step {_steps(view)}",
        ProgressBar(total=view.total, completed=view.step, width=40),
    )
    figures = Text("   ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in _figures(view))
    queues = Text("   ").join(Text.assemble((f"{name} ", "dim"), _depth(depth)) for name, depth in view.depths.items())
    agents = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for column in ("agent", "state", "waits for", "since"):
        agents.add_column(column)
    for agent in view.agents:
        style = "" if agent.alive else "red" if agent.state == "silent" else "dim"
        since = duration(agent.waits_seconds) if agent.waits_for else ""
        agents.add_row(agent.id, agent.state, agent.waits_for or "", since, style=style)
    parts = [head, figures, Text.assemble(("queues  ", "dim"), queues), agents]
    if view.members:
        engines = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
        for column in ("member of the gate", "version", "state"):
            engines.add_column(column)
        for member in view.members:
            engines.add_row(member.id, member.version or "-", member.state)
        parts.append(engines)
    if view.sync is not None:
        parts.append(Text.assemble(("last sync  ", "dim"), sync_line(view.sync)))
    return Group(*parts)


def sync_line(sync: SyncRow) -> str:
    """Return the last sync in one line, such as ``1.7: wait 0 ms, pause 2 ms, transfer 31 ms``, with all counts."""
    phases = ", ".join(f"{name} {value:.0f} ms" for name, value in sync.phases.items())
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sync.counts.items())
    return f"{sync.version or '-'}: {phases}" + (f"   ({counts})" if counts else "")


def _steps(view: View) -> str:
    return f"{view.step}/{'?' if view.total is None else view.total}"


def _figures(view: View) -> list[tuple[str, str]]:
    rows = [("reward", _number(view.reward))]
    rows += [(f"{taskset} accuracy", f"{value:.3f} (step {step})") for taskset, (step, value) in view.results.items()]
    rows += [
        ("tokens/s", "-" if view.tokens_per_second is None else f"{view.tokens_per_second:,.0f}"),
        ("policy", view.version or "-"),
        ("staleness", "-" if view.staleness is None else f"{view.staleness:g}"),
        ("left", "-" if view.seconds_left is None else duration(view.seconds_left)),
    ]
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _depth(depth: int | None) -> str:
    return "-" if depth is None else str(depth)
