"""One trial: watches a run, injects faults, and judges the results."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trinity_mq.bus import Bus, BusError, Topology
from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.observability.report.text import saved_checkpoints
from trinity_mq.operations.dead_letters import letters
from trinity_mq.proof import invariants
from trinity_mq.proof.chaos.injector import InjectedFault, Injector, by_role
from trinity_mq.proof.chaos.points import INSIDE
from trinity_mq.proof.chaos.schedule import ChaosSchedule
from trinity_mq.proof.chaos.sessions.clients import Clients, Traffic
from trinity_mq.proof.chaos.sessions.stream import read_sessions
from trinity_mq.proof.chaos.sessions.verdicts import judge_sessions
from trinity_mq.proof.chaos.targets.base import FaultTargets
from trinity_mq.proof.chaos.targets.marks import ArmedPoints
from trinity_mq.proof.chaos.tokens import WeightArchive, check_tokens
from trinity_mq.proof.chaos.witness import RunObserver, watch
from trinity_mq.proof.invariants import Expected, FaultCounts, InvariantVerdict
from trinity_mq.proof.record import read_record, read_sets
from trinity_mq.targets.connection import saved_run_id
from trinity_mq.training.checkpoints.checkpoint import Checkpoint
from trinity_mq.transport.blobs import BlobStore

START_SECONDS = 300.0
"""Maximum seconds until the run has made the train steps before the first fault."""
LOOK_SECONDS = 0.5
"""Seconds between two checks whether the run is still running."""
AUDITS = 5
"""Maximum number of checkpoints to try. If the trainer deletes each of them while it is read, the audit is skipped."""
MOST_LETTERS = 1000
"""Maximum number of dead letters to read."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a trial."""

    schedule: ChaosSchedule
    timeout: float
    """Maximum seconds for the recovery from a fault, and for each further train step after the last fault."""
    after: int
    """Number of train steps to wait for before the first fault."""
    further: int | None
    """Number of train steps to wait for after the last fault. None: wait for the run's end."""
    budget: tuple[int, float] | None = None
    """The limit on the ends of a process; see :class:`Injector`."""
    marks: ArmedPoints | None = None
    """Arms points inside agents. None: such points are never reached."""
    clients: Clients | None = None
    """Clients that hold sessions during the trial, in mode ``serve``."""


@dataclass
class TrialOutcome:
    """The outcome of a trial."""

    schedule: ChaosSchedule
    where: str
    witness: RunObserver
    done: list[InjectedFault] = field(default_factory=list)
    began: float = 0.0
    """Time of the event loop at the start of the trial, in seconds."""
    rate_before: float | None = None
    """Batches that the trainer consumed per minute before the first fault. None: unknown."""
    rate_while: float | None = None
    """Batches that the trainer consumed per minute from the first fault to the last recovery. None: unknown."""
    steps: int = 0
    """Number of times that the trainer was seen to consume a batch."""
    seconds: float = 0.0
    verdicts: list[InvariantVerdict] = field(default_factory=list)
    over: bool = False
    """True if the run has ended, by itself or because the trial stopped it."""
    traffic: Traffic | None = None
    """Sessions and answers of the trial's clients. None: the trial did not have clients."""
    stands_still: bool = False
    """True if the run recovered from all faults, but then did not make further train steps in time."""

    @property
    def holds(self) -> bool:
        """True if no invariant is violated."""
        return all(verdict.result != "violated" for verdict in self.verdicts)


async def run_trial(
    bus: Bus,
    topology: Topology,
    targets: FaultTargets,
    plan: Plan,
    *,
    ended: Callable[[], bool],
    tell: Callable[[str], None],
    weights: WeightArchive | None = None,
) -> TrialOutcome:
    """Watch a run, inject the faults, and keep watching until the run is over, has made its further train steps, or
    does not recover.

    Args:
        bus: A connection that the faults do not cut.
        topology: The run's topology.
        targets: Access to the run's processes.
        plan: The plan of the trial.
        ended: Returns whether the run's own process has ended, if known.
        tell: Called with a line of text for each action.
        weights: Keeps the run's weights during the trial. None: the run's folder is not on this machine.

    Raises:
        CommandError: The run does not make its first train steps.
    """
    loop = asyncio.get_running_loop()
    witness = RunObserver()
    injector = Injector(targets, witness, timeout=plan.timeout, tell=tell, budget=plan.budget, marks=plan.marks)
    outcome = TrialOutcome(plan.schedule, targets.where, witness, injector.done, loop.time())

    def over() -> bool:
        return witness.state.finished or ended()

    async with asyncio.TaskGroup() as group:
        watching = [
            group.create_task(watch(bus, topology, witness), name="watch"),
            group.create_task(_poll(witness, weights), name="look"),
        ]
        asking = None if plan.clients is None else group.create_task(plan.clients.work(), name="clients")
        await _first_steps(witness, plan.after, over)
        tell(f"the run has made {plan.after} train steps; {len(plan.schedule.faults)} faults follow")
        await injector.run(plan.schedule.faults, over=over)
        if injector.stuck is None:
            outcome.stands_still = not await _wait_for_further_steps(witness, plan, over)
        if asking is not None and plan.clients is not None:
            tell("the clients hold their sessions to the end, and wait until these are settled")
            await plan.clients.finish(asking, plan.timeout)
            outcome.traffic = plan.clients.traffic
        for task in watching:
            task.cancel()
    outcome.seconds, outcome.steps, outcome.over = loop.time() - outcome.began, len(witness.steps), over()
    outcome.rate_before, outcome.rate_while = _rates(injector.done, witness)
    return outcome


async def _poll(witness: RunObserver, weights: WeightArchive | None) -> None:
    """Keep new weights, and wake waiting tasks regularly, because a run whose processes have all ended does not send
    messages.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if weights is not None:
            await asyncio.to_thread(weights.look)
        witness.changed.notify()


async def _first_steps(witness: RunObserver, count: int, over: Callable[[], bool]) -> None:
    """Wait until the run has made ``count`` train steps.

    Raises:
        CommandError: The run has ended before, or takes too long.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            await witness.changed.until(lambda: over() or len(witness.steps) >= count)
    if len(witness.steps) < count:
        how = "the run has ended" if over() else f"{START_SECONDS:g} s have passed"
        raise CommandError(
            f"{how} after {len(witness.steps)} train steps, wanted {count} before the first fault (--after): see "
            "logs/chaos-run.out in the run's folder, or `trinity-mq why`"
        )


async def _wait_for_further_steps(witness: RunObserver, plan: Plan, over: Callable[[], bool]) -> bool:
    """Wait until the run is over, or has made its further train steps. Return False if a train step does not come in
    time.
    """
    target = None if plan.further is None else len(witness.steps) + plan.further
    while not over() and (target is None or len(witness.steps) < target):
        try:
            async with asyncio.timeout(plan.timeout):
                await _wait_for_step(witness, len(witness.steps), over)
        except TimeoutError:
            return False
    return True


async def _wait_for_step(witness: RunObserver, step_count: int, over: Callable[[], bool]) -> None:
    await witness.changed.until(lambda: over() or len(witness.steps) > step_count)


def _rates(done: Sequence[InjectedFault], witness: RunObserver) -> tuple[float | None, float | None]:
    """Return the batches consumed per minute before the first fault, and from there to the last recovery."""
    struck = [injection.at for injection in done if injection.at is not None]
    if not struck or not witness.steps:
        return None, None
    first, last = struck[0], max((injection.recovered or injection.at or 0.0 for injection in done), default=struck[0])
    return _rate(witness, witness.steps[0][0], first), _rate(witness, first, last)


def _rate(witness: RunObserver, begin: float, end: float) -> float | None:
    batches = [progress for at, progress in witness.steps if begin <= at <= end]
    if len(batches) < 2 or end <= begin:  # a rate needs an interval between two steps
        return None
    return 60.0 * (batches[-1] - batches[0]) / (end - begin)


# -- verdicts


async def judge(
    bus: Bus,
    topology: Topology,
    config: Config,
    outcome: TrialOutcome,
    *,
    run_dir: Path | None,
    targets: FaultTargets,
    weights: WeightArchive | None = None,
    store: BlobStore | None = None,
    code: int | None = None,
) -> None:
    """Read the run's data on the broker and in its folder, and add the verdicts to the outcome.

    Args:
        bus: A connection.
        topology: The run's topology.
        config: The run's configuration.
        outcome: Outcome of the trial.
        run_dir: The run's folder. None: it is not on this machine.
        targets: Access to the run's processes.
        weights: The kept weights of the run.
        store: Blob store of large bodies.
        code: Exit code of the run. None: the trial did not start it, or it ended because the trial asked it to.
    """
    add, witness = outcome.verdicts.append, outcome.witness
    bus.run_id = witness.state.run_id or (saved_run_id(run_dir) if run_dir is not None else None)
    whole = _checkpoints(run_dir)
    if weights is not None:
        weights.look()
    expected = Expected(tasks=_tasks(config), keeps_all=not config.operator.operators)
    add(_recovered(outcome, code))
    if any(fault.point in INSIDE for fault in outcome.schedule.faults):
        add(_points_passed(outcome))
    try:
        record = await read_record(bus, topology, store, weights.folders if weights is not None else ())
        sessions = await read_sessions(bus, topology) if config.mode == "serve" else None
        dead_letters, total = await letters(bus, topology, MOST_LETTERS)
    except BusError as error:
        add(InvariantVerdict("streams can be read", "violated", "1 violation", (str(error),)))
        return
    add(invariants.streams_decode(record))
    add(invariants.one_outcome(record, expected))
    add(invariants.trained_once(record))
    if sessions is not None:
        outcome.verdicts += judge_sessions(outcome.traffic, sessions, record)
    add(invariants.versions_rise(record, witness.commits, witness.committed, witness.served))
    add(invariants.versions_existed(record))
    if weights is not None:
        add(await asyncio.to_thread(check_tokens, config, weights.folders, record.samples))
        weights.clear()
    if run_dir is not None and whole:
        add(await _audited(bus, topology, run_dir, store))
    strikes = FaultCounts(by_role(outcome.done))
    add(invariants.dead_letters_explained(dead_letters, total, strikes, config.broker.delivery_limit))
    add(invariants.nothing_left(await targets.left_over() if outcome.over else None, over=outcome.over))


def _checkpoints(run_dir: Path | None) -> list[Checkpoint]:
    with contextlib.suppress(OSError):
        return [] if run_dir is None else saved_checkpoints(run_dir)
    return []


def _tasks(config: Config) -> int | None:
    """Return the number of tasks in each batch; None if the settings do not fix it."""
    fixed = config.mode == "both" and not config.max_refill and config.buffer.total_steps is not None
    return config.buffer.batch_size if fixed else None


def _recovered(outcome: TrialOutcome, code: int | None) -> InvariantVerdict:
    violations = [
        f"fault {done.fault.number} ({done.fault.kind} {done.victim.name if done.victim else done.fault.role}): "
        + ("no further heartbeat of its process arrived" if done.back is None else "no train step after it was back")
        for done in outcome.done
        if done.is_open
    ]
    if outcome.stands_still:
        violations.append("the run made no further train step in time after the last fault")
    if code:
        violations.append(f"the run ended with exit code {code}")
    struck = [done for done in outcome.done if done.at is not None]
    if not violations and not struck:
        return InvariantVerdict("the run recovers", "not checked", "no fault was injected")
    return invariants.verdict_of("the run recovers", violations, f"from each of {len(struck)} faults")


def _points_passed(outcome: TrialOutcome) -> InvariantVerdict:
    """Check that each inside point in the schedule was hit by at least one of its faults."""
    asked = Counter(fault.point for fault in outcome.schedule.faults if fault.point in INSIDE)
    hit = Counter(done.fault.point for done in outcome.done if done.is_inside)
    missed = [f"{point} ({INSIDE[str(point)].text}): asked for {times} times" for point, times in asked.items()]
    return invariants.verdict_of(
        "points inside agents were hit",
        [line for line, point in zip(missed, asked, strict=True) if not hit[point]],
        f"{len(asked)} points, {hit.total()} of {asked.total()} faults",
    )


async def _audited(bus: Bus, topology: Topology, run_dir: Path, store: BlobStore | None) -> InvariantVerdict:
    """Return the verdict of ``trinity-mq audit`` on the newest checkpoint."""
    from trinity_agents.trainer.audit import Auditor

    name = "audit of the newest checkpoint"
    for _ in range(AUDITS):
        newest = next(iter(_checkpoints(run_dir)), None)
        if newest is None:
            break
        auditor = Auditor(run_dir, newest)
        await asyncio.to_thread(auditor.check_folder, bus.run_id)
        if newest.path.exists():  # else the trainer of the running run deleted it during the audit
            auditor.check_stream(await read_sets(bus, topology, store))
            faults = [f"{check.name}: {check.text}" for check in auditor.checks if check.result == "fault"]
            text = f"{newest.title}: {len(auditor.uids)} experiences"
            return invariants.verdict_of(name, faults, text)
    return InvariantVerdict(name, "not checked", "the trainer deletes checkpoints faster than they can be read")
