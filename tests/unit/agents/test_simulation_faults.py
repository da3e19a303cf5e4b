"""Thousands of whole runs on MemoryBus, each under the faults that its seed draws: agents killed, frozen and cut off,
messages late, repeated and in another order, engines that die or keep old weights.

A failure names its seed and the command that plays it again; docs/simulation.md says how to read what it prints.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trinity_agents.simulation.__main__ import main
from trinity_agents.simulation.coverage import ALL_STATES, Coverage
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
        pytest.param(
            range(first, min(first + EXTENDED_CHUNK, END)), marks=[pytest.mark.extended, pytest.mark.timeout(600)]
        )
        for first in range(CHUNK * CHUNKS, END, EXTENDED_CHUNK)
    ),
]


@pytest.mark.timeout(300)  # a minute of processor time, of which a loaded machine gives a third
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


# -- runs in mode serve: real gateways and their users beside the agents of every run


DEFAULT_SESSIONS, FEW_SESSIONS, CHUNK_OF_SESSIONS, END_OF_SESSIONS = 16, 4, 50, 2000
"""Seeds of the default tests and of one of them; seeds of an extended one, and the end of all."""
OFTEN_IN_SESSIONS = {
    "gateway": ("killed", "frozen", "thawed"),
    "session": ("trained", "evaluated", "dropped"),
    "users": (
        "asked again",
        "asked again elsewhere",
        "equal requests at once",
        "one call, and feedback",
        "rewarded late",
        "rewarded behind the cut",
        "rewarded twice",
        "an answer rewarded",
        "rewarded over AMQP",
        "rewarded after the end",
        "rewarded wrongly",
        "vanishes",
        "discarded",
        "failed",
    ),
    "events of sessions": (
        "published again",
        "refused",
        "cut by retention",
        "answer superseded",
        "call not received",
        "acted after another",
    ),
}
"""States that the seeds of the default suite reach: the faults come to where they matter."""
REACHED_BY_SESSIONS = Coverage(ALL_STATES)

chunks_of_sessions = [
    *(range(first, first + FEW_SESSIONS) for first in range(0, DEFAULT_SESSIONS, FEW_SESSIONS)),
    *(
        pytest.param(
            range(first, min(first + CHUNK_OF_SESSIONS, END_OF_SESSIONS)),
            marks=[pytest.mark.extended, pytest.mark.timeout(900)],
        )
        for first in range(DEFAULT_SESSIONS, END_OF_SESSIONS, CHUNK_OF_SESSIONS)
    ),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seeds", chunks_of_sessions, ids=lambda seeds: f"{seeds.start}:{seeds.stop}")
def test_simulated_sessions_are_trained_on_once(seeds: range) -> None:
    coverage, failed = explore(seeds, sessions=True)
    REACHED_BY_SESSIONS.merge(coverage)
    assert not failed, "\n\n".join(one.report() for one in failed)


def test_the_faults_come_to_where_sessions_matter() -> None:
    if REACHED_BY_SESSIONS.seeds < DEFAULT_SESSIONS:
        pytest.skip(f"{REACHED_BY_SESSIONS.seeds} seeds were played before in this process, wanted {DEFAULT_SESSIONS}")
    missing = REACHED_BY_SESSIONS.missing()
    assert [
        f"{what}: {state}"
        for what in OFTEN_IN_SESSIONS
        for state in OFTEN_IN_SESSIONS[what]
        if f"{what}: {state}" in missing
    ] == []


def test_the_seeds_of_runs_with_sessions_are_others() -> None:
    with_sessions = draw(137, sessions=True)
    assert with_sessions.sessions is not None
    assert with_sessions.only([0]).command == "python -m trinity_agents.simulation --sessions --seed 137 --faults 0"
    assert draw(137).sessions is None
    assert draw(137).settings != with_sessions.settings


@pytest.mark.timeout(60)
def test_a_seed_with_sessions_is_played_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sessions", "--seed", "0", "--faults", "none"]) == 0
    shown = capsys.readouterr().out
    assert "gateways=" in shown
    assert "every invariant holds" in shown
