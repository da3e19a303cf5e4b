"""Invariants that hold at the end of every run, whatever went wrong in it. Each one yields what contradicts it."""

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
"""Batch, task, run."""
GIVEN_UP = {"failed", "gone"}


class Evidence:
    """Evidence that a run has left behind, read once."""

    def __init__(self, run: ScheduledRun) -> None:
        self.run, self.settings = run, run.schedule.settings
        self.messages: list[Message] = run.messages()
        """Every control message that was published, in order."""

    @cached_property
    def state(self) -> ExplorerState:
        """The explorer's saved state."""
        return self.run.state()

    @cached_property
    def generation(self) -> int:
        """The last trainer that began. One that began at the very end may have been told to end before it had one."""
        return max(trainer.loop.generation for trainer in self.run.trainers)

    @cached_property
    def manifests(self) -> dict[int, list[BatchClosed]]:
        """The different manifests of each batch."""
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
        """The set that decides each batch, as the ready stream has it."""
        return self.run.processed()

    @cached_property
    def slices(self) -> list[TaskSlice]:
        """Every slice that was published, repeats among them."""
        found: list[TaskSlice] = []
        for message in self.messages:
            found += message.slices if isinstance(message, TaskSlices) else []
            found += [message] if isinstance(message, TaskSlice) else []
        return found

    @cached_property
    def results(self) -> list[TaskResult]:
        """Every result that was published, repeats among them."""
        return [message for message in self.messages if isinstance(message, TaskResult)]

    @cached_property
    def progress(self) -> list[Progress]:
        """Every report of the trainers."""
        return [message for message in self.messages if isinstance(message, Progress)]

    @cached_property
    def history(self) -> list[dict[str, object]]:
        """History entries that the final checkpoint was trained on, in order.

        Raises:
            HistoryError: It has a gap.
        """
        return [*lineage(self.run.folder / "history", self.generation, self.settings.batches)]

    @property
    def is_short(self) -> bool:
        """Whether batches may be over before their slices are."""
        return self.settings.batch_timeout < SHORT or self.settings.cut_off != "never"


def run_is_over(found: Evidence) -> Faults:
    """The explorer has nothing open, the trainer has consumed every batch, and the final weights are saved."""
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
    """When all agents have ended, none of their asyncio tasks runs."""
    yield from (f"left running: {name}" for name in found.run.left_running)


def one_manifest(found: Evidence) -> Faults:
    """Each batch has one manifest, however often it was published."""
    if sorted(found.manifests) != list(range(1, found.settings.batches + 1)):
        yield f"batches with a manifest: {sorted(found.manifests)}"
    for batch, manifests in found.manifests.items():
        if len(manifests) > 1:
            tickets = sorted({one.ticket for one in manifests})
            yield f"batch {batch} has {len(manifests)} different manifests, of tickets {tickets}"


def one_outcome(found: Evidence) -> Faults:
    """Each slice of a task has one outcome, and each run that finished is accepted once, or was cut off."""
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
    """Each batch is opened once. Each task of the taskset is in one batch; in a second one only where it was given
    back, and then once. None is passed over, but those of a batch whose time ran out before its slices were published.
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
    """The set that decides a batch holds each experience that its manifest lists once, and nothing else."""
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
    """In the lineage of the final checkpoint each batch is consumed once, and each experience trained on once, all of
    them from the set that decides its ticket.
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
    """Return the ids of the experiences that a history entry says were trained on."""
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
    # consumed after a batch that was opened later: more steps lie between than the style's own staleness
    is_overtaken = max(before[: before.index(batch) + 1]) > batch
    if (
        left_out
        and found.run.is_calm
        and not is_overtaken
        and bound.effective_max_staleness >= bound.inherent_staleness
    ):
        yield f"batch {batch}: left out though nothing went wrong: {dict(left_out)}"


def fresh_enough(found: Evidence) -> Faults:
    """Nothing older than the bound on staleness is trained on."""
    try:
        history = found.history
    except HistoryError:
        return  # said elsewhere
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
    """Each token was sampled by the weights that its experience names, and a trainer had offered these."""
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
    """Versions are committed in rising order, an engine serves them in rising order, the steps of a lineage have no
    gap, and at the end every living engine serves the last one.
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
        return  # said elsewhere
    steps = [int(str(entry["step"])) for entry in history if not entry.get("repaired")]
    made = {entry["progress"] for entry in history if entry["outcome"] == "trained"}
    expected = [sum(int(str(one)) <= progress for one in made) for progress in range(1, len(steps) + 1)]
    if steps != expected:
        yield f"steps of the lineage: {steps}, wanted {expected}"
    final = steps[-1] if steps else 0
    if highest[1] != final:
        yield f"the last version is {highest}, and the lineage ends at step {final}"


def dead_letters_accounted_for(found: Evidence) -> Faults:
    """In ``dead`` are only slices that were reported as poisoned, and batches that were given up or skipped."""
    poisoned = {result.ticket for result in found.results if result.outcome == "poisoned"}
    given_up = {one.ticket for one in found.messages if isinstance(one, BatchReady) and one.state in GIVEN_UP}
    skipped = {one.ticket for one in found.progress if one.outcome == "skipped"}
    known: dict[str, set[str]] = {"task_slice": poisoned, "batch_closed": given_up, "batch_ready": skipped}
    for headers in found.run.dead_letters():
        kind, ticket = str(headers.get("kind")), str(headers.get("ticket"))
        if ticket not in known.get(kind, set()):
            yield f"a {kind} of ticket {ticket}: {headers.get('dead-reason')}"


def queues_are_empty(found: Evidence) -> Faults:
    """Manifests that wait in ``closed`` are of batches that are decided, and the batch queues that are left are of
    batches that were given up, or whose operator died or was cut off before it deleted them: these expire.
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
"""By name, in the order in which they are checked."""
NO_HANG = "the run ends in time"
NO_FAILURE = "no agent fails"
NO_ERROR = "the simulation works"
"""Names of what is no invariant of the end: what can end a run before."""


def violations(found: Evidence) -> list[tuple[str, str]]:
    """Return what is violated, as pairs of the invariant's name and what contradicts it."""
    return [(name, text) for name, check in INVARIANTS.items() for text in check(found)]
