"""The reasons of the crashes that slices have caused in one runner, kept for the slice's dead letter."""

from __future__ import annotations

from trinity_agents.runner.in_flight_slice import InFlightSlice

REMEMBERED = 1024
"""Slices; those that crashed longest ago are forgotten first."""
DEATHS_EACH = 5
REASON_LIMIT = 160
"""Characters."""


class CrashHistory:
    """Keeps the latest crashes of slices, several of each slice."""

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

    def history(self, work: InFlightSlice) -> list[str]:
        """Return the reasons known here, a line for each delivery; the first line counts the deliveries elsewhere."""
        lines = self._of.get(_name(work), [])
        current = f"delivery {work.delivery.deliveries_before + 1}:"
        elsewhere = work.delivery.deliveries_before - sum(not line.startswith(current) for line in lines)
        if elsewhere <= 0:
            return list(lines)
        return [
            f"{elsewhere} earlier deliveries ended without a reason known here: the runner died, was cut off or is "
            "another one (its log says slice_comes_again)",
            *lines,
        ]


def _name(work: InFlightSlice) -> str:
    return "/".join(map(str, work.key))
