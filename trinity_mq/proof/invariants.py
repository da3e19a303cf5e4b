"""Invariants of a run, for chaos, simulation and audit. Pure functions over the record of the run and the history of a
checkpoint.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from trinity_mq.bus import Incoming
from trinity_mq.errors import excerpt
from trinity_mq.messages import Progress, TaskResult, Version
from trinity_mq.proof.record import ProcessedSet, Record, VersionSeen

Key = TypeVar("Key")
Entry = Mapping[str, Any]
"""A line of a checkpoint's history."""
Result = Literal["holds", "violated", "not checked"]
MOST_EVIDENCE = 5
HAVE_RUNS = {"finished", "partial", "cancelled"}
"""Outcomes of slices that may contribute finished rollouts to a batch."""
TRAINABLE_LATER = {"failed", "skipped"}
"""Outcomes after which a ticket may be repaired and trained on later."""


@dataclass(frozen=True)
class InvariantVerdict:
    """The verdict on one invariant."""

    name: str
    result: Result
    text: str
    """The finding: the statement that holds, with numbers; the reason why it was not checked; or the number of
    violations."""
    evidence: tuple[str, ...] = ()
    """The first violations, one line each."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expectations that follow from the run's settings."""

    tasks: int | None = None
    """Number of tasks in each batch; None: not fixed by the settings."""
    keeps_all: bool = True
    """True if no user operator adds or drops experiences."""


def verdict_of(name: str, violations: Iterable[str], holds: str) -> InvariantVerdict:
    """Return the verdict on an invariant from its violations, and the text for the case without violations."""
    violation_list = list(violations)
    if violation_list:
        count = f"{len(violation_list)} violation{'s' if len(violation_list) > 1 else ''}"
        return InvariantVerdict(name, "violated", count, tuple(violation_list[:MOST_EVIDENCE]))
    return InvariantVerdict(name, "holds", holds)


def lineage(progress: Sequence[Progress]) -> list[Progress]:
    """Return the progress that led to the last weights. Progress of a generation after the checkpoint from which the
    next generation resumed is left out. Repeated messages count once.
    """
    line: dict[int, Progress] = {}
    generation = 0
    for message in progress:
        if message.generation > generation:
            generation = message.generation
            line = {number: consumed for number, consumed in line.items() if number < message.progress}
        if message.generation == generation:
            line.setdefault(message.progress, message)
    return [line[number] for number in sorted(line)]


# -- each task has exactly one outcome


def one_outcome(record: Record, expected: Expected) -> InvariantVerdict:
    """Check that each task of a decided batch has one outcome, that no rollout is reported twice, that the batch holds
    only reported rollouts, and, unless operators may drop experiences, all rollouts of finished slices.
    """
    name = "one outcome for each task"
    if record.results_begin or record.ready_begin:
        return InvariantVerdict(name, "not checked", "retention has cut the beginning of the streams")
    deciding = {ticket: processed for ticket, processed in record.deciding.items() if processed.ready.state == "ready"}
    first = _first_results(record.results)
    violations = [
        line
        for ticket, processed in deciding.items()
        for line in _batch_violations(processed, first.get(ticket, {}), expected)
    ]
    tasks = sum(len({task for task, _ in first.get(ticket, ())}) for ticket in deciding)
    runs = sum(len(processed.uids) for processed in deciding.values())
    return verdict_of(name, violations, f"{tasks} tasks in {len(deciding)} batches, {runs} experiences")


def _first_results(results: Iterable[TaskResult]) -> dict[str, dict[tuple[int, int], TaskResult]]:
    """Return, by ticket, the deciding result of each slice (task and first run): its first result that is not late."""
    first: defaultdict[str, dict[tuple[int, int], TaskResult]] = defaultdict(dict)
    for result in results:
        if result.outcome != "late":
            first[result.ticket].setdefault((result.task_id, result.run_base), result)
    return first


def _batch_violations(
    processed: ProcessedSet, slices: Mapping[tuple[int, int], TaskResult], expected: Expected
) -> Iterator[str]:
    batch = f"batch {processed.ready.batch}"
    counted: Counter[tuple[str, int]] = Counter()
    for result in slices.values():
        if result.outcome in HAVE_RUNS:
            counted.update((str(result.task_id), run) for run in result.runs)
    if repeated := [key for key, times in counted.items() if times > 1]:
        yield f"{batch}: runs (task, run) that two slices report: {excerpt(repeated)}"
    trained_runs = {(task, run) for _, task, run, _ in processed.runs}
    if unknown := sorted(trained_runs - set(counted)):
        yield f"{batch}: runs (task, run) that are in it though no first result reports them: {excerpt(unknown)}"
    keeps = expected.keeps_all and not processed.unread and not processed.ready.filtered_groups
    finished = {
        (str(result.task_id), run) for result in slices.values() if result.outcome == "finished" for run in result.runs
    }
    if keeps and (lost := sorted(finished - trained_runs)):
        yield f"{batch}: finished runs (task, run) that are not in it: {excerpt(lost)}"
    if expected.tasks is not None:
        tasks = {task for task, _ in slices}
        if len(tasks) != expected.tasks and not processed.ready.metrics.get("rollout/slices/cancelled"):
            yield f"{batch}: {len(tasks)} tasks have an outcome, wanted {expected.tasks}"
    for (task, base), result in slices.items():
        if result.outcome == "finished" and len(set(result.runs)) != result.repeat_times:
            yield (
                f"{batch}, task {task} from run {base}: finished with {len(set(result.runs))} runs, wanted "
                f"{result.repeat_times}"
            )


# -- each experience is trained on at most once


def trained_once(record: Record) -> InvariantVerdict:
    """Check that each experience is trained on at most once in the lineage of the last weights, and that no batch of
    this lineage is missing or repeated.
    """
    name = "each experience trained on once"
    line = lineage(record.progress[: record.settled])
    if not line:
        return InvariantVerdict(name, "not checked", "the trainer has consumed no batch")
    deciding = record.deciding
    violations: list[str] = []
    begins = 1 if not record.results_begin else line[0].progress
    missing = sorted(set(range(begins, line[-1].progress + 1)) - {step.progress for step in line})
    if missing:
        violations.append(f"progress without a message of the trainer: {excerpt(missing)}")
    tickets = Counter(step.ticket for step in line)
    violations += [f"ticket {ticket} was consumed {times} times" for ticket, times in tickets.items() if times > 1]
    batches = Counter(str(step.batch) for step in line)
    violations += [f"batch {batch} was consumed {times} times" for batch, times in batches.items() if times > 1]
    if not record.results_begin and (gaps := _skipped_batches(line)):
        violations.append(f"batches that were skipped: {excerpt(gaps)}")
    trained: Counter[str] = Counter()
    for step in line:
        processed = deciding.get(step.ticket)
        if processed is None and not record.ready_begin and step.outcome == "trained":
            violations.append(f"batch {step.batch} was trained on, and no complete set of it is on the stream")
        if processed is not None and step.outcome == "trained":
            trained.update(processed.uids)
            violations += _repeated_steps(processed)
    violations += [f"experience {uid} is in {times} places that were trained on" for uid, times in _repeated(trained)]
    return verdict_of(
        name,
        violations,
        f"{len(trained)} experiences in {len(line)} batches, over {_generations(record)} starts of the trainer",
    )


def _skipped_batches(line: Sequence[Progress]) -> list[int]:
    numbers = {int(step.batch) for step in line if str(step.batch).isdecimal()}
    # The trainer may consume batches in another order, so only gaps below the number of consumed batches count.
    return sorted(set(range(1, len(numbers) + 1)) - numbers) if len(numbers) == len(line) else []


def _repeated_steps(processed: ProcessedSet) -> Iterator[str]:
    """Yield a line for each step of a rollout that a set holds more than once. If it holds all steps more than once,
    yield nothing, because rollouts then have several experiences for each step.
    """
    counted = Counter(processed.runs)
    if counted and counted.most_common()[-1][1] == 1:
        for (_, task, run, step), times in _repeated(counted):
            yield f"batch {processed.ready.batch}: task {task}, run {run}, step {step} is in it {times} times"


def _generations(record: Record) -> int:
    return len({step.generation for step in record.progress})


# -- the history of a checkpoint: one entry for each decided ticket, in order


def tickets_decided_once(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a line for each violation: each ticket must be decided once, and may be repaired only after it failed or
    was skipped.
    """
    decided = Counter(str(entry["ticket"]) for entry in entries if not entry.get("repaired"))
    if double := [ticket for ticket, times in decided.items() if times > 1]:
        yield f"tickets decided more than once: {excerpt(double)}"
    earlier: dict[str, str] = {}
    for entry in entries:
        before = earlier.get(entry["ticket"], "never decided")
        if entry.get("repaired") and before not in TRAINABLE_LATER:
            yield (
                f"ticket {entry['ticket']} is repaired with progress {entry['progress']}, but was {before} before, "
                "wanted failed or skipped"
            )
        earlier[entry["ticket"]] = entry["outcome"]


def each_trained_once(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a line for each violation: an experience may be trained on at most once, in its own batch, and only entries
    that were trained on may list experiences.
    """
    trained = Counter(uid for entry in entries for uid in entry["uids"])
    if double := [uid for uid, times in trained.items() if times > 1]:
        yield f"experiences trained on more than once: {excerpt(double)}"
    for entry in entries:
        uids = entry["uids"]
        # An experience's id begins with its batch number, which contains no escaped characters.
        if foreign := [uid for uid in uids if uid.partition("/")[0] != str(entry["batch"])]:
            yield f"progress {entry['progress']} is batch {entry['batch']}, but holds others: {excerpt(foreign)}"
        if uids and entry["outcome"] != "trained":
            yield f"progress {entry['progress']} is {entry['outcome']}, but lists {len(uids)} experiences"


def set_faults(entry: Entry, processed: ProcessedSet | None) -> Iterator[str]:
    """Yield a line for each violation: an entry must be decided by the first set of its ticket, or a later set if it
    was repaired, by an operator with the run's configuration, and hold only experiences of this set.

    Args:
        entry: The entry.
        processed: The set of the entry's processing; None if the stream does not hold it.
    """
    if processed is None or not (processed.is_first or entry.get("repaired")):
        where = "is not there" if processed is None else "is not the first of its ticket there"
        yield f"progress {entry['progress']} was decided by set {entry['op']}, which {where}"
        return
    if processed.ready.other_chain:
        yield f"progress {entry['progress']}: its operator had another configuration than the run's explorer"
    place = entry.get("stream")
    if place is not None and place["offset"] != processed.offset:
        yield f"progress {entry['progress']}: its BatchReady lies at {processed.offset}, not at {place['offset']}"
    if not processed.unread and (foreign := sorted(set(entry["uids"]) - set(processed.uids))):
        yield f"progress {entry['progress']} holds experiences that no operator sent: {excerpt(foreign)}"


# -- versions


def versions_rise(
    record: Record, commits: Sequence[VersionSeen], committed: Sequence[VersionSeen], served: Sequence[VersionSeen]
) -> InvariantVerdict:
    """Check that committed versions, the trainer's progress, and the versions that an engine life serves never fall."""
    violations = [*_decreases("committed", commits), *_decreases("in the trainer's heartbeats", committed)]
    by_life: defaultdict[str, list[VersionSeen]] = defaultdict(list)
    for sighting in served:
        by_life[sighting.who].append(sighting)
    for life, sightings in by_life.items():
        violations += _decreases(f"engine {life.split()[0]} serves", sightings)
    before: Progress | None = None
    for step in record.progress:
        if before is not None and (step.generation, step.progress) < (before.generation, before.progress):
            violations.append(
                f"progress {step.progress} of generation {step.generation} was published after "
                f"{before.progress} of {before.generation}"
            )
        before = step
    count = len({sighting.version for sighting in commits} | {sighting.version for sighting in committed})
    return verdict_of(
        "committed versions rise",
        violations,
        f"{count} versions, {len(by_life)} lives of engines, {_generations(record)} starts of the trainer",
    )


def _decreases(what: str, sightings: Sequence[VersionSeen]) -> Iterator[str]:
    for before, after in itertools.pairwise(sightings):
        if after.version < before.version:
            yield f"{what}: {_version(before.version)} was followed by {_version(after.version)} after {after.at:.1f} s"


def versions_existed(record: Record) -> InvariantVerdict:
    """Check that each version named by tokens existed in the trainer: as a step of its generation, or as the
    generation's start.
    """
    name = "tokens name versions that existed"
    named = {version: processed for processed in record.sets for version in processed.versions}
    if not named:
        return InvariantVerdict(name, "not checked", "no token names a version")
    if record.results_begin:
        return InvariantVerdict(name, "not checked", "retention has cut the beginning of the results stream")
    existing = _existing_versions(record.progress)
    violations = [
        f"batch {processed.ready.batch} names version {_version(version)}, which no trainer had"
        for version, processed in sorted(named.items())
        if version not in existing
    ]
    return verdict_of(name, violations, f"{len(named)} versions")


def _existing_versions(progress: Sequence[Progress]) -> set[Version]:
    """Return the versions that the trainers had. A generation starts at the step of the checkpoint that it resumes
    from. A generation that was killed before its first batch has not reported its step.
    """
    existing: set[Version] = set()
    last = max((message.generation for message in progress), default=0)
    steps = {0, *(message.step for message in progress)}
    reported: defaultdict[int, set[int]] = defaultdict(set)
    for message in progress:
        reported[message.generation].add(message.step)
    for generation in range(1, last + 2):
        # the starting step is not reported, so allow every earlier step
        first_step = min(reported[generation]) if reported[generation] else max(steps)
        existing |= {(generation, step) for step in steps if step <= first_step}
        existing |= {(generation, step) for step in reported[generation]}
    return existing


# -- dead letters, processes, recovery


@dataclass(frozen=True)
class FaultCounts:
    """Number of faults that struck each role."""

    by_role: Mapping[str, int]

    def of(self, *roles: str) -> int:
        """Return the number of faults that struck these roles. Faults of the broker count for every role."""
        return sum(self.by_role.get(role, 0) for role in (*roles, "broker"))


def dead_letters_explained(
    letters: Sequence[Incoming], total: int, struck: FaultCounts, limit: int
) -> InvariantVerdict:
    """Check that the faults explain every dead letter. A slice or a closed batch is explained if faults struck its
    agents, or the broker, at least ``limit`` times; a processed batch, if they struck the trainer or the broker twice.

    Args:
        letters: The dead letters that were read.
        total: Number of all dead letters.
        struck: Number of faults by role.
        limit: ``broker.delivery_limit``.
    """
    name = "dead letters accounted for"
    if len(letters) < total:
        return InvariantVerdict(name, "not checked", f"{len(letters)} of {total} could be read")
    violations: list[str] = []
    explained: Counter[str] = Counter()
    for letter in letters:
        kind = letter.kind or "unknown"
        reason = " ".join(str(letter.headers.get("dead-reason") or letter.headers.get("x-first-death-reason")).split())
        deliveries = letter.headers.get("dead-deliveries")
        by_limit = isinstance(deliveries, int) and deliveries >= limit
        role = {"task_slice": "runner", "task_slices": "runner", "batch_closed": "operator"}.get(kind)
        if kind == "batch_ready" and struck.of("trainer") >= 2:  # a batch is dead-lettered after two interrupted steps
            explained["batches in whose step the trainer was ended twice"] += 1
        elif role is not None and by_limit and struck.of(role) >= limit:
            explained[f"{kind} delivered {limit} times and more"] += 1
        else:
            violations.append(f"{kind} {letter.message_id}: {reason}")
    words = ", ".join(f"{count} {what}" for what, count in explained.items())
    return verdict_of(name, violations, f"explained by the faults: {words}" if words else "there is none")


def nothing_left(processes: Sequence[str] | None, *, over: bool) -> InvariantVerdict:
    """Check that no process of the run is left after its end."""
    name = "no process left"
    if not over:
        return InvariantVerdict(name, "not checked", "the run is still running")
    if processes is None:
        return InvariantVerdict(name, "not checked", "its processes cannot be listed from here")
    return verdict_of(name, processes, "all have ended")


def streams_decode(record: Record) -> InvariantVerdict:
    """Check that every message on the streams is readable."""
    return verdict_of(
        "streams can be read", record.undecodable, f"{len(record.results)} results, {len(record.sets)} sets"
    )


def _repeated(counted: Counter[Key]) -> list[tuple[Key, int]]:
    return [(key, times) for key, times in counted.items() if times > 1]


def _version(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
