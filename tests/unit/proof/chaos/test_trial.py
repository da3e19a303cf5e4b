"""A run that stands still, does not come back or ends badly is no run that recovers."""

from __future__ import annotations

import asyncio

import pytest

from trinity_mq.errors import CommandError
from trinity_mq.messages import Progress
from trinity_mq.proof.chaos.injector import InjectedFault
from trinity_mq.proof.chaos.schedule import ChaosSchedule, Fault
from trinity_mq.proof.chaos.targets.base import Victim
from trinity_mq.proof.chaos.trial import (
    Plan,
    TrialOutcome,
    _first_steps,
    _points_passed,
    _recovered,
    _wait_for_further_steps,
)
from trinity_mq.proof.chaos.witness import RunObserver
from trinity_mq.testing.virtual_time import run_virtually

FAULT = Fault(number=1, wait=0.0, role="runner", kind="kill", pick=0.0)
SCHEDULE = ChaosSchedule([FAULT])


def outcome(done: InjectedFault) -> TrialOutcome:
    return TrialOutcome(SCHEDULE, "a test", RunObserver(), [done])


def step(witness: RunObserver, number: int, at: float) -> None:
    one = Progress(progress=number, generation=1, step=number, batch=number, ticket=f"t{number}", outcome="trained")
    witness.receive(one, at)


def test_the_verdict_on_recovery() -> None:
    victim = Victim("runner", "runner-0", "7@1")
    recovered = InjectedFault(FAULT, 1.0, victim, back=2.0, recovered=3.0)
    assert _recovered(outcome(recovered), 0).result == "holds"
    assert _recovered(outcome(recovered), 3).evidence == ("the run ended with exit code 3",)
    [line] = _recovered(outcome(InjectedFault(FAULT, 1.0, victim)), None).evidence
    assert line == "fault 1 (kill runner-0): no further heartbeat of its process arrived"
    [line] = _recovered(outcome(InjectedFault(FAULT, 1.0, victim, back=2.0)), None).evidence
    assert "no train step after it was back" in line
    assert _recovered(outcome(InjectedFault(FAULT)), None).result == "not checked"
    stands_still = outcome(recovered)
    stands_still.stands_still = True
    assert _recovered(stands_still, None).evidence == (
        "the run made no further train step in time after the last fault",
    )


@pytest.mark.parametrize(("steps", "further", "goes_on"), [(2, 2, True), (1, 2, False), (3, None, False)])
def test_a_run_that_stands_still_after_the_last_fault_is_noticed(
    steps: int, further: int | None, goes_on: bool
) -> None:
    async def play() -> bool:
        witness = RunObserver()
        step(witness, 1, 0.0)

        async def train() -> None:
            for number in range(steps):
                await asyncio.sleep(7.0)
                step(witness, number + 2, 0.0)

        training = asyncio.create_task(train())
        plan = Plan(schedule=SCHEDULE, timeout=10.0, after=1, further=further)
        found = await _wait_for_further_steps(witness, plan, lambda: False)
        await training
        return found

    assert run_virtually(play(), limit=100) is goes_on


def test_a_run_that_ends_before_the_first_fault_is_said() -> None:
    with pytest.raises(CommandError, match="the run has ended after 0 train steps, wanted 5"):
        run_virtually(_first_steps(RunObserver(), 5, lambda: True), limit=1000)
    with pytest.raises(CommandError, match="300 s have passed after 0 train steps"):
        run_virtually(_first_steps(RunObserver(), 5, lambda: False), limit=1000)


def test_a_point_inside_agents_that_was_asked_for_and_never_hit_is_a_violation() -> None:
    faults = [
        Fault(number=number, wait=0.0, role="gateway", kind="kill", pick=0.0, point=point)
        for number, point in enumerate(("decision_confirmed", "decision_confirmed", "task_confirmed"), 1)
    ]
    done = [InjectedFault(faults[0], 1.0), InjectedFault(faults[1], 2.0, is_inside=True), InjectedFault(faults[2], 3.0)]
    verdict = _points_passed(TrialOutcome(ChaosSchedule(faults), "a test", RunObserver(), done))
    assert verdict.result == "violated"
    assert verdict.evidence == ("task_confirmed (a session's task is confirmed): asked for 1 times",)
    done[2].is_inside = True
    assert (
        _points_passed(TrialOutcome(ChaosSchedule(faults), "a test", RunObserver(), done)).text
        == "2 points, 2 of 3 faults"
    )
