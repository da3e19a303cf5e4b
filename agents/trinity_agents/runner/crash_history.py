"""What is known of the deaths that slices have caused. Each runner tells its own in its beats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trinity_agents.runner.in_flight_slice import InFlightSlice
from trinity_mq.messages import Heartbeat

REMEMBERED = 16
"""Slices; those that died longest ago are forgotten first."""
DEATHS_EACH = 5
REASON_LIMIT = 160
"""Characters."""


class CrashHistory:
    """How slices ended that could not be answered for here, the latest few of them."""

    def __init__(self) -> None:
        self._of: dict[str, list[str]] = {}

    def note(self, work: InFlightSlice, runner: str, reason: str) -> None:
        """Keep how an attempt ended."""
        name = _name(work)
        known = self._of.pop(name, [])
        known.append(
            f"delivery {work.delivery.deliveries_before + 1}: attempt {work.attempt} of {runner}: "
            f"{' '.join(reason.split())[:REASON_LIMIT]}"
        )
        self._of[name] = known[-DEATHS_EACH:]
        while len(self._of) > REMEMBERED:
            del self._of[next(iter(self._of))]

    def forget(self, work: InFlightSlice) -> None:
        """The slice has an end."""
        self._of.pop(_name(work), None)

    def level(self) -> dict[str, list[str]]:
        """Return what a beat carries."""
        return {name: list(reasons) for name, reasons in self._of.items()}

    def history(self, work: InFlightSlice, beats: Iterable[Heartbeat]) -> list[str]:
        """Return what is known of all deliveries of a slice, by the beats of all runners, a line each."""
        name = _name(work)
        lines = set(self._of.get(name, ()))
        for beat in beats:
            lines.update(_told(beat.detail.get("died"), name))
        now = f"delivery {work.delivery.deliveries_before + 1}:"
        silent = work.delivery.deliveries_before - sum(not line.startswith(now) for line in lines)
        if silent > 0:
            lines.add(
                f"0: of {silent} earlier deliveries no runner says anything: it died, was cut off or gave it back"
            )
        return sorted(lines)


def _name(work: InFlightSlice) -> str:
    return "/".join(map(str, work.key))


def _told(died: Any, name: str) -> list[str]:
    reasons = died.get(name) if isinstance(died, dict) else None
    return [reason for reason in reasons if isinstance(reason, str)] if isinstance(reasons, list) else []
