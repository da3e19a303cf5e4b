"""Invariants that hold at the end of every run, even after faults. The check of an invariant yields its violations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property

from trinity_agents.explorer.state import ExplorerState
from trinity_agents.simulation.schedule import SHORT
from trinity_agents.simulation.scheduled_run import ScheduledRun
from trinity_agents.simulation.stand_ins import PROMPT, weights_of
from trinity_agents.trainer.history import HistoryError, lineage
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.messages import (
    BatchClosed,
    BatchReady,
    Message,
    Progress,
    SyncEvent,
    TaskResult,
    TaskSlice,
    TaskSlices,
    Version,
)
from trinity_mq.proof.invariants import each_trained_once, set_faults, tickets_decided_once
from trinity_mq.proof.record import Record, Recorder

Faults = Iterator[str]
GIVEN_UP = {"failed", "gone"}


class Evidence:
    """Evidence that a run has left behind: its messages, its saved state and its history."""

    def __init__(self, run: ScheduledRun) -> None:
        self.run, self.settings = run, run.schedule.settings
        self.messages: list[Message] = run.messages()
        """Every recorded control message, in order."""

    @cached_property
    def state(self) -> ExplorerState:
        """The explorer's saved state."""
        return self.run.state()

    @cached_property
    def generation(self) -> int:
        """Highest generation of the trainers. A trainer started at the very end may be drained before it gets a
        generation.
        """
        return max(trainer.loop.generation for trainer in self.run.trainers)

    @cached_property
    def manifests(self) -> dict[int, list[BatchClosed]]:
        """The distinct manifests of each batch."""
        by_batch: defaultdict[int, list[BatchClosed]] = defaultdict(list)
        for message in self.messages:
            if isinstance(message, BatchClosed) and message not in by_batch[int(message.batch)]:
                by_batch[int(message.batch)].append(message)
        return dict(by_batch)

    @cached_property
    def manifest(self) -> dict[int, BatchClosed]:
        """The first manifest of each batch."""
        return {batch: manifests[0] for batch, manifests in self.manifests.items()}

    @cached_property
    def record(self) -> Record:
        """The results, the progress of the trainers, and the processed sets with their experiences."""
        recorder = Recorder(keeps_experiences=True)
        for stored in self.run.stream().messages:
            recorder.take_ready(stored)
        record = recorder.record
        record.results = [message for message in self.messages if isinstance(message, TaskResult)]
        record.progress = [message for message in self.messages if isinstance(message, Progress)]
        return record

    @cached_property
    def processed(self) -> dict[int, tuple[BatchReady, ExperienceBatch]]:
        """The processed set that decides each batch: the first complete set of its ticket."""
        decided: dict[int, tuple[BatchReady, ExperienceBatch]] = {}
        for processed in self.record.deciding.values():
            assert processed.experiences is not None
            decided.setdefault(int(processed.ready.batch), (processed.ready, processed.experiences))
        return decided

    @cached_property
    def slices(self) -> list[TaskSlice]:
        """Every published slice, including repetitions."""
        slices: list[TaskSlice] = []
        for message in self.messages:
            slices += message.slices if isinstance(message, TaskSlices) else []
            slices += [message] if isinstance(message, TaskSlice) else []
        return slices

    @cached_property
    def history(self) -> list[dict[str, object]]:
        """History entries of the lineage of the final checkpoint, in order.

        Raises:
            HistoryError: The history has a gap.
        """
        return [*lineage(self.run.folder / "history", self.generation, self.settings.batches)]

    @cached_property
    def given_up(self) -> set[str]:
        """Tickets of batches that operators gave up: published as failed or gone."""
        return {
            message.ticket for message in self.messages if isinstance(message, BatchReady) and message.state in GIVEN_UP
        }

    @property
    def is_short(self) -> bool:
        """True if a batch may end before all its slices have ended."""
        return self.settings.batch_timeout < SHORT or self.settings.cut_off != "never"


def run_is_over(evidence: Evidence) -> Faults:
    """Check that the explorer has no open batch, the trainer has consumed every batch, and the last progress is
    reported.
    """
    state, batches = evidence.state, evidence.settings.batches
    if not state.finished:
        yield "the explorer has not finished"
    if state.tickets:
        yield f"tickets are open at the end: {list(state.tickets)}"
    if state.following.tickets:
        yield f"batches are not consumed at the end: {list(state.following.tickets)}"
    if (state.opened, state.closed) != (batches, batches):
        yield f"{batches} batches were wanted, {state.opened} opened and {state.closed} closed"
    reached = max((report.progress for report in evidence.record.progress), default=0)
    if reached != batches:
        yield f"the trainer came to progress {reached} of {batches}"


def no_asyncio_task_left(evidence: Evidence) -> Faults:
    """Check that no asyncio task of the agents is left running after their end."""
    yield from (f"left running: {name}" for name in evidence.run.left_running)


def one_manifest(evidence: Evidence) -> Faults:
    """Check that each batch has a single manifest content, however often the manifest was published."""
    if sorted(evidence.manifests) != list(range(1, evidence.settings.batches + 1)):
        yield f"batches with a manifest: {sorted(evidence.manifests)}"
    for batch, manifests in evidence.manifests.items():
        if len(manifests) > 1:
            tickets = sorted({manifest.ticket for manifest in manifests})
            yield f"batch {batch} has {len(manifests)} different manifests, of tickets {tickets}"


def one_outcome(evidence: Evidence) -> Faults:
    """Check that each slice has one outcome, and that each rollout run that does not fail is accepted once or was cut
    off.
    """
    settings, fails = evidence.settings, evidence.run.workflows.fails
    cut_short = evidence.run.workflows.cut_short | evidence.run.pool.cut_short
    incomplete = {
        (result.ticket, result.task_id, result.run_base)
        for result in evidence.record.results
        if result.outcome == "poisoned"
        or (result.ticket, result.task_id, result.run_base, frozenset(result.runs)) in cut_short
    }
    per_task = -(-settings.repeat // settings.slice_runs)
    for batch, manifest in evidence.manifest.items():
        slices = {
            (task_slice.task_id, task_slice.run_base): task_slice.repeat_times
            for task_slice in evidence.slices
            if task_slice.ticket == manifest.ticket
        }
        if (count := sum(manifest.outcomes.values())) != settings.tasks * per_task:
            yield f"batch {batch}: {count} outcomes of {settings.tasks * per_task} slices: {manifest.outcomes}"
        listed = [(batch, part.task_id, run) for part in manifest.accepted for run in part.runs]
        if duplicates := [run for run, times in Counter(listed).items() if times > 1]:
            yield f"batch {batch}: accepted twice: {duplicates}"
        if failed := [run for run in listed if fails(*run)]:
            yield f"batch {batch}: accepted though their workflow fails: {failed}"
        expected = {(batch, task, run) for task in range(settings.tasks) for run in range(settings.repeat)}
        missing = {run for run in expected - set(listed) if not fails(*run)}
        lost = {
            (task, base)
            for _, task, run in missing
            for (task_id, base), runs in slices.items()
            if task_id == task and base <= run < base + runs and (manifest.ticket, task, base) not in incomplete
        }
        cancelled = manifest.outcomes.get("cancelled", 0)
        if cancelled and not evidence.is_short:
            yield f"batch {batch}: {cancelled} slices were cut off, though batches have time"
        if len(lost) > cancelled and settings.cut_off != "whole tasks":
            yield f"batch {batch}: slices {sorted(lost)} lack runs, and {cancelled} were cut off"


def each_task_once(evidence: Evidence) -> Faults:
    """Check that each batch is opened once and that each task of the taskset is in one batch.

    A task is in a second batch only if it was requeued, and at most once. A task may be in no batch only if its batch
    was cut off before any slice of the task was published. The explorer must then have requeued it after the last batch
    was opened, or it must have been cut off in a second batch too.
    """
    tickets: defaultdict[int, set[str]] = defaultdict(set)
    places: defaultdict[int, dict[int, tuple[str, int]]] = defaultdict(dict)
    for task_slice in evidence.slices:
        if task_slice.lane == "train":
            places[task_slice.task.raw_task["n"]][int(task_slice.batch)] = task_slice.ticket, task_slice.task_id
            tickets[int(task_slice.batch)].add(task_slice.ticket)
    yield from (
        f"batch {batch} was opened as {sorted(opened_as)}" for batch, opened_as in tickets.items() if len(opened_as) > 1
    )
    settings, lost = evidence.settings, dict[int, int]()
    per_task = -(-settings.repeat // settings.slice_runs)
    for batch, manifest in evidence.manifest.items():
        published = {task_slice.task_id for task_slice in evidence.slices if task_slice.ticket == manifest.ticket}
        lost[batch] = min(settings.tasks - len(published), manifest.outcomes.get("cancelled", 0) // per_task)
    skipped = sorted(set(range(max(places, default=-1))) - set(places))
    for number in skipped:
        # Batches take tasks in order, but a batch may take fewer new tasks if it also takes requeued tasks.
        earliest = number // settings.tasks + 1
        latest = min(min(placements) for later, placements in places.items() if later > number)
        losing = next((batch for batch in range(earliest, latest + 1) if lost.get(batch, 0) > 0), None)
        if losing is None:
            yield f"task {number} is in no batch, and none of batches {earliest} to {latest} was cut off without it"
        else:
            lost[losing] -= 1
    left_over = max((int(value) for _, value in evidence.run.values("rollout/tasks/left_over")), default=0)
    if len(skipped) > left_over + sum(lost.values()):
        yield f"tasks {skipped} are in no batch, but {left_over} tasks were reported as left over"
    stale = {(report.ticket, task) for report in evidence.record.progress for task in report.stale_tasks}
    done = {
        (manifest.ticket, part.task_id)
        for manifest in evidence.manifest.values()
        for part in manifest.accepted
        if part.runs
    }
    for number, placements in places.items():
        first = placements[min(placements)]
        if len(placements) > 2 or (len(placements) == 2 and first in done - stale):
            yield f"task {number} is in batches {sorted(placements)}"


def processed_as_listed(evidence: Evidence) -> Faults:
    """Check that the deciding set of a batch holds each experience listed in the manifest once, except of groups that
    are too small, and no other experience. A batch that was given up has none, and is given up only if the settings
    allow this.
    """
    yield from as_in_manifest(evidence, evidence.run.config.algorithm.effective_min_group_runs)
    for batch, (ready, experiences) in evidence.processed.items():
        if ready.state not in GIVEN_UP:
            if ready.experiences != len(experiences):
                yield f"batch {batch}: {ready.experiences} experiences announced, {len(experiences)} there"
            continue
        if evidence.settings.delivery_limit >= SHORT and evidence.settings.operator_deadline >= SHORT:
            yield f"batch {batch} was given up: {ready.reason}"
        if len(experiences):
            yield f"batch {batch} was given up and has experiences"


def as_in_manifest(evidence: Evidence, least: int, *, once: bool = True) -> Faults:
    """Check that the deciding set of each batch holds experiences of all rollout runs in its manifest, and of no other
    runs. Of a batch that was given up, only the ticket is checked.

    Args:
        evidence: The evidence of the simulated run.
        least: Minimum number of rollout runs in a group; smaller groups are left out of the set.
        once: True if each rollout run has a single experience, so that a second experience is a violation.
    """
    if sorted(evidence.processed) != sorted(evidence.manifest):
        yield f"batches that were decided: {sorted(evidence.processed)}"
    for batch, (ready, experiences) in evidence.processed.items():
        manifest = evidence.manifest.get(batch)
        if manifest is None or ready.ticket != manifest.ticket:
            yield f"batch {batch} was decided for ticket {ready.ticket}, closed for {manifest and manifest.ticket}"
        elif ready.state not in GIVEN_UP:
            rids = experiences.ids("rid")
            actual = Counter(rids if once else set(rids))
            runs = [(part.task_id, run) for part in manifest.accepted for run in part.runs]
            groups = Counter(task for task, _ in runs)
            expected = Counter(f"{batch}/{task}/{run}" for task, run in runs if groups[task] >= least)
            if actual != expected:
                yield f"batch {batch}: beyond the manifest {dict(actual - expected)}, missing {dict(expected - actual)}"


def trained_once(evidence: Evidence) -> Faults:
    """Check that the lineage of the final checkpoint consumes each batch once and trains on each experience at most
    once.

    All trained experiences come from the set that decides their ticket.
    """
    settings = evidence.settings
    try:
        history = evidence.history
    except HistoryError as error:
        yield str(error)
        return
    batches = [entry["batch"] for entry in history if not entry.get("repaired")]
    in_order = batches if settings.style == "fixed" else sorted(batches, key=lambda batch: int(str(batch)))
    if in_order != list(range(1, settings.batches + 1)):
        yield f"batches consumed in this order: {batches}"
    yield from tickets_decided_once(history)
    yield from each_trained_once(history)
    for entry in history:
        yield from _entry(evidence, entry)


def uids_of(entry: Mapping[str, object]) -> list[str]:
    """Return the ids of the trained experiences in a history entry."""
    uids = entry["uids"]
    assert isinstance(uids, list)
    return uids


def _entry(evidence: Evidence, entry: Mapping[str, object]) -> Faults:
    batch, outcome = int(str(entry["batch"])), entry["outcome"]
    processed = evidence.record.by_processing.get((str(entry["ticket"]), str(entry["op"])))
    yield from set_faults(entry, processed)
    if entry.get("repaired") or processed is None or processed.experiences is None:
        return
    ready = processed.ready
    if outcome not in {"trained", "dropped", "skipped"}:
        if outcome != ready.state:
            yield f"batch {batch} is recorded as {outcome}, and is {ready.state}"
        return
    if outcome == "skipped":
        if len(evidence.run.trainers) < 3:
            yield f"batch {batch} was skipped, though it can have killed no two trainers"
        return
    rids = Counter(processed.experiences.ids("rid"))
    left_out = rids - Counter("/".join(uid.split("/")[:3]) for uid in uids_of(entry))
    if left_out.total() not in {report.dropped for report in evidence.record.progress if report.ticket == ready.ticket}:
        yield f"batch {batch}: {left_out.total()} experiences were left out, and nobody says so"
    bound, before = evidence.run.config.synchronizer, [int(str(earlier["batch"])) for earlier in evidence.history]
    # the batch was consumed after a batch that was opened later, so more steps lie between than the sync style implies
    is_overtaken = max(before[: before.index(batch) + 1]) > batch
    if (
        left_out
        and evidence.run.is_undisturbed
        and not is_overtaken
        and bound.effective_max_staleness >= bound.inherent_staleness
    ):
        yield f"batch {batch}: left out though nothing went wrong: {dict(left_out)}"


def within_staleness_bound(evidence: Evidence) -> Faults:
    """Check that no trained experience exceeds the staleness bound."""
    try:
        history = evidence.history
    except HistoryError:
        return  # trained_once reports this error
    bound, step = evidence.run.config.synchronizer.effective_max_staleness, 0
    for entry in history:
        batch = int(str(entry["batch"]))
        trained = {"/".join(uid.split("/")[:3]) for uid in uids_of(entry)}
        if batch in evidence.processed:
            for experience in evidence.processed[batch][1]:
                oldest = min(experience.versions or [(0, 0, step)], key=lambda row: row[1:])[2]
                if experience.eid.rid in trained and step - oldest > bound:
                    yield f"batch {batch}: {experience.eid.rid} is {step - oldest} steps old, allowed are {bound}"
        step = int(str(entry["step"]))


def tokens_of_their_weights(evidence: Evidence, version_of: Callable[[int], Version] = weights_of) -> Faults:
    """Check that each token was sampled by the weights that its experience names, and that a trainer had offered these
    weights. ``version_of`` returns the version that a token encodes.
    """
    offered = {event.version for event in evidence.messages if isinstance(event, SyncEvent) and event.verb == "prepare"}
    for batch, (_, experiences) in evidence.processed.items():
        for experience in experiences:
            assert list(experience.tokens[: len(PROMPT)]) == list(PROMPT)
            for token, position in sampled(experience):
                named = [
                    (generation, step) for first, generation, step in experience.versions or [] if first <= position
                ]
                if not named or named[-1] != version_of(token):
                    yield (
                        f"batch {batch}: token {position} of {experience.eid.rid} is of {version_of(token)}, "
                        f"named {named}"
                    )
                elif named[-1] not in offered:
                    yield f"batch {batch}: {experience.eid.rid} names {named[-1]}, which no trainer offered"


def sampled(experience: Experience) -> list[tuple[int, int]]:
    """Return (token, position after the prompt) for the tokens of an experience that an engine sampled."""
    tokens = [int(token) for token in experience.tokens[experience.prompt_length :]]
    mask = [True] * len(tokens) if experience.action_mask is None else [bool(flag) for flag in experience.action_mask]
    return [(token, position) for position, (token, is_own) in enumerate(zip(tokens, mask, strict=True)) if is_own]


def versions_in_order(evidence: Evidence) -> Faults:
    """Check that versions are committed and served in ascending order and that the steps of the lineage have no gap.

    The last committed version must be the version of the last step of the lineage.
    """
    commits = [
        event for event in evidence.messages if isinstance(event, SyncEvent) and event.verb == "commit" and event.epoch
    ]
    highest = (0, 0)
    for event in commits:
        version = event.version or (0, 0)
        if version < highest and event.members:
            yield f"{version} was committed after {highest}"
        highest = max(highest, version)
    for name, engine in evidence.run.engines.items():
        if engine.served != sorted(engine.served):
            yield f"{name} served {engine.served}"
    try:
        history = evidence.history
    except HistoryError:
        return  # trained_once reports this error
    steps = [int(str(entry["step"])) for entry in history if not entry.get("repaired")]
    trained_progress = {entry["progress"] for entry in history if entry["outcome"] == "trained"}
    expected = [
        sum(int(str(trained)) <= progress for trained in trained_progress) for progress in range(1, len(steps) + 1)
    ]
    if steps != expected:
        yield f"steps of the lineage: {steps}, wanted {expected}"
    final = steps[-1] if steps else 0
    if highest[1] != final:
        yield f"the last version is {highest}, and the lineage ends at step {final}"


def dead_letters_accounted_for(evidence: Evidence, ignored: Collection[str] = ()) -> Faults:
    """Check that ``dead`` holds only slices reported as poisoned, and batches that were given up or skipped, apart from
    messages of the kinds in ``ignored``.
    """
    allowed: dict[str, set[str]] = {
        "task_slice": {result.ticket for result in evidence.record.results if result.outcome == "poisoned"},
        "batch_closed": evidence.given_up,
        "batch_ready": {report.ticket for report in evidence.record.progress if report.outcome == "skipped"},
    }
    for headers in evidence.run.dead_letters():
        kind, ticket = str(headers.get("kind")), str(headers.get("ticket"))
        if kind not in ignored and ticket not in allowed.get(kind, set()):
            yield f"a {kind} of ticket {ticket}: {headers.get('dead-reason')}"


def queues_are_empty(evidence: Evidence) -> Faults:
    """Check that ``closed`` holds only manifests of decided batches and that no batch queue holds parts.

    A batch queue may hold parts if the batch was given up, or if its operator died or was cut off before it deleted the
    queue. Such queues expire.
    """
    decided = {ready.ticket for ready, _ in evidence.processed.values()}
    undecided = {str(stored.headers.get("ticket")) for stored in evidence.run.waiting_in("closed")} - decided
    if undecided:
        yield f"manifests of {sorted(undecided)} wait in closed"
    for name, queue in evidence.run.broker.queues.items():
        short_name = name.removeprefix(evidence.run.topology.prefix)
        if (
            short_name.startswith("batch.")
            and queue.depth
            and evidence.run.is_undisturbed
            and short_name.rpartition(".")[2] not in evidence.given_up
        ):
            yield f"{queue.depth} parts are left in {short_name}"


INVARIANTS: Mapping[str, Callable[[Evidence], Faults]] = {
    "the run is over": run_is_over,
    "no task is left": no_asyncio_task_left,
    "one manifest a batch": one_manifest,
    "one outcome a slice": one_outcome,
    "tasks are given out once": each_task_once,
    "processed as listed": processed_as_listed,
    "trained on once": trained_once,
    "fresh enough": within_staleness_bound,
    "tokens of the weights they name": tokens_of_their_weights,
    "versions in order": versions_in_order,
    "dead letters accounted for": dead_letters_accounted_for,
    "queues are empty": queues_are_empty,
}
"""Invariant checks by name, in the order of checking."""
NO_HANG = "the run ends in time"
NO_FAILURE = "no agent fails"
NO_ERROR = "the simulation works"
"""Names of failures that end a run before its invariants are checked."""


def violations(evidence: Evidence) -> list[tuple[str, str]]:
    """Check all invariants; return the violations as pairs of (invariant name, description)."""
    return [(name, text) for name, check in INVARIANTS.items() for text in check(evidence)]
