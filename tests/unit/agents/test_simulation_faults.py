"""Thousands of whole runs on MemoryBus, each under the faults that its seed draws: agents killed, frozen and cut off,
messages late, repeated and in another order, engines that die or keep old weights.

A failure names its seed and the command that plays it again; docs/simulation.md says how to read what it prints.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trinity_agents.simulation.coverage import Coverage
from trinity_agents.simulation.explore import explore, play_schedule
from trinity_agents.simulation.schedule import draw

CHUNK, CHUNKS = 50, 4
"""Number of seeds of a default test, and number of default tests."""
EXTENDED_CHUNK, END = 250, 10_000
OFTEN = {
    "gate: coordinator": ("applying",),
    "gate: member": ("applied",),
    "gate: trust in an engine": ("quarantined",),
    "gate: catch-up fetch": ("fetched", "broken off"),
    "ticket": ("opened again", "closed, cut off", "closed again", "decided again", "consumed again"),
    "ticket: consumed": ("trained", "empty", "dropped"),
    "slice": ("published again", "done again", "partial", "failed", "cancelled", "poisoned"),
    "explorer": ("killed", "frozen"),
    "runner": ("killed", "frozen"),
    "operator": ("killed", "frozen"),
    "trainer": ("killed", "frozen"),
    "engine": ("killed",),
    "work of trainer and operator": ("final",),
}
"""States that the 200 seeds of the default suite reach, by what is in them."""
REACHED = Coverage()
"""States that the seeds of the tests so far have reached."""

chunks = [
    *(range(first, first + CHUNK) for first in range(0, CHUNK * CHUNKS, CHUNK)),
    *(
        pytest.param(range(first, min(first + EXTENDED_CHUNK, END)), marks=pytest.mark.extended)
        for first in range(CHUNK * CHUNKS, END, EXTENDED_CHUNK)
    ),
]


@pytest.mark.timeout(600)  # a minute of processor time, of which a loaded machine gives a third
@pytest.mark.parametrize("seeds", chunks, ids=lambda seeds: f"{seeds.start}:{seeds.stop}")
def test_simulation_under_faults_counts_every_run_once(seeds: range) -> None:
    coverage, failed = explore(seeds)
    REACHED.merge(coverage)
    assert not failed, "\n\n".join(one.report() for one in failed)


def test_the_faults_come_to_where_they_matter() -> None:
    if REACHED.seeds < CHUNK * CHUNKS:
        pytest.skip(f"{REACHED.seeds} seeds were played before in this process, wanted {CHUNK * CHUNKS}")
    missing = REACHED.missing()
    assert [f"{what}: {state}" for what in OFTEN for state in OFTEN[what] if f"{what}: {state}" in missing] == []


ONCE_WRONG = [
    (137, [7]),  # an explorer, frozen before it watched for outages, took the run up that a standby had ended
    (3747, [8]),  # an explorer is cut off while a standby goes on, ends the run and itself
    (1362, [0, 1, 2, 3, 5, 9]),  # a thawed explorer commits an old version at an engine that another one has now
    (3070, [0, 1, 2, 4, 10, 11, 12, 13]),  # an explorer dies before its first save: heartbeats are numbered alike
    (3877, [0, 7, 10]),  # a member starts the transfer of a try that is over
    (405, [2]),  # a runner is cut off when the run ends
]
"""Faults that once broke an invariant: the seed, and the faults' places (docs/simulation.md)."""


@pytest.mark.parametrize(("seed", "places"), ONCE_WRONG)
def test_simulation_of_what_once_went_wrong(seed: int, places: list[int]) -> None:
    played = play_schedule(draw(seed).only(places))
    assert not played.violations, played.report()


@pytest.mark.timeout(180)
def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Neither the hashes of texts nor addresses of objects decide anything."""
    script = (
        "from trinity_agents.simulation.explore import play_schedule\n"
        "print(*[play_schedule(seed).trail for seed in (2, 14)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashes in ("1", "2")
    ]
    assert len(outputs[0]) > 1000
    assert outputs[0] == outputs[1]


def test_faults_can_be_left_out() -> None:
    schedule = draw(137)
    assert len(schedule.faults) > 2
    some = schedule.only([0, 2])
    assert some.faults == (schedule.faults[0], schedule.faults[2])
    assert some.command == "python -m trinity_agents.simulation --seed 137 --faults 0,2"
    assert some.only([0]).only([]).command == "python -m trinity_agents.simulation --seed 137 --faults none"
    with pytest.raises(ValueError, match="seed 137 draws faults 0 to"):
        schedule.only([len(schedule.faults)])
