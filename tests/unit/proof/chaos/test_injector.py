"""A schedule is done to a run in its order, at its points, and each recovery is noted; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

import pytest

from trinity_mq.errors import CommandError
from trinity_mq.messages import Heartbeat, Progress, SyncEvent
from trinity_mq.proof.chaos.injector import InjectedFault, Injector, by_role
from trinity_mq.proof.chaos.schedule import ChaosSchedule, Fault
from trinity_mq.proof.chaos.targets.base import Victim, VictimGoneError
from trinity_mq.proof.chaos.targets.marks import ArmedPoints, Hit
from trinity_mq.proof.chaos.trial import Plan, TrialOutcome, _first_steps, _recovered, _wait_for_further_steps
from trinity_mq.proof.chaos.witness import RunObserver
from trinity_mq.testing.virtual_time import run_virtually

BEAT, STEP = 1.0, 2.0
"""Seconds between heartbeats, and between train steps."""
RESTART = 5.0
"""Seconds from the end of an agent to its first heartbeat as another process."""


class Run:
    """A run of a trainer and two runners that beats, and trains while all of it lives; the targets of an injector."""

    where = "a test"
    is_local = False
    possible: ClassVar[dict[str, Sequence[str]]] = {}

    def __init__(self, witness: RunObserver) -> None:
        self.witness = witness
        self.lives = {"trainer-0": 1, "runner-0": 1, "runner-1": 1}
        self.down: dict[str, float] = {}
        self.frozen: set[str] = set()
        self.acts: list[tuple[float, str, str]] = []
        self.refuse: list[Exception] = []
        self.progress = 0
        self.restarts = True

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def go(self) -> None:
        at = 0.0
        while True:
            await asyncio.sleep(BEAT)
            at += BEAT
            for agent, when in tuple(self.down.items()):
                if self.now >= when and self.restarts:
                    del self.down[agent]
                    self.lives[agent] += 1
            for agent in self.lives.keys() - self.down.keys() - self.frozen:
                self.beat(agent)
            if not self.down and not self.frozen and at % STEP == 0:
                self.step()

    def beat(self, agent: str) -> None:
        role: Any = agent.partition("-")[0]
        life = f"life {self.lives[agent]}"
        beat = Heartbeat(role=role, id=agent, seq=round(self.now), incarnation=life, lease=6.0, state="working")
        self.witness.receive(beat, self.now)

    def step(self) -> None:
        self.progress += 1
        one = Progress(progress=self.progress, generation=1, step=1, batch=self.progress, ticket="t", outcome="trained")
        self.witness.receive(one, self.now)

    async def find(self, role: str) -> list[Victim]:
        names = sorted(agent for agent in self.lives if agent.startswith(role) and agent not in self.down)
        return [Victim(role, name, f"{7 + self.lives[name]}@1", name) for name in names]

    async def strike(self, victim: Victim, kind: str) -> None:
        if self.refuse:
            raise self.refuse.pop(0)
        self.acts.append((self.now, kind, victim.name))
        if kind == "freeze":
            self.frozen.add(victim.name)
        else:
            self.down[victim.name] = self.now + RESTART

    async def relieve(self, victim: Victim, kind: str) -> None:
        self.acts.append((self.now, f"end of {kind}", victim.name))
        self.frozen.discard(victim.name)

    async def left_over(self) -> list[str] | None:
        return None


class StoppedAt(ArmedPoints):
    """Says that an agent has stopped itself at every point, or that none has."""

    def __init__(self, hit: Hit | None) -> None:
        self.answer, self.asked = hit, list[tuple[str, int]]()

    async def hit(self, point: str, occurrence: int, over: Callable[[], bool], seconds: float) -> Hit | None:
        self.asked.append((point, occurrence))
        return self.answer


def play(
    *faults: Fault,
    act: Callable[[Run], Coroutine[Any, Any, None]] | None = None,
    over: Callable[[Run], bool] = lambda _run: False,
    budget: tuple[int, float] | None = None,
    marks: StoppedAt | None = None,
    **settings: Any,
) -> tuple[Run, list[InjectedFault], Injector]:
    """Inject faults into a run with these settings, beside which ``act`` goes on."""

    async def main() -> tuple[Run, list[InjectedFault], Injector]:
        witness = RunObserver()
        run = Run(witness)
        vars(run).update(settings)
        injector = Injector(run, witness, timeout=60.0, tell=lambda _line: None, budget=budget, marks=marks)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run.go())]
            if act is not None:
                tasks.append(group.create_task(act(run)))
            await asyncio.sleep(3.5)
            await injector.run(faults, over=lambda: over(run))
            for task in tasks:
                task.cancel()
        return run, injector.done, injector

    return run_virtually(main(), limit=1000)


def fault(number: int, role: str, kind: str = "kill", wait: float = 1.0, **more: Any) -> Fault:
    return Fault(**({"pick": 0.0} | {"number": number, "role": role, "kind": kind, "wait": wait} | more))


def test_a_fault_waits_for_the_recovery_of_the_one_before() -> None:
    run, done, injector = play(fault(1, "runner"), fault(2, "trainer"))
    assert run.acts == [(4.5, "kill", "runner-0"), (13.0, "kill", "trainer-0")]
    assert [(one.at, one.back, one.recovered) for one in done] == [(4.5, 10.0, 12.0), (13.0, 18.0, 20.0)]
    assert injector.stuck is None
    assert by_role(done) == {"runner": 1, "trainer": 1}


def test_one_that_comes_together_with_another_does_not() -> None:
    run, done, _ = play(fault(1, "runner"), fault(2, "runner", together=True, pick=1.0))
    assert run.acts == [(4.5, "kill", "runner-0"), (5.5, "kill", "runner-1")]
    assert [one.recovered for one in done] == [12.0, 12.0]


def test_a_freeze_ends_after_its_seconds_and_recovery_counts_from_there() -> None:
    run, done, _ = play(fault(1, "trainer", "freeze", seconds=7.0))
    assert run.acts == [(4.5, "freeze", "trainer-0"), (11.5, "end of freeze", "trainer-0")]
    assert (done[0].ended, done[0].back, done[0].recovered) == (11.5, 12.0, 14.0)


def test_a_marked_point_is_waited_for() -> None:
    async def act(run: Run) -> None:
        for at in (4.7, 6.1, 7.3):
            await asyncio.sleep(at - run.now)
            run.witness.receive(SyncEvent(verb="go", sender="trainer-0", attempt=round(at * 10)), run.now)
        await asyncio.sleep(1000)

    run, done, _ = play(fault(1, "trainer", point="sync_go", occurrence=2, wait=0.5), act=act)
    assert [round(at, 6) for at, _, _ in run.acts] == [6.1]
    assert done[0].note == ""


def test_a_point_that_does_not_come_is_said_and_the_fault_is_done_all_the_same() -> None:
    run, done, _ = play(fault(1, "runner", point="evaluating"))
    assert [act[1:] for act in run.acts] == [("kill", "runner-0")]
    assert done[0].note == "its point was not reached"


def test_another_victim_takes_the_place_of_one_that_has_ended() -> None:
    run, done, _ = play(fault(1, "runner"), refuse=[VictimGoneError("it has ended")])
    assert len(run.acts) == 1
    assert done[0].victim is not None


def test_what_cannot_be_done_is_noted_and_the_others_are_done() -> None:
    run, done, _ = play(fault(1, "runner"), fault(2, "trainer"), refuse=[CommandError("docker does not answer")])
    assert [act[1:] for act in run.acts] == [("kill", "trainer-0")]
    assert (done[0].at, done[0].note) == (None, "docker does not answer")


def test_what_was_begun_and_failed_is_ended() -> None:
    cuts = [fault(number, "runner", "cut", 0.0, seconds=seconds) for number, seconds in ((1, 3.0), (2, 0.0))]
    run, (cut, _), _ = play(*cuts, refuse=[CommandError("it was taken off one of its two networks")])
    assert cut.at is None
    assert [kind for _, kind, _ in run.acts] == ["end of cut", "cut", "end of cut"], "one of no seconds is ended too"


def test_a_run_that_does_not_recover_ends_the_faults() -> None:
    frozen = fault(2, "runner", "freeze", seconds=500.0, together=True)
    run, done, injector = play(fault(1, "trainer"), frozen, fault(3, "runner"), restarts=False)
    assert injector.stuck is done[0]
    assert [kind for _, kind, _ in run.acts] == ["kill", "freeze", "end of freeze"], "nothing stays frozen"
    assert (done[0].back, done[2].at, done[2].note) == (None, None, "the run had not recovered")


def test_the_end_of_the_run_ends_the_faults() -> None:
    _, done, injector = play(fault(1, "runner"), fault(2, "runner"), over=lambda run: run.progress >= 3)
    assert injector.stuck is None
    assert done[0].recovered is not None
    assert (done[1].at, done[1].note) == (None, "the run was over")


def test_a_process_is_not_ended_more_often_than_its_supervisor_bears() -> None:
    run, done, _ = play(*(fault(n, "trainer") for n in range(1, 5)), budget=(2, 600.0))
    assert len(run.acts) == 2
    assert [one.at is None for one in done] == [False, False, True, True]
    assert "its supervisor would give up" in done[2].note


def at_point(kind: str, hit: Hit | None) -> tuple[Run, InjectedFault, StoppedAt]:
    marks = StoppedAt(hit)
    run, done, _ = play(fault(1, "runner", kind, point="result_confirmed", occurrence=2, seconds=1.0), marks=marks)
    return run, done[0], marks


def test_who_stopped_itself_at_the_point_is_the_victim_and_not_the_one_that_was_picked() -> None:
    run, done, marks = at_point("kill", Hit("runner-1", 8))
    assert marks.asked == [("result_confirmed", 2)]
    assert run.acts == [(4.5, "kill", "runner-1")]
    assert (done.is_inside, done.note) == (True, "")
    run, done, _ = at_point("restart", Hit("runner-1", 8))
    assert run.acts == [(4.5, "restart", "runner-1"), (4.5, "end of freeze", "runner-1")], "it goes on from its point"
    assert done.is_inside


@pytest.mark.parametrize("hit", [None, Hit("runner-1", 99)])
def test_a_point_inside_that_nobody_passes_is_said_and_does_not_count(hit: Hit | None) -> None:
    run, done, _ = at_point("kill", hit)
    assert run.acts == [(4.5, "kill", "runner-0")]
    assert (done.is_inside, done.note) == (False, "its point was not reached")


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
