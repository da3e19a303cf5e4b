"""Invariants that hold at the end of every run, even after faults. Each invariant yields its violations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from trinity_agents.explorer.state import ExplorerState
from trinity_agents.simulation.schedule import SHORT
from trinity_agents.simulation.scheduled_run import ScheduledRun
from trinity_agents.simulation.stand_ins import PROMPT, weights_of
from trinity_agents.trainer.history import HistoryError, lineage
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchClosed, BatchReady, Message, Progress, SyncEvent, TaskResult, TaskSlice, TaskSlices

Faults = Iterator[str]
RunOfTask = tuple[int, int, int]
"""(batch, task, run)."""
GIVEN_UP = {"failed", "gone"}


class Evidence:
    """Evidence that a run has left behind. Each part is computed once."""

    def __init__(self, run: ScheduledRun) -> None:
        self.run, self.settings = run, run.schedule.settings
        self.messages: list[Message] = run.messages()
        """Every published control message, in order."""

    @cached_property
    def state(self) -> ExplorerState:
        """The explorer's saved state."""
        return self.run.state()

    @cached_property
    def generation(self) -> int:
        """Generation of the last trainer that has one. A trainer started at the very end may be drained before it gets
        a generation.
        """
        return max(trainer.loop.generation for trainer in self.run.trainers)

    @cached_property
    def manifests(self) -> dict[int, list[BatchClosed]]:
        """The distinct manifests of each batch."""
        found: defaultdict[int, list[BatchClosed]] = defaultdict(list)
        for message in self.messages:
            if isinstance(message, BatchClosed) and message not in found[int(message.batch)]:
                found[int(message.batch)].append(message)
        return dict(found)

    @cached_property
    def manifest(self) -> dict[int, BatchClosed]:
        """The first manifest of each batch."""
        return {batch: found[0] for batch, found in self.manifests.items()}

    @cached_property
    def processed(self) -> dict[int, tuple[BatchReady, ExperienceBatch]]:
        """The processed set that decides each batch, from the ready stream."""
        return self.run.processed()

    @cached_property
    def slices(self) -> list[TaskSlice]:
        """Every published slice, including repetitions."""
        found: list[TaskSlice] = []
        for message in self.messages:
            found += message.slices if isinstance(message, TaskSlices) else []
            found += [message] if isinstance(message, TaskSlice) else []
        return found

    @cached_property
    def results(self) -> list[TaskResult]:
        """Every published result, including repetitions."""
        return [message for message in self.messages if isinstance(message, TaskResult)]

    @cached_property
    def progress(self) -> list[Progress]:
        """Every progress message of the trainers."""
        return [message for message in self.messages if isinstance(message, Progress)]

    @cached_property
    def history(self) -> list[dict[str, object]]:
        """History entries of the lineage of the final checkpoint, in order.

        Raises:
            HistoryError: The history has a gap.
        """
        return [*lineage(self.run.folder / "history", self.generation, self.settings.batches)]

    @property
    def is_short(self) -> bool:
        """True if a batch may end before all its slices have ended."""
        return self.settings.batch_timeout < SHORT or self.settings.cut_off != "never"


def run_is_over(found: Evidence) -> Faults:
    """Check that the explorer has no open batch, the trainer has consumed every batch, and the last progress is
    reported.
    """
    state, batches = found.state, found.settings.batches
    if not state.finished:
        yield "the explorer has not finished"
    if state.tickets:
        yield f"tickets are open at the end: {list(state.tickets)}"
    if state.following.tickets:
        yield f"batches are not consumed at the end: {list(state.following.tickets)}"
    if (state.opened, state.closed) != (batches, batches):
        yield f"{batches} batches were wanted, {state.opened} opened and {state.closed} closed"
    reached = max((one.progress for one in found.progress), default=0)
    if reached != batches:
        yield f"the trainer came to progress {reached} of {batches}"


def no_task_is_left(found: Evidence) -> Faults:
    """Check that no asyncio task of the agents is left running after their end."""
    yield from (f"left running: {name}" for name in found.run.left_running)


def one_manifest(found: Evidence) -> Faults:
    """Check that each batch has a single manifest content, however often the manifest was published."""
    if sorted(found.manifests) != list(range(1, found.settings.batches + 1)):
        yield f"batches with a manifest: {sorted(found.manifests)}"
    for batch, manifests in found.manifests.items():
        if len(manifests) > 1:
            tickets = sorted({one.ticket for one in manifests})
            yield f"batch {batch} has {len(manifests)} different manifests, of tickets {tickets}"


def one_outcome(found: Evidence) -> Faults:
    """Check that each slice has one outcome, and that each run that does not fail is accepted once or was cut off."""
    settings, fails = found.settings, found.run.workflows.fails
    cut_short = found.run.workflows.cut_short | found.run.pool.cut_short
    gave_up = {
        (result.ticket, result.task_id, result.run_base)
        for result in found.results
        if result.outcome == "poisoned"
        or (result.ticket, result.task_id, result.run_base, frozenset(result.runs)) in cut_short
    }
    per_task = -(-settings.repeat // settings.slice_runs)
    for batch, manifest in found.manifest.items():
        slices = {
            (one.task_id, one.run_base): one.repeat_times for one in found.slices if one.ticket == manifest.ticket
        }
        if (count := sum(manifest.outcomes.values())) != settings.tasks * per_task:
            yield f"batch {batch}: {count} outcomes of {settings.tasks * per_task} slices: {manifest.outcomes}"
        listed = [(batch, one.task_id, run) for one in manifest.accepted for run in one.runs]
        if twice := [run for run, times in Counter(listed).items() if times > 1]:
            yield f"batch {batch}: accepted twice: {twice}"
        if failed := [run for run in listed if fails(*run)]:
            yield f"batch {batch}: accepted though their workflow fails: {failed}"
        wanted = {(batch, task, run) for task in range(settings.tasks) for run in range(settings.repeat)}
        missing = {run for run in wanted - set(listed) if not fails(*run)}
        lost = {
            (task, base)
            for _, task, run in missing
            for (of, base), runs in slices.items()
            if of == task and base <= run < base + runs and (manifest.ticket, task, base) not in gave_up
        }
        cancelled = manifest.outcomes.get("cancelled", 0)
        if cancelled and not found.is_short:
            yield f"batch {batch}: {cancelled} slices were cut off, though batches have time"
        if len(lost) > cancelled and settings.cut_off != "whole tasks":
            yield f"batch {batch}: slices {sorted(lost)} lack runs, and {cancelled} were cut off"


def tasks_once(found: Evidence) -> Faults:
    """Check that each batch is opened once and that each task of the taskset is in one batch.

    A task is in a second batch only if it was returned to the taskset, and at most once. No task is skipped, except
    tasks of a batch that timed out before its slices were published.
    """
    tickets: defaultdict[int, set[str]] = defaultdict(set)
    places: defaultdict[int, dict[int, tuple[str, int]]] = defaultdict(dict)
    for one in found.slices:
        if one.lane == "train":
            places[one.task.raw_task["n"]][int(one.batch)] = one.ticket, one.task_id
            tickets[int(one.batch)].add(one.ticket)
    yield from (f"batch {batch} was opened as {sorted(of)}" for batch, of in tickets.items() if len(of) > 1)
    published = {one.ticket for one in found.slices}
    late = [one for one in found.manifest.values() if found.is_short and one.ticket not in published]
    if len(set(range(max(places, default=-1))) - set(places)) > found.settings.tasks * len(late):
        yield f"tasks that were given out: {sorted(places)}"
    stale = {(told.ticket, task) for told in found.progress for task in told.stale_tasks}
    done = {(one.ticket, each.task_id) for one in found.manifest.values() for each in one.accepted if each.runs}
    for number, within in places.items():
        first = within[min(within)]
        if len(within) > 2 or (len(within) == 2 and first in done - stale):
            yield f"task {number} is in batches {sorted(within)}"


def processed_as_listed(found: Evidence) -> Faults:
    """Check that the deciding set of a batch holds each experience listed in the manifest once, and no other
    experience.
    """
    least = found.run.config.algorithm.effective_min_group_runs
    if sorted(found.processed) != sorted(found.manifest):
        yield f"batches that were decided: {sorted(found.processed)}"
    for batch, (ready, experiences) in found.processed.items():
        manifest = found.manifest.get(batch)
        if manifest is None or ready.ticket != manifest.ticket:
            yield f"batch {batch} was decided for ticket {ready.ticket}, closed for {manifest and manifest.ticket}"
            continue
        rids = Counter(experiences.ids("rid"))
        if ready.state in GIVEN_UP:
            if found.settings.delivery_limit >= SHORT and found.settings.operator_deadline >= SHORT:
                yield f"batch {batch} was given up: {ready.reason}"
            if rids:
                yield f"batch {batch} was given up and has experiences"
            continue
        runs = [(one.task_id, run) for one in manifest.accepted for run in one.runs]
        groups = Counter(task for task, _ in runs)
        expected = Counter(f"{batch}/{task}/{run}" for task, run in runs if groups[task] >= least)
        if rids != expected:
            yield f"batch {batch}: beyond the manifest {dict(rids - expected)}, missing {dict(expected - rids)}"
        if ready.experiences != rids.total():
            yield f"batch {batch}: {ready.experiences} experiences announced, {rids.total()} there"


def trained_once(found: Evidence) -> Faults:
    """Check that the lineage of the final checkpoint consumes each batch once and trains on each experience at most
    once.

    All trained experiences come from the set that decides their ticket.
    """
    settings = found.settings
    try:
        history = found.history
    except HistoryError as error:
        yield str(error)
        return
    batches = [entry["batch"] for entry in history if not entry.get("repaired")]
    in_order = batches if settings.style == "fixed" else sorted(batches, key=lambda one: int(str(one)))
    if in_order != list(range(1, settings.batches + 1)):
        yield f"batches consumed in this order: {batches}"
    uids = Counter(uid for entry in history for uid in uids_of(entry))
    if twice := [uid for uid, times in uids.items() if times > 1]:
        yield f"trained on twice: {twice}"
    for entry in history:
        yield from _entry(found, entry)


def uids_of(entry: Mapping[str, object]) -> list[str]:
    """Return the ids of the trained experiences in a history entry."""
    uids = entry["uids"]
    assert isinstance(uids, list)
    return uids


def _entry(found: Evidence, entry: Mapping[str, object]) -> Faults:
    batch, outcome = int(str(entry["batch"])), entry["outcome"]
    decided = found.processed.get(batch)
    if entry.get("repaired"):
        own = [one["outcome"] for one in found.history if one["ticket"] == entry["ticket"] and not one.get("repaired")]
        if own not in (["failed"], ["skipped"]):
            yield f"batch {batch} was repaired, and is recorded as {own}"
        return
    if decided is None or (entry["ticket"], entry["op"]) != (decided[0].ticket, decided[0].op):
        yield f"batch {batch}: the trainer took {entry['ticket']}/{entry['op']}, decided is {decided and decided[0].op}"
        return
    ready, experiences = decided
    if outcome not in {"trained", "dropped", "skipped"}:
        if outcome != ready.state:
            yield f"batch {batch} is recorded as {outcome}, and is {ready.state}"
        return
    if outcome == "skipped":
        if len(found.run.trainers) < 3:
            yield f"batch {batch} was skipped, though it can have killed no two trainers"
        return
    rids = Counter(experiences.ids("rid"))
    trained = Counter("/".join(uid.split("/")[:3]) for uid in uids_of(entry))
    left_out = rids - trained
    if trained - rids:
        yield f"batch {batch}: trained beyond what was decided: {dict(trained - rids)}"
    if left_out.total() not in {told.dropped for told in found.progress if told.ticket == ready.ticket}:
        yield f"batch {batch}: {left_out.total()} experiences were left out, and nobody says so"
    bound, before = found.run.config.synchronizer, [int(str(one["batch"])) for one in found.history]
    # the batch was consumed after a batch that was opened later, so more steps lie between than the sync style implies
    is_overtaken = max(before[: before.index(batch) + 1]) > batch
    if (
        left_out
        and found.run.is_calm
        and not is_overtaken
        and bound.effective_max_staleness >= bound.inherent_staleness
    ):
        yield f"batch {batch}: left out though nothing went wrong: {dict(left_out)}"


def fresh_enough(found: Evidence) -> Faults:
    """Check that no trained experience exceeds the staleness bound."""
    try:
        history = found.history
    except HistoryError:
        return  # trained_once reports this error
    bound, step = found.run.config.synchronizer.effective_max_staleness, 0
    for entry in history:
        batch = int(str(entry["batch"]))
        trained = {"/".join(uid.split("/")[:3]) for uid in uids_of(entry)}
        if batch in found.processed:
            for one in found.processed[batch][1]:
                oldest = min(one.versions or [(0, 0, step)], key=lambda row: row[1:])[2]
                if one.eid.rid in trained and step - oldest > bound:
                    yield f"batch {batch}: {one.eid.rid} is {step - oldest} steps old, allowed are {bound}"
        step = int(str(entry["step"]))


def tokens_of_their_weights(found: Evidence) -> Faults:
    """Check that each token was sampled by the weights that its experience names, and that a trainer had offered these
    weights.
    """
    offered = {event.version for event in found.messages if isinstance(event, SyncEvent) and event.verb == "prepare"}
    for batch, (_, experiences) in found.processed.items():
        for one in experiences:
            for place, token in enumerate(int(token) for token in one.tokens[len(PROMPT) :]):
                named = [(generation, step) for first, generation, step in one.versions or [] if first <= place]
                if not named or named[-1] != weights_of(token):
                    yield f"batch {batch}: token {place} of {one.eid.rid} is of {weights_of(token)}, named {named}"
                elif named[-1] not in offered:
                    yield f"batch {batch}: {one.eid.rid} names {named[-1]}, which no trainer offered"


def versions_in_order(found: Evidence) -> Faults:
    """Check that versions are committed and served in ascending order and that the steps of the lineage have no gap.

    The last committed version must be the version of the last step of the lineage.
    """
    commits = [
        event for event in found.messages if isinstance(event, SyncEvent) and event.verb == "commit" and event.epoch
    ]
    highest = (0, 0)
    for event in commits:
        version = event.version or (0, 0)
        if version < highest and event.members:
            yield f"{version} was committed after {highest}"
        highest = max(highest, version)
    for name, engine in found.run.engines.items():
        if engine.served != sorted(engine.served):
            yield f"{name} served {engine.served}"
    try:
        history = found.history
    except HistoryError:
        return  # trained_once reports this error
    steps = [int(str(entry["step"])) for entry in history if not entry.get("repaired")]
    made = {entry["progress"] for entry in history if entry["outcome"] == "trained"}
    expected = [sum(int(str(one)) <= progress for one in made) for progress in range(1, len(steps) + 1)]
    if steps != expected:
        yield f"steps of the lineage: {steps}, wanted {expected}"
    final = steps[-1] if steps else 0
    if highest[1] != final:
        yield f"the last version is {highest}, and the lineage ends at step {final}"


def dead_letters_accounted_for(found: Evidence) -> Faults:
    """Check that ``dead`` holds only slices reported as poisoned, and batches that were given up or skipped."""
    poisoned = {result.ticket for result in found.results if result.outcome == "poisoned"}
    given_up = {one.ticket for one in found.messages if isinstance(one, BatchReady) and one.state in GIVEN_UP}
    skipped = {one.ticket for one in found.progress if one.outcome == "skipped"}
    known: dict[str, set[str]] = {"task_slice": poisoned, "batch_closed": given_up, "batch_ready": skipped}
    for headers in found.run.dead_letters():
        kind, ticket = str(headers.get("kind")), str(headers.get("ticket"))
        if ticket not in known.get(kind, set()):
            yield f"a {kind} of ticket {ticket}: {headers.get('dead-reason')}"


def queues_are_empty(found: Evidence) -> Faults:
    """Check that ``closed`` holds only manifests of decided batches and that no batch queue holds parts.

    Batch queues may hold parts if the batch was given up, or if its operator died or was cut off before it deleted
    them. Such queues expire.
    """
    decided = {ready.ticket for ready, _ in found.processed.values()}
    left = {str(stored.headers.get("ticket")) for stored in found.run.waiting_in("closed")} - decided
    if left:
        yield f"manifests of {sorted(left)} wait in closed"
    kept = _tickets_given_up(found)
    for name, queue in found.run.broker.queues.items():
        short = name.removeprefix(found.run.topology.prefix)
        if short.startswith("batch.") and queue.depth and found.run.is_calm and short.rpartition(".")[2] not in kept:
            yield f"{queue.depth} parts are left in {short}"


def _tickets_given_up(found: Evidence) -> set[str]:
    return {one.ticket for one in found.messages if isinstance(one, BatchReady) and one.state in GIVEN_UP}


INVARIANTS: Mapping[str, Callable[[Evidence], Faults]] = {
    "the run is over": run_is_over,
    "no task is left": no_task_is_left,
    "one manifest a batch": one_manifest,
    "one outcome a slice": one_outcome,
    "tasks are given out once": tasks_once,
    "processed as listed": processed_as_listed,
    "trained on once": trained_once,
    "fresh enough": fresh_enough,
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


def violations(found: Evidence) -> list[tuple[str, str]]:
    """Return the violations as pairs of (invariant name, description)."""
    return [(name, text) for name, check in INVARIANTS.items() for text in check(found)]
