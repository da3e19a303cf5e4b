"""Displays of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from trinity_mq.messages import GateStatus, GatewayStatus, release_conflicts, releases_line
from trinity_mq.observability.report.figures import REWARD, format_duration
from trinity_mq.observability.run_state import STALENESS, TOKENS_PER_SECOND, WAIT_SHOWN, RunState, version_text
from trinity_mq.terminal import escape_and_indent, open_console

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

PLAIN_SECONDS = 5.0
"""Seconds between plain lines while steps are made. Without new steps the interval is three times as long."""
COMING_SECONDS = 1.0
"""Seconds between plain lines while the number of living agents changes."""
SYNC_COUNTS = ("syncs", "aborts", "pulls", "canary_failures", "quarantined")


class Display(Protocol):
    """Interface of an output that shows a run."""

    def show(self, state: RunState, news: list[str], now: float) -> None:
        """Draw the current state. ``news`` are lines that stay visible."""

    def close(self) -> None:
        """End the output. The last state stays visible."""


def open_display(stream: TextIO | None = None) -> Display:
    """Return the display that fits ``stream`` (default: standard output)."""
    stream = sys.stdout if stream is None else stream
    return LiveDisplay(stream) if stream.isatty() else PlainDisplay(stream)


class PlainDisplay:
    """Prints a line on the run's state every few seconds, and news at once. Lines are flushed, for pipes and logs."""

    def __init__(self, stream: TextIO, clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S")) -> None:
        self._stream, self._clock = stream, clock
        self._last: tuple[float, int, int] | None = None
        self._shown: tuple[RunState, float] | None = None
        self._closed = False

    def show(self, state: RunState, news: list[str], now: float) -> None:
        self._shown = state, now
        for text in news:
            self._write(text)
        alive = [agent.alive for agent in state.agents(now)]
        if self._due(state.step, alive, now):
            self._last = (now, state.step, sum(alive))
            self._write(format_status_line(state, now))

    def close(self) -> None:
        if self._shown is not None and self._last is not None:
            state, now = self._shown
            if self._last[1:] != (state.step, sum(agent.alive for agent in state.agents(now))):
                self._write(format_status_line(state, now))
        self._closed = True

    def _due(self, step: int, alive: list[bool], now: float) -> bool:
        if self._last is None:
            return bool(alive)
        when, last_step, last_alive = self._last
        if sum(alive) != last_alive:
            return now - when >= COMING_SECONDS
        return now - when >= (PLAIN_SECONDS if step != last_step else 3 * PLAIN_SECONDS)

    def _write(self, text: str) -> None:
        if self._closed:
            return
        try:
            self._stream.write(f"{self._clock()} {escape_and_indent(text)}\n")
            self._stream.flush()
        except OSError:
            self._closed = True  # the reader closed the output, which must not end the run


INSTEAD_OF_REWARD = (("reward", REWARD), ("preference margin", "actor/pair_margin"), ("loss", "actor/ce_loss"))
"""(name, metric) of a run's learning signal. The first metric with a value is shown."""


def format_status_line(state: RunState, now: float) -> str:
    """Return the state of the run in one line."""
    agents = state.agents(now)
    parts = [f"step {_steps(state)}", *(f"{name} {value}" for name, value in main_figures(state, now))]
    if _gauges_hold(state, now):
        parts.append("queues " + " ".join(f"{name} {depth}" for name, depth in _depths(state)))
    if (sessions := state.sessions) is not None:
        parts.append(sessions_line(sessions))
    parts.append(f"agents {sum(agent.alive for agent in agents)}/{len(agents)}")
    for agent in agents:
        if agent.waits_for and agent.waits_seconds >= WAIT_SHOWN:
            parts.append(f"{agent.id} waits {format_duration(agent.waits_seconds)} for {agent.waits_for}")
    return " | ".join(parts)


class LiveDisplay:
    """A table that is redrawn in place. News scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        # imported here because importing rich takes longer than the rest of the command line
        from rich.live import Live

        self._console = open_console(stream)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, state: RunState, news: list[str], now: float) -> None:
        for text in news:
            self._console.print(escape_and_indent(text), highlight=False)
        self._live.update(render_table(state, now), refresh=True)

    def close(self) -> None:
        self._live.stop()


def render_table(state: RunState, now: float) -> RenderableType:
    """Return the state of the run as a rich renderable: a heading, tables and lines."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=state.total, completed=state.step, width=40)
    head.add_row(Text(state.run, style="bold"), f"step {_steps(state)}", bar)
    agents = _table("agent", "state", "waits for", "since")
    for agent in state.agents(now):
        style = "" if agent.alive else "red" if agent.state == "silent" else "dim"
        since = format_duration(agent.waits_seconds) if agent.waits_for else ""
        agents.add_row(agent.id, agent.state, agent.waits_for or "", since, style=style)
    queues = Text.assemble(("queues  ", "dim"), _named(_depths(state)))
    parts: list[RenderableType] = [head, _named(main_figures(state, now)), agents]
    if _gauges_hold(state, now):
        parts.insert(2, queues)
    if (sessions := state.sessions) is not None:
        parts.insert(2, Text(sessions_line(sessions)))
    if len(releases := state.releases(now)) > 1:
        parts.append(Text.assemble(("releases  ", "dim"), releases_line(releases)))
        parts += [Text(conflict, style="bold red") for conflict in release_conflicts(releases)]
    parts += [Text(failure.line(), style="red") for failure in state.failures]
    if state.finding is not None:
        still = f"no progress for {format_duration(state.still(now))}: "
        parts.append(Text(still + state.finding.sentence, style="bold red"))
    if state.gate.members:
        engines = _table("member of the gate", "version", "state")
        for name, member in sorted(state.gate.members.items()):
            engines.add_row(name, version_text(member.version), member.state)
        parts.append(engines)
    if state.gate.phases:
        parts.append(Text.assemble(("last sync  ", "dim"), sync_line(state.gate)))
    return Group(*parts)


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, padding=(0, 2), header_style="dim", pad_edge=False)


def _named(values: Iterable[tuple[str, str]]) -> Text:
    from rich.text import Text

    return Text("   ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in values)


def sessions_line(status: GatewayStatus) -> str:
    """Return the sessions of a run in one line, by state."""
    counts = (
        ("open", status.open),
        ("parked", status.parked),
        ("waiting", status.waiting),
        ("trained", status.trained),
    )
    others = (("dropped", status.dropped), ("not recorded", status.sampled_out + status.unrecorded))
    shown = [f"{count} {name}" for name, count in (*counts, *((name, count) for name, count in others if count))]
    return f"sessions {', '.join(shown)}"


def sync_line(gate: GateStatus) -> str:
    """Return the last weight sync in one line, such as ``1.7: wait 0 ms, pause 2 ms, transfer 31 ms``, with all
    non-zero counts of the gate (:data:`SYNC_COUNTS`).
    """
    phases = ", ".join(f"{name} {value:.0f} ms" for name, value in gate.phases.items())
    values = {name.replace("_", " "): getattr(gate, name) for name in SYNC_COUNTS}
    counts = ", ".join(f"{count} {name}" for name, count in values.items() if count)
    return f"{version_text(gate.version)}: {phases}" + (f"   ({counts})" if counts else "")


def _steps(state: RunState) -> str:
    return f"{state.step}/{'?' if state.total is None else state.total}"


def _depths(state: RunState) -> Sequence[tuple[str, str]]:
    return [(name, "-" if depth is None else str(depth)) for name, depth in state.depths.items()]


def _gauges_hold(state: RunState, now: float) -> bool:
    """Return whether rates, staleness and queue depths are current. They are outdated once no agent is alive any more,
    because all have ended or are silent.
    """
    agents = state.agents(now)
    return not agents or any(agent.alive for agent in agents)


def main_figures(state: RunState, now: float) -> Sequence[tuple[str, str]]:
    """Return the main figures of a run as (name, text): learning signal, evaluations, token rate, weight version,
    staleness and remaining time. Figures that are outdated, because no agent is alive any more, are left out.
    """
    tokens = next((state.metrics[name] for name in TOKENS_PER_SECOND if name in state.metrics), None)
    remaining_s = state.seconds_left(now)
    learning_signal = next((signal for signal in INSTEAD_OF_REWARD if signal[1] in state.metrics), ("reward", REWARD))
    all_figures = [
        (learning_signal[0], _number(state.metrics.get(learning_signal[1]), ".3f")),
        *((f"{taskset} accuracy", f"{value:.3f} (step {step})") for taskset, (step, value) in state.results.items()),
        ("tokens/s", _number(tokens, ",.0f")),
        ("policy", state.version or "-"),
        ("staleness", _number(state.metrics.get(STALENESS), "g")),
        ("left", "-" if remaining_s is None else format_duration(remaining_s)),
    ]
    gauges = {"tokens/s", "staleness", "left"}
    return (
        all_figures if _gauges_hold(state, now) else [(name, text) for name, text in all_figures if name not in gauges]
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
