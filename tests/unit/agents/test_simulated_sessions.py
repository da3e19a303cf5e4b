"""Runs in mode serve under drawn faults, as in ``test_simulation_faults.py``: real gateways and their users too.

They are a file of their own, so that another process of ``--dist loadfile`` plays them.
"""

from __future__ import annotations

import gc
import weakref

import pytest

from trinity_agents.simulation.__main__ import main
from trinity_agents.simulation.coverage import ALL_STATES, Coverage
from trinity_agents.simulation.explore import explore, play_schedule
from trinity_agents.simulation.schedule import draw
from trinity_agents.simulation.sessions.run import SessionRun

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
        pytest.param(range(first, min(first + CHUNK_OF_SESSIONS, END_OF_SESSIONS)), marks=pytest.mark.extended)
        for first in range(DEFAULT_SESSIONS, END_OF_SESSIONS, CHUNK_OF_SESSIONS)
    ),
]


@pytest.mark.timeout(900)  # fifty seeds take a minute of processor time, of which a loaded machine gives a third
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
def test_nothing_keeps_a_run_that_was_played() -> None:
    """Else a run is freed at any time, and its open files are errors of another test."""
    runs: list[weakref.ref[SessionRun]] = []

    class FollowedRun(SessionRun):
        def __post_init__(self) -> None:
            super().__post_init__()
            runs.append(weakref.ref(self))

    play_schedule(draw(0, sessions=True).only([]), FollowedRun)
    gc.collect()
    assert [run() for run in runs] == [None]


@pytest.mark.timeout(60)
def test_a_seed_with_sessions_is_played_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sessions", "--seed", "0", "--faults", "none"]) == 0
    shown = capsys.readouterr().out
    assert "gateways=" in shown
    assert "every invariant holds" in shown
