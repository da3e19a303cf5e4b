"""The state of a run as the page shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from trinity_mq.messages import TrainerStatus
from trinity_mq.observability.diagnosis import Observation, bottleneck, bottleneck_filter, diagnose, finding_filter
from trinity_mq.observability.display import SYNC_COUNTS, main_figures
from trinity_mq.observability.history import RunHistory
from trinity_mq.observability.run_state import RunState, version_text
from trinity_mq.roles import FLOW


class RunPage:
    """A view of a run's state, as JSON.

    Args:
        state: The run's state. Its times are in seconds since the epoch.
        history: The run's history.
        clock: Returns seconds since the epoch.
    """

    def __init__(self, state: RunState, history: RunHistory, clock: Callable[[], float] = time.time) -> None:
        self.state, self.history = state, history
        self._clock, self._began = clock, clock()
        self._limit, self._finding = bottleneck_filter(), finding_filter()

    def tick(self) -> None:
        """Update the history, the displayed bottleneck and the displayed finding to the current time."""
        now = self._clock()
        self.history.observe(self.state.agents(now), now)
        self._update_verdicts(now)

    def _update_verdicts(self, now: float) -> Observation:
        """Return an observation of the run. If the run is live, update the displayed bottleneck and finding from it."""
        observation = self.state.observation(now)
        if self.state.is_live:
            limit = self._limit.read(bottleneck(observation), now)
            self._finding.read(diagnose(observation, lambda _: limit), now)
        return observation

    def as_map(self) -> dict[str, Any]:
        """Return the state of the run as a JSON object. Bottleneck and finding are updated to the current time."""
        now, state = self._clock(), self.state
        agents = [
            {
                "id": row.id,
                "role": row.beat.role,
                "state": row.state,
                "waits_for": row.waits_for,
                "waits_seconds": round(row.waits_seconds, 1),
                "alive": row.alive,
                "detail": row.beat.detail.as_map(),
            }
            for row in state.agents(now)
        ]
        observation = self._update_verdicts(now)
        limit, finding = (self._limit.shown, self._finding.shown) if state.is_live else (None, None)
        return {
            "run": state.run,
            "now": round(now, 2),
            "live": state.is_live,
            "connection": state.connection,
            "over": bool(agents) and not any(agent["alive"] for agent in agents),
            "step": state.step or state.metrics_step,
            "total": state.total,
            "figures": [list(figure) for figure in main_figures(state, now)],
            "agents": agents,
            "flow": {
                "nodes": _nodes(agents, observation.busy if limit is None else limit.busy),
                "arrows": _arrows(state, now),
            },
            "finding": None if finding is None else _as_map(finding),
            "bottleneck": None if limit is None else _as_map(limit),
            "sync": {
                "version": version_text(state.gate.version),
                "phases": dict(state.gate.phases),
                "counts": {name: getattr(state.gate, name) for name in SYNC_COUNTS},
                "trouble": state.gate.trouble,
                "members": {
                    name: {"version": version_text(member.version), "state": member.state}
                    for name, member in sorted(state.gate.members.items())
                },
            },
            "sessions": None if state.sessions is None else state.sessions.as_map(),
            "failures": [failure.line() for failure in state.failures],
            "news": self._news(),
            "problems": list(state.problems),
            "reviews": state.reviews,
            "samples": self.history.samples.seen,
            "curves": self.history.curves.changes,
        }

    def _news(self) -> list[list[Any]]:
        """Return the news in time order. News without a time are from before the start of this page, and are sorted at
        its start.
        """
        ordered = sorted(self.state.news, key=lambda item: self._began if item[0] is None else item[0])
        return [[None if at is None else round(at, 1), text] for at, text in ordered]


def _nodes(agents: list[dict[str, Any]], busy: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a node for each role that has agents, with a summary of their work. ``busy``: busy share by stage."""
    by_role = {role: [agent for agent in agents if agent["role"] == role] for role in FLOW}
    return [
        {
            "role": role,
            "alive": sum(agent["alive"] for agent in members),
            "count": len(members),
            "busy": None if role not in busy else round(busy[role], 3),
            "item": _item(role, [agent["detail"] for agent in members if agent["alive"]]),
        }
        for role, members in by_role.items()
        if members
    ]


def _arrows(state: RunState, now: float) -> list[dict[str, Any]]:
    """Return the rate and the queue depth of each flow between two roles."""
    slices = [depth for queue in ("tasks.train", "tasks.eval") if (depth := state.depths.get(queue)) is not None]
    in_hand = sum(len(trainer.in_hand) for trainer in state.statuses(TrainerStatus).values())
    arrows = (
        ("explorer", "runner", sum(slices) if slices else None, "slices", "slices"),
        ("runner", "engine", None, "tokens", "tokens"),
        ("runner", "operator", state.depths.get("closed"), "closed", "batches"),
        ("operator", "trainer", in_hand, "progress", "batches"),
    )
    return [
        {"from": source, "to": target, "depth": depth, "rate": state.trends.rate(counter, now), "of": unit}
        for source, target, depth, counter, unit in arrows
    ]


def _as_map(verdict: Any) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(verdict).items()}


def _item(role: str, details: list[dict[str, Any]]) -> str:
    """Return a few words on the current work of a role's agents."""

    def total(name: str) -> float:
        return sum(float(detail.get(name, 0)) for detail in details)

    match role:
        case "explorer":
            return f"{len([batch for detail in details for batch in detail.get('open', ())])} open"
        case "runner":
            return f"{total('running'):.0f} slices"
        case "engine":
            return f"{total('load'):.0f} sequences"
        case "operator":
            return f"{sum(detail.get('ticket') is not None for detail in details)} batches"
        case "trainer":
            return f"step {total('step'):.0f}"
        case _:
            return f"{total('asking'):.0f} asking"
