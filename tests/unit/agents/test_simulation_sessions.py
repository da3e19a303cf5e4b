"""Whole runs in mode serve on MemoryBus: real gateways and their users beside the agents of every run, each under the
faults that its seed draws.

A failure names its seed and the command that plays it again; docs/simulation.md says how to read what it prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.unit.agents.test_simulation_finds import Replacement, break_rule, never
from trinity_agents.gateway.agent import Gateway
from trinity_agents.simulation.__main__ import main
from trinity_agents.simulation.coverage import ALL_STATES, Coverage
from trinity_agents.simulation.explore import ScheduleOutcome, explore, play_schedule
from trinity_agents.simulation.schedule import draw
from trinity_mq.gateway.session import Session

DEFAULT, FEW, CHUNK, END = 16, 4, 50, 2000
"""Seeds of the default tests and of one of them; seeds of an extended one, and the end of all."""
OFTEN = [
    "gateway: killed",
    "gateway: frozen",
    "gateway: thawed",
    "session: trained",
    "session: evaluated",
    "session: dropped",
    "users: asked again",
    "users: asked again elsewhere",
    "users: equal requests at once",
    "users: one call, and feedback",
    "users: rewarded late",
    "users: rewarded behind the cut",
    "users: rewarded twice",
    "users: an answer rewarded",
    "users: rewarded over AMQP",
    "users: rewarded after the end",
    "users: rewarded wrongly",
    "users: vanishes",
    "users: discarded",
    "users: failed",
    "events of sessions: published again",
    "events of sessions: refused",
    "events of sessions: cut by retention",
    "events of sessions: answer superseded",
    "events of sessions: call not received",
    "events of sessions: acted after another",
]
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
    assert [state for state in OFTEN if state in REACHED.missing()] == []


def first_failure(seeds: Iterable[int]) -> ScheduleOutcome:
    for seed in seeds:
        played = play_schedule(draw(seed, sessions=True))
        if played.violations:
            return played
    raise AssertionError(f"none of {seeds} fails")


def every_gateway_acts() -> list[Replacement]:
    async def at_once(self: Gateway, *about: Any, **how: Any) -> bool:
        return True

    return [(Gateway, "take_lock", at_once), (Gateway, "restart_when_lock_lost", never)]


def a_late_reward_counts_nothing() -> list[Replacement]:
    rewarded = Session._rewarded

    def first_alone(self: Session, body: Any) -> None:
        if self.reward is None:
            rewarded(self, body)

    return [(Session, "_rewarded", first_alone)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("breaks", "invariant"),
    [(every_gateway_acts, "only one gateway acts"), (a_late_reward_counts_nothing, "gateways agree")],
)
def test_a_broken_rule_of_sessions_is_found(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[], list[Replacement]], invariant: str
) -> None:
    break_rule(monkeypatch, breaks())
    failure = first_failure(range(8))
    assert invariant in {name for name, _ in failure.violations}, failure.report()


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
