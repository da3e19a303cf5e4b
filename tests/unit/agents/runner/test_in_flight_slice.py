"""The crashes that a slice has caused, as its dead letter tells them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.unit.agents.world import a_slice
from trinity_agents.runner.in_flight_slice import CrashHistory, InFlightSlice


async def test_the_history_is_there_again_when_its_dead_letter_was_not_confirmed() -> None:
    delivery: Any = SimpleNamespace(deliveries_before=0)
    in_flight = InFlightSlice(a_slice(), delivery, "a1")
    crashes = CrashHistory()
    crashes.add(in_flight, "runner-0", "out of\n memory")
    first = crashes.of(in_flight)
    assert first == ["delivery 1: attempt a1 of runner-0: out of memory"]
    assert crashes.of(in_flight) == first
