"""Whole runs in mode serve on MemoryBus: real gateways and their users beside the agents of every run, each under the
faults that its seed draws.

A failure names its seed and the command that plays it again; docs/simulation.md says how to read what it prints.
"""

from __future__ import annotations

import pytest

from trinity_agents.simulation.__main__ import main
from trinity_agents.simulation.coverage import ALL_STATES, Coverage
from trinity_agents.simulation.explore import explore
from trinity_agents.simulation.schedule import draw

DEFAULT, FEW, CHUNK, END = 16, 4, 50, 2000
"""Seeds of the default tests and of one of them; seeds of an extended one, and the end of all."""
OFTEN = {
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
REACHED = Coverage(ALL_STATES)

chunks = [
    *(range(first, first + FEW) for first in range(0, DEFAULT, FEW)),
    *(
        pytest.param(range(first, min(first + CHUNK, END)), marks=[pytest.mark.extended, pytest.mark.timeout(900)])
        for first in range(DEFAULT, END, CHUNK)
    ),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seeds", chunks, ids=lambda seeds: f"{seeds.start}:{seeds.stop}")
def test_simulated_sessions_are_trained_on_once(seeds: range) -> None:
    coverage, failed = explore(seeds, sessions=True)
    REACHED.merge(coverage)
    assert not failed, "\n\n".join(one.report() for one in failed)


def test_the_faults_come_to_where_sessions_matter() -> None:
    if REACHED.seeds < DEFAULT:
        pytest.skip(f"{REACHED.seeds} seeds were played before in this process, wanted {DEFAULT}")
    missing = REACHED.missing()
    assert [f"{what}: {state}" for what in OFTEN for state in OFTEN[what] if f"{what}: {state}" in missing] == []


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
