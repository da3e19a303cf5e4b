"""Names the culprit that a run waits for, or finds that it moves. Pure functions: observation in, finding out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from trinity_mq.messages import (
    EngineStatus,
    ExplorerStatus,
    GatewayStatus,
    OperatorStatus,
    RunnerStatus,
    SilentAgent,
    TrainerStatus,
)
from trinity_mq.observability.diagnosis.bottlenecks import bottleneck
from trinity_mq.observability.diagnosis.facts import ObservationIndex, counted, duration_text, slices_of
from trinity_mq.observability.diagnosis.levers import lever
from trinity_mq.observability.diagnosis.records import BROKER, Bottleneck, Edge, Observation, RunFinding, State

MOVING_SECONDS = 4.0
"""Seconds without progress up to which a run counts as moving: two heartbeat intervals."""
OVERDUE_SECONDS = 8.0
"""Seconds that work must last at least to be blamed."""
OVERDUE_TIMES = 3.0
"""Multiple of the usual duration that work must last at least to be blamed."""
UNANSWERED_SECONDS = 5.0
"""Seconds without an answer after which an engine counts as frozen."""
SUSPECT_SECONDS = 1.0
"""Seconds without an answer after which an engine is suspected. Other agents are then not blamed for delays that the
engine may cause. A healthy engine answers at once."""
MISSING_SECONDS = 9.0
"""Seconds of listening after which a role without heartbeats is missing. By then the explorer has reported agents that
became silent."""
REDELIVERED_SECONDS = 180.0
"""Seconds after which the broker has redelivered a silent agent's work to another agent of its role."""
STILL_SECONDS = 30.0
"""Seconds without progress after which the longest wait is named, even if no agent takes longer than usual."""
WAIT_SHOWN, MOST_WAITS = 2.0, 6
"""Minimum seconds for a wait to count as evidence, and maximum number of such waits."""
NO_TASKS = "tasks to be submitted"
"""The explorer's reported wait if the taskset does not provide more tasks."""


@dataclass(frozen=True, slots=True)
class _Cause:
    state: State
    culprit: str | None
    words: str
    lever: str
    evidence: tuple[str, ...] = ()


def diagnose(observation: Observation, limit_of: Callable[[Observation], Bottleneck | None] = bottleneck) -> RunFinding:
    """Return the finding about a run: the culprit that it waits for, with evidence and remedy, or that it moves, is
    over or is silent. Never raises, even for inconsistent heartbeats.

    Args:
        observation: All known facts about the run.
        limit_of: Returns the limiting stage, which the finding names if the run moves, or None if it is not known.
    """
    facts = ObservationIndex(observation)
    edges = facts.edges()
    if observation.broker:
        cause_key = (
            "unreachable" if "block" not in observation.broker and "alarm" not in observation.broker else "broker"
        )
        sentence = f"all agents wait for the broker: {observation.broker}"
        return RunFinding("stuck", sentence, BROKER, _evidence_lines(facts), lever(cause_key), edges)
    if _is_over(facts):
        return RunFinding("over", "the run is over: its last batch and its last evaluation are done", edges=edges)
    if not facts.living and not facts.silent:
        ended = ", ".join(sorted(observation.heartbeats))
        heard = f"has sent a heartbeat in {duration_text(observation.listened)}"
        sentence = f"no agent of the run {heard}" + (f" but {ended}, which ended" if ended else "")
        return RunFinding("silent", sentence, lever=lever("nobody"))
    cause = next((cause for rule in RULES for cause in rule(facts)), None)
    if cause is None:
        cause = _longest_wait(facts, edges)
    still = observation.still
    if cause is not None and still >= MOVING_SECONDS:
        waits = _wait_prefix(edges, cause.culprit)
        evidence = (*cause.evidence, *_evidence_lines(facts), f"nothing has progressed for {duration_text(still)}")
        return RunFinding(cause.state, f"{waits}{cause.words}", cause.culprit, evidence, cause.lever, edges)
    limit = limit_of(observation)
    if still < MOVING_SECONDS:
        sentence = "the run moves" if limit is None else f"the run moves; {limit.sentence}"
        evidence = () if cause is None else (f"but {cause.words}",)
    else:
        sentence = f"nothing has progressed for {duration_text(still)}, and no agent takes longer than usual"
        evidence = ()
    return RunFinding(
        "moving", sentence, None, (*evidence, *_evidence_lines(facts)), "" if limit is None else limit.lever, edges
    )


# -- rules in the order of evaluation; each yields causes, worst first


def _frozen_engine(facts: ObservationIndex) -> Iterator[_Cause]:
    frozen = [
        (engine.unanswered + age, beat.id, engine)
        for beat, age in facts.of_role("engine")
        if isinstance(engine := beat.detail, EngineStatus) and engine.unanswered >= UNANSWERED_SECONDS
    ]
    for seconds, name, engine in sorted(frozen, key=lambda item: (-item[0], item[1])):
        words = f"engine {name} has not answered its host for {duration_text(seconds)}: its process is frozen"
        evidence = (f"{name} last reported state {engine.state or 'unknown'}, {engine.load} sequences to generate",)
        yield _Cause("stuck", name, words, lever("engine", name), evidence)


def _silent(facts: ObservationIndex, *, long: bool) -> Iterator[_Cause]:
    for agent in facts.silent:
        others = bool(facts.of_role(agent.role))
        if (others and agent.seconds >= REDELIVERED_SECONDS) == long and (agent.role != "gateway" or long):
            yield _silent_cause(facts, agent)


def _silent_cause(facts: ObservationIndex, agent: SilentAgent) -> _Cause:
    words = (
        f"{agent.id} has sent no heartbeat for {duration_text(agent.seconds)}: its process is frozen, blocked or dead"
    )
    evidence = []
    if agent.slices:
        _, task, first, seconds = max(agent.slices, key=lambda item: item[3])
        evidence.append(
            f"{agent.id} held at least {counted(len(agent.slices), 'slice')}, the oldest of task {task} "
            f"(from run {first}) since {duration_text(seconds + agent.seconds)}"
        )
    heard = [beat.id for beat, _ in facts.of_role(agent.role)]
    evidence.append(f"agents of its role that send heartbeats: {', '.join(heard) or 'none'}")
    remedy = lever("silent_runner" if agent.role == "runner" else "silent", agent.id)
    return _Cause("stuck", agent.id, words, remedy, tuple(evidence))


def _missing(facts: ObservationIndex) -> Iterator[_Cause]:
    if facts.observation.listened < MISSING_SECONDS:
        return
    expected = facts.observation.expected
    alone = set(expected) == {"trainer"}
    rolling = facts.explorer_waits_for_rollouts
    needs = (
        ("explorer", "explorer" in expected or (bool(facts.living) and not alone), "no agent schedules tasks"),
        ("trainer", "trainer" in expected or facts.explorer is not None, "no agent trains or sends weights"),
        ("runner", rolling, f"{counted(facts.depth('tasks.train'), 'message')} in the queue tasks.train"),
        (
            "operator",
            facts.has_unprocessed_batch,
            f"{counted(facts.depth('closed'), 'closed batch', 'closed batches')} in the queue",
        ),
    )
    for role, needed, why in needs:
        if needed and not facts.of_role(role) and not _has_ended(facts, role):
            if facts.is_starting:
                yield _Cause("waiting", role, f"the run is starting: no {role} is heard yet", lever("loading"))
                return
            words = f"no {role} is running: {why}"
            listened = f"no heartbeat of this role arrived in {duration_text(facts.observation.listened)} of listening"
            yield _Cause("stuck", role, words, lever(role), (listened,))


def _starting(facts: ObservationIndex) -> Iterator[_Cause]:
    for beat, age in facts.living:
        if beat.state == "starting" and beat.role in {"explorer", "trainer", "engine"}:
            what = f", for {beat.waits_for}" if beat.waits_for else ""
            since = f" since {duration_text(beat.waits_seconds + age)}" if beat.waits_for else ""
            yield _Cause("waiting", beat.id, f"{beat.id} is starting{what}{since}", lever("loading"))
    for beat, _ in facts.observation.heartbeats.values():
        if beat.role == "engine" and beat.state == "gone" and facts.explorer is not None:
            words = f"engine {beat.id} has died and its host restarts it"
            yield _Cause("waiting", beat.id, words, lever("engine_starting", beat.id))


def _lost_slices(facts: ObservationIndex) -> Iterator[_Cause]:
    if facts.explorer is None:
        return
    beat, status = facts.explorer
    if status.lost:
        words = f"slices were lost, and {beat.id} has sent them again: {status.lost}"
        yield _Cause("waiting", beat.id, words, lever("lost_slices"))
    elif facts.has_lost_slices:
        words = (
            f"the slices of {counted(len(status.open), 'open batch', 'open batches')} are lost, and {beat.id} will "
            "send them again: no runner has any, and "
            "the queues tasks.train and tasks.eval are empty or were deleted"
        )
        yield _Cause("waiting", beat.id, words, lever("lost_slices"))


def _review(facts: ObservationIndex) -> Iterator[_Cause]:
    for beat, age in facts.of_role("operator"):
        operator = beat.detail
        if isinstance(operator, OperatorStatus) and operator.reviews:
            runs = counted(operator.reviews, "run")
            remaining = duration_text(max(0.0, operator.review_seconds - age))
            words = (
                f"{beat.id} waits for people to judge {runs} of its batch; "
                f"in {remaining} the default counts for the remaining runs"
            )
            yield _Cause("waiting", beat.id, words, lever("review"), (f"its ticket is {operator.ticket}",))


def _overdue_trainer(facts: ObservationIndex) -> Iterator[_Cause]:
    for beat, age in facts.of_role("trainer"):
        trainer = beat.detail
        if not isinstance(trainer, TrainerStatus) or not trainer.doing:
            continue
        seconds = trainer.doing_seconds + age
        if not _overdue(seconds, trainer.usual_seconds) or ("sync" in trainer.doing and _engine_suspected(facts)):
            continue
        usual = _median(trainer.usual_seconds)
        words = f"{beat.id} is at {trainer.doing} for {duration_text(seconds)}; {usual}"
        if "sync" not in trainer.doing:
            queued = (
                (f"{counted(len(trainer.in_hand), 'batch', 'batches')} in hand at {beat.id}",)
                if trainer.in_hand
                else ()
            )
            yield _Cause("waiting", beat.id, words, lever("step", room=facts.observation.room), queued)
            continue
        members = trainer.sync.members if trainer.sync else {}
        behind = sorted(name for name, member in members.items() if member.state and member.state != "current")
        evidence = tuple(f"engine {name} is {members[name].state}" for name in behind)
        if trainer.sync and trainer.sync.num_bytes:
            size, limit = trainer.sync.num_bytes / 1e6, duration_text(trainer.sync.deadline)
            evidence += (f"{size:,.0f} MB are sent by {trainer.sync.method}; a transfer may take {limit}",)
        trouble = (
            (f"the last attempt was aborted: {trainer.sync.trouble}",) if trainer.sync and trainer.sync.trouble else ()
        )
        culprit = behind[0] if behind else beat.id
        if behind:
            words = f"{words}; engine {culprit} has not taken the weights"
        yield _Cause("waiting", culprit, words, lever("sync"), (*evidence, *trouble))


def _overdue_operator(facts: ObservationIndex) -> Iterator[_Cause]:
    for beat, age in facts.of_role("operator"):
        operator = beat.detail
        if not isinstance(operator, OperatorStatus) or operator.ticket is None or beat.waits_for:
            continue
        seconds = operator.seconds + age
        if operator.seconds and _overdue(seconds, operator.usual_seconds):
            words = f"{beat.id} processes a batch for {duration_text(seconds)}; {_median(operator.usual_seconds)}"
            queued = f"{counted(facts.depth('closed'), 'closed batch', 'closed batches')} in the queue"
            yield _Cause("waiting", beat.id, words, lever("batch"), (f"its ticket is {operator.ticket}", queued))


def _paused_lane(facts: ObservationIndex) -> Iterator[_Cause]:
    for beat, _ in facts.of_role("runner"):
        paused = beat.detail.paused if isinstance(beat.detail, RunnerStatus) else []
        for lane in paused:
            yield _Cause("waiting", beat.id, f"{beat.id} waits for {lane.line()}", lever("lane"))


def _overdue_slice(facts: ObservationIndex) -> Iterator[_Cause]:
    held = [
        (seconds + age, beat.id, task, first, beat.detail.usual_seconds if isinstance(beat.detail, RunnerStatus) else 0)
        for beat, age in facts.of_role("runner")
        for _, task, first, seconds in slices_of(beat)
    ]
    if _engine_suspected(facts):
        return  # the slice may wait for an answer of the suspected engine
    for seconds, name, task, first, usual in sorted(held, key=lambda item: (-item[0], item[1:]))[:1]:
        if _overdue(seconds, usual):
            words = f"task {task} (from run {first}) runs on {name} for {duration_text(seconds)}; {_median(usual)}"
            limit = facts.observation.limits.get("explorer.max_timeout")
            ends = (f"explorer.max_timeout bounds an attempt at {duration_text(limit)}",) if limit else ()
            yield _Cause("waiting", name, words, lever("slice"), (*_idle_engines_evidence(facts), *ends))


def _no_tasks(facts: ObservationIndex) -> Iterator[_Cause]:
    if facts.explorer is None or facts.explorer[0].waits_for != NO_TASKS or facts.explorer_waits_for_rollouts:
        return
    gateways = [beat.detail for beat, _ in facts.of_role("gateway") if isinstance(beat.detail, GatewayStatus)]
    serving = next((gateway for gateway in gateways if gateway.url), None)
    if serving is None:
        yield _Cause("waiting", None, "the run waits for tasks to be submitted", lever("tasks"))
        return
    words = f"the run waits for rewarded sessions at its gateway {serving.url}"
    sessions = f"{serving.open} sessions are open; {serving.parked} wait for a reward or for their group"
    yield _Cause("waiting", None, words, lever("sessions"), (sessions,))


RULES: tuple[Callable[[ObservationIndex], Iterator[_Cause]], ...] = (
    _frozen_engine,
    partial(_silent, long=False),
    _missing,
    _starting,
    _lost_slices,
    _review,
    _overdue_trainer,
    _overdue_operator,
    _paused_lane,
    _overdue_slice,
    partial(_silent, long=True),
    _no_tasks,
)


def _longest_wait(facts: ObservationIndex, edges: tuple[Edge, ...]) -> _Cause | None:
    """Follow the waits from the trainer, or from the longest wait, to an agent that does not wait for another agent,
    and blame this agent. Return None before :data:`STILL_SECONDS` without progress.
    """
    if facts.observation.still < STILL_SECONDS:
        return None
    by_waiter = {edge.waiter: edge for edge in edges}
    trainer = facts.trainer[0].id if facts.trainer else ""
    edge = by_waiter.get(trainer) or next(iter(edges), None)
    if edge is None:
        busy = [beat.id for beat, _ in facts.living if beat.state == "working"]
        culprit = busy[0] if busy else None
        words = f"{', '.join(busy) or 'no agent'} works, but the run makes no progress"
        return _Cause("waiting", culprit, words, lever("wait"))
    passed = [edge.waiter]
    while edge.on is not None and edge.on not in passed and edge.on in by_waiter:
        edge = by_waiter[edge.on]
        passed.append(edge.waiter)
    culprit = edge.on if edge.on is not None and edge.on not in passed else edge.waiter
    words = f"{edge.waiter} waits {duration_text(edge.seconds)} for {edge.waits_for}"
    return _Cause("waiting", culprit, words, lever("wait"), (f"followed: {' -> '.join([*passed, culprit])}",))


def _engine_suspected(facts: ObservationIndex) -> bool:
    """Return whether an engine has not answered its host for some time, but not long enough to count as frozen."""
    engines = [beat.detail for beat, _ in facts.of_role("engine") if isinstance(beat.detail, EngineStatus)]
    return any(SUSPECT_SECONDS <= engine.unanswered < UNANSWERED_SECONDS for engine in engines)


def _overdue(seconds: float, usual: float) -> bool:
    return seconds >= max(OVERDUE_SECONDS, OVERDUE_TIMES * usual)


def _median(usual: float) -> str:
    return f"the median is {duration_text(usual)}" if usual else "there is no earlier duration to compare with"


def _idle_engines_evidence(facts: ObservationIndex) -> tuple[str, ...]:
    """Return a line if all engines are idle, because then the workflow itself takes the time."""
    engines = [beat.detail for beat, _ in facts.of_role("engine") if isinstance(beat.detail, EngineStatus)]
    if engines and all(engine.load == 0 for engine in engines):
        return ("no engine generates anything: the workflow or its reward function takes the time",)
    return ()


def _has_ended(facts: ObservationIndex, role: str) -> bool:
    """Return whether an agent of the role has finished normally, as at the end of a run. Always False for runners."""
    ended = any(b.role == role and b.state == "finished" for b, _ in facts.observation.heartbeats.values())
    return ended and role != "runner"


def _is_over(facts: ObservationIndex) -> bool:
    beats = [beat for beat, _ in facts.observation.heartbeats.values()]
    explorers = [beat for beat in beats if isinstance(beat.detail, ExplorerStatus)]
    if explorers or "explorer" in facts.observation.expected:
        return any(isinstance(beat.detail, ExplorerStatus) and beat.detail.finished for beat in explorers)
    # a trainer without an explorer; the last heartbeats of other agents do not tell whether the run is over
    return any(isinstance(beat.detail, TrainerStatus) and beat.detail.finished for beat in beats) and not facts.living


def _wait_prefix(edges: tuple[Edge, ...], culprit: str | None) -> str:
    """Return the beginning of the sentence: the trainer's wait, else the explorer's, else an empty text."""
    waits = [edge for edge in edges if edge.waiter != culprit and edge.waiter.startswith(("trainer", "explorer"))]
    if not waits or culprit is None:
        return ""
    edge = min(waits, key=lambda wait: (not wait.waiter.startswith("trainer"), -wait.seconds))
    return f"{edge.waiter} waits {duration_text(edge.seconds)} for {edge.waits_for}: "


def _evidence_lines(facts: ObservationIndex) -> tuple[str, ...]:
    """Return lines about long waits, non-empty queues, dropped dead letters and roles with fewer living agents than
    expected.
    """
    waits = [edge for edge in facts.edges() if not edge.seconds < WAIT_SHOWN][:MOST_WAITS]
    lines = [f"{edge.waiter} waits {duration_text(edge.seconds)} for {edge.waits_for}" for edge in waits]
    depths = {name: depth for name, depth in facts.observation.depths.items() if depth}
    if depths:
        lines.append("queues: " + ", ".join(f"{name} {depth}" for name, depth in depths.items()))
    if facts.explorer and (dropped := facts.explorer[1].dropped_dead):
        lines.append(f"{counted(dropped, 'dead letter was', 'dead letters were')} dropped: their queue is full")
    for role, count in facts.observation.expected.items():
        living = len(facts.of_role(role))
        if living < count:
            lines.append(f"{living} of {count} agents of role {role} are heard")
    return tuple(lines)
