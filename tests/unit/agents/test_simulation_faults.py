"""Thousands of ways to die: whole runs on MemoryBus under kills, delays, repeats, lost connections and alarms, all by
lot.

A failure names its seed. ``SEED=n pytest -k simulation`` plays that one again, ``SEEDS=n`` plays so many from 0 on.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.agents.schedules import play

SEEDS = 80
"""Played where nobody asks for more."""
CHUNKS = [0, 1, *(pytest.param(chunk, marks=pytest.mark.extended) for chunk in (2, 3))]
"""Tests that they are dealt to, so that each stays within the time limit of a test."""


def seeds(chunk: int) -> list[int]:
    if given := os.environ.get("SEED"):
        return [int(given)] if chunk == 0 else []
    return list(range(int(os.environ.get("SEEDS", SEEDS))))[chunk :: len(CHUNKS)]


@pytest.mark.timeout(60 if "SEEDS" not in os.environ else 0)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_simulation_under_faults_counts_every_run_once(chunk: int, tmp_path: Path) -> None:
    played = [play(seed, tmp_path / str(seed)) for seed in seeds(chunk)]
    deaths = [bus.died_at for schedule in played for bus in schedule.lives if bus.dead]
    assert len(played) < 10 or len(set(deaths)) > len(played) / 2, f"agents died nowhere but at {set(deaths)}"


@pytest.mark.parametrize(
    "seed",
    [
        651,  # an explorer is cut off while a standby goes on, ends the run and itself: it must not wait for hours
    ],
)
def test_simulation_of_what_once_went_wrong(seed: int, tmp_path: Path) -> None:
    play(seed, tmp_path)
