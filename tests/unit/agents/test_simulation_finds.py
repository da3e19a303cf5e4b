"""The explored schedules find faults: each rule that is broken here on purpose makes some seed fail, by the invariant
that speaks of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from trinity_agents.explorer.loop import ExplorerLoop
from trinity_agents.explorer.state import ExplorerState, InFlightBatches, StateFile
from trinity_agents.explorer.training_batches import TrainingBatches
from trinity_agents.gateway.agent import Gateway
from trinity_agents.operator.agent import BatchReader, Operator
from trinity_agents.runner.result_publisher import ResultPublisher
from trinity_agents.simulation.__main__ import main
from trinity_agents.simulation.explore import ScheduleOutcome, minimize_faults, play_schedule
from trinity_agents.simulation.schedule import FaultSchedule, StaleWeightsFault, draw
from trinity_agents.trainer.decisions import TicketDecider
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.gateway.session import Session
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import acknowledge
from trinity_mq.sync.gate.canary import Canary

Replacement = tuple[type, str, Callable[..., Any]]
"""A class, the name of one of its methods, and what breaks a rule in its place."""
END = 80
"""One of the seeds before this one fails; each range begins a little before its first seed that fails."""


def first_failure(seeds: Iterable[int | FaultSchedule]) -> ScheduleOutcome:
    for seed in seeds:
        played = play_schedule(seed)
        if played.violations:
            return played
    raise AssertionError(f"none of {seeds} fails")


def break_rule(monkeypatch: pytest.MonkeyPatch, replacements: Iterable[Replacement]) -> None:
    for owner, name, broken in replacements:
        monkeypatch.setattr(owner, name, broken)


async def never(self: object) -> None:
    """Wait for ever, in place of a method that does its work again and again."""
    await asyncio.Event().wait()


def an_operator_that_does_not_deduplicate() -> list[Replacement]:
    parts, read = BatchReader._parts, BatchReader.read

    async def read_all(self: BatchReader, manifest: Any) -> Any:
        found: list[Any] = []

        async def noted(delivery: Any) -> Any:
            rows = await parts(self, delivery)
            found.extend((row, delivery) for row in rows)
            return rows

        self._parts = noted  # type: ignore[method-assign]
        whole = await read(self, manifest)
        listed = {one.attempt for one in manifest.accepted}
        more = [(row, delivery) for row, delivery in found if row.key[0] in listed]
        kind = type(next(iter(whole.values()))) if whole else None
        return {number: kind(delivery, row) for number, (row, delivery) in enumerate(more)} if kind else whole

    return [(BatchReader, "read", read_all)]


def without_repair() -> list[Replacement]:
    """Publish nothing again that seems to be lost, which would hide what a broken rule has lost."""

    return [(Dispatcher, "watch_slices", never), (InFlightBatches, "unseen", lambda self: [])]


def an_explorer_that_does_not_save_before_it_publishes() -> list[Replacement]:
    save = StateFile.save

    async def later(self: StateFile, state: ExplorerState) -> None:
        if all(ticket.published for ticket in state.tickets.values()):
            await save(self, state)

    return [(StateFile, "save", later), *without_repair()]


def an_explorer_that_loses_what_a_cut_off_batch_has_not_done() -> list[Replacement]:
    return [(TrainingBatches, "_requeue_unfinished", lambda self, ticket: None)]


def a_trainer_that_resumes_behind_what_it_has_not_consumed() -> list[Replacement]:
    return [(TicketDecider, "resume_offset", lambda self: self.next_offset)]


def a_runner_that_acknowledges_before_its_result_is_confirmed() -> list[Replacement]:
    report = ResultPublisher.report

    async def acknowledged(self: ResultPublisher, in_flight: Any, result: Any) -> None:
        await acknowledge(in_flight.delivery)
        await report(self, in_flight, result)

    return [(ResultPublisher, "report", acknowledged), *without_repair()]


def a_gate_that_does_not_ask_the_canary() -> list[Replacement]:
    return [(Canary, "problem", lambda self, *about: None)]


def an_operator_that_leaves_a_task_behind() -> list[Replacement]:
    serve = Operator.serve
    kept = []

    async def careless(self: Operator) -> None:
        kept.append(asyncio.create_task(asyncio.sleep(10_000.0)))
        await serve(self)

    return [(Operator, "serve", careless)]


def an_explorer_that_does_not_look_after_an_outage() -> list[Replacement]:
    return [(ExplorerLoop, "_compare_state", never)]


def an_agent_that_does_not_look_for_the_end_after_an_outage() -> list[Replacement]:
    return [(Agent, "_look_for_end", never)]


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


SESSIONS = [draw(seed, sessions=True) for seed in range(8)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("breaks", "seeds", "invariant"),
    [
        (an_operator_that_does_not_deduplicate, range(END), "processed as listed"),
        (an_explorer_that_does_not_save_before_it_publishes, range(59, END), "tasks are given out once"),
        (
            an_explorer_that_loses_what_a_cut_off_batch_has_not_done,
            [draw(8638).only([0, 1, 3, 6, 7, 8])],
            "tasks are given out once",
        ),
        (a_trainer_that_resumes_behind_what_it_has_not_consumed, range(20, END), "trained on once"),
        (a_runner_that_acknowledges_before_its_result_is_confirmed, range(58, END), "one outcome a slice"),
        (a_gate_that_does_not_ask_the_canary, range(48, END), "tokens of the weights they name"),
        (an_operator_that_leaves_a_task_behind, range(END), "no task is left"),
        (an_explorer_that_does_not_look_after_an_outage, [draw(3747).only([8])], "the run ends in time"),
        (an_agent_that_does_not_look_for_the_end_after_an_outage, [draw(405).only([2])], "the run ends in time"),
        (every_gateway_acts, SESSIONS, "only one gateway acts"),
        (a_late_reward_counts_nothing, SESSIONS, "gateways agree"),
    ],
)
def test_a_broken_rule_is_found(
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[], list[Replacement]],
    seeds: Iterable[int | FaultSchedule],
    invariant: str,
) -> None:
    break_rule(monkeypatch, breaks())
    failure = first_failure(seeds)
    violations = [name for name, _ in failure.violations]
    assert invariant in (violations if seeds is SESSIONS else violations[:1]), failure.report()


@pytest.mark.timeout(180)
def test_a_failing_schedule_is_shrunk_and_repeated_by_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_rule(monkeypatch, a_gate_that_does_not_ask_the_canary())
    failure = first_failure(range(48, END))
    least = minimize_faults(failure)
    assert any(isinstance(fault, StaleWeightsFault) for fault in least.schedule.faults)
    assert len(least.schedule.faults) < len(failure.schedule.faults)
    assert main(least.schedule.command.split()[3:]) == 1
    shown = capsys.readouterr().out
    assert "tokens of the weights they name: batch" in shown
    assert "StaleWeightsFault(" in shown
    assert f"again: {least.schedule.command}" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed", "137", "--faults", "99"], "seed 137 draws faults 0 to"),
        (["--seeds", "5:5"], "is not a range of seeds; write a range such as 0:1000"),
        (["--seeds", "0:9", "--faults", "1"], "--faults needs --seed"),
        (["--seed", "3", "--faults", "x"], "are not places of faults"),
    ],
)
def test_a_wrong_command_line_is_explained(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    said = capsys.readouterr()
    assert says in said.out + said.err


@pytest.mark.timeout(180)
def test_seeds_are_explored_by_processes_and_the_states_tabled(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--seeds", "0:6", "--workers", "2", "--table", str(tmp_path / "states.md")]) == 0
    table = (tmp_path / "states.md").read_text(encoding="utf-8")
    assert "| gate: coordinator | applying | entering " in table
    assert "6 seeds. Never reached: " in table
    assert "failed: none" in capsys.readouterr().out
