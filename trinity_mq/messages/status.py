"""The state that each role reports in its heartbeats.

On the wire a status is the heartbeat's ``detail``: a map of the keys that were set. Every field has a default, so that
a heartbeat of an older agent decodes; keys that this release does not know are kept.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trinity_mq.messages.base import Role, Version


class Status(BaseModel):
    """A heartbeat's ``detail``, or a map in it. A supervisor has no keys of its own."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    def as_map(self) -> dict[str, Any]:
        """Return the keys that were set, in the order in which the fields are declared."""
        return self.model_dump(exclude_unset=True)


class SchedulerStatus(Status):
    """Status of an agent that schedules task slices."""

    open: list[str] = Field(default_factory=list)
    """Tickets whose results are still expected; a runner drops a slice whose ticket is missing (``opened_beat``)."""


class BatchCounters(Status):
    """Numbers of closed batches, as the explorer last received them from the trainer."""

    progress: int = 0
    """Batches that the trainer has consumed."""
    committed_progress: int = 0
    """Batches behind the weights that the engines serve."""


class FailureStatus(Status):
    """Slices in which the same went wrong, since the explorer's process started."""

    text: str = ""
    """Error, and file and line of the workflow's own code, in one line; that of the first slice."""
    count: int = 0
    """Slices in which it went wrong."""
    failed: int = 0
    """Those of them that failed, or finished a part of their runs; in the others a further attempt went well, or a run
    has no reward that can be trained on."""
    first: str = ""
    """Task, batch and record of the first."""

    def line(self) -> str:
        """Return it in one line for a person."""
        slices = "1 slice" if self.count == 1 else f"{self.count} slices"
        if self.failed == self.count:
            how = "failed"
        else:
            how = f"of which {self.failed} failed" if self.failed else "finished with a fault"
        return f"{slices} {how}: {self.text}; first: {self.first}"


class EmptyBatchStatus(Status):
    """The last batch that had nothing to train on."""

    batch: int = 0
    reason: str = ""
    """Why, in one line."""
    in_a_row: int = 0
    """Batches in a row that had nothing to train on, this one included."""
    limit: int = 0
    """Number of such batches in a row at which the run ends (``explorer.max_consecutive_empty``)."""

    def line(self) -> str:
        """Return it in one line for a person."""
        left = f"{self.in_a_row} in a row, the run ends at {self.limit}"
        return f"batch {self.batch} had nothing to train on ({left}): {self.reason}"


class SilentAgent(Status):
    """An agent that ended without a last heartbeat, or whose process is frozen."""

    id: str = ""
    role: str = ""
    seconds: float = 0.0
    """Seconds since its last heartbeat was received."""
    slices: list[tuple[str, int, int, float]] = Field(default_factory=list)
    """Slices of its last heartbeat (``RunnerStatus.slices``), where it is a runner's."""


class ExplorerStatus(SchedulerStatus):
    """Status of an explorer."""

    run_id: str = ""
    """Id of the run, born with the explorer's first state; empty: this explorer waits for another one to end."""
    place: str = ""
    """Host and run folder of this explorer; empty: not known."""
    chain: str = ""
    """Digest of the explorer's configuration of operators and estimator; empty: not known."""
    ready_offset: int = 0
    """Offset of the ready stream at which the run begins: what lies before is an earlier run's."""
    left_over: int = 0
    """Messages of earlier runs of this name that were on the broker when the run began."""
    opened: int = 0
    """Training batches opened so far."""
    closed: int = 0
    """Training batches closed so far."""
    following: list[str] = Field(default_factory=list)
    """Tickets of closed batches that the trainer has not consumed yet."""
    total_batches: int | None = None
    """Training batches of the whole run; null where the taskset does not say."""
    counters: BatchCounters = Field(default_factory=BatchCounters)
    """Progress of the trainer that paces the explorer."""
    wants: int = 0
    """The last batch for which the explorer requests the newest weights; 0: none."""
    evaluating: int | None = None
    """Training batches closed before the evaluation that is requested or running; null: none is."""
    pending: int = 0
    """Tasks that wait for a batch: submitted ones and those given back."""
    ended: bool = False
    """No further batch will be opened."""
    finished: bool = False
    """The run is over: runners, operators and the trainer end."""
    failures: list[FailureStatus] = Field(default_factory=list)
    """The most frequent kinds of failures of slices, at most 4."""
    empty: EmptyBatchStatus | None = None
    """The last batch that had nothing to train on; null where none had, or the trainer has trained on one since."""
    dropped_dead: int = 0
    """Dead letters that the broker dropped because the queue ``dead`` was full, over the whole run."""
    resent: int = 0
    """Slices sent again since the explorer's process started: no queue held them, and no runner had them."""
    lost: str = ""
    """The slices that were sent again last, in one line, while one of their batches is open; empty: there are none."""
    silent: list[SilentAgent] = Field(default_factory=list)
    """Agents that send no heartbeats though they have not said goodbye, at most 8; one that is heard again is left out.
    An observer that begins to listen later cannot know of them otherwise."""


class PausedLane(Status):
    """A lane of which a runner takes no slices for a while: the last tries all failed for want of infrastructure, such
    as a sandbox (``runner.circuit_breaker``).
    """

    lane: str = ""
    """``train`` or ``eval``."""
    failures: int = 0
    """Tries of slices that failed in a row."""
    kind: str = ""
    """Kind of the last failure: sandbox, tool, provider or environment."""
    reason: str = ""
    """The last failure in one line."""
    pause: float = 0.0
    """Seconds from the last try to the next one."""

    def line(self) -> str:
        """Return it in one line for a person, as what the runner waits for."""
        failed = f"the last {self.failures} tries of slices failed ({self.reason})"
        return f"the {self.kind} of the {self.lane} lane: {failed}; next try in {self.pause:g} s"


class RunnerStatus(Status):
    """Status of a runner. The counters count slices since the process started."""

    running: int = 0
    """Slices in flight."""
    slices: list[tuple[str, int, int, float]] = Field(default_factory=list)
    """The oldest slices in flight, at most 4: ticket, task id, first run, seconds since delivery."""
    holds: dict[str, list[tuple[int, int]]] | None = None
    """By ticket: task id and first run of each slice that the runner has; null: it does not say."""
    done: int = 0
    """Slices whose result was published."""
    cancelled: int = 0
    """Slices dropped because their ticket was no longer open."""
    given_back: int = 0
    """Slices requeued for another try."""
    late: int = 0
    """Slices whose result came too late to count."""
    poisoned: int = 0
    """Slices ended at ``broker.delivery_limit`` and dead-lettered."""
    duplicates: int = 0
    """Redelivered slices whose result was out already."""
    stuck: int = 0
    """Abandoned workflows that still run."""
    paused: list[PausedLane] = Field(default_factory=list)
    """Lanes that are paused."""
    pauses: int = 0
    """Times that a lane was paused."""
    grouped_slices: bool = False
    """It takes several slices in one message (``task_slices``)."""
    slots: int = 0
    """Slices that it takes at a time, of both lanes together; 0: not known."""
    usual_seconds: float = 0.0
    """Median duration of the last slices done in seconds; 0: none is done."""


class OperatorStatus(Status):
    """Status of an operator."""

    ticket: str | None = None
    """Ticket of the batch being processed; null: none."""
    seconds: float = 0.0
    """Seconds since that batch was taken."""
    usual_seconds: float = 0.0
    """Median duration of the last batches in seconds; 0: none is done."""
    reviews: int = 0
    """Runs of that batch that wait for a person's verdict."""
    review_seconds: float = 0.0
    """Seconds until the defaults count for those runs."""


class MemberStatus(Status):
    """One engine in the gate of weight syncs."""

    version: Version | None = None
    """Version that the engine serves; null: none that counts."""
    given: tuple[int, int] | None = None
    """Membership epoch and attempt of the commit that gave the engine its version."""
    state: str = ""
    """The engine's state in the gate, such as current, pulling or quarantined."""


class GateStatus(Status):
    """The gate of weight syncs as the trainer coordinates it. The counters count since the trainer started."""

    fingerprint: str = ""
    """Digest of the trainer's tokenizer and chat template, which engines must share; empty: not known."""
    version: Version | None = None
    """Version committed last."""
    members: dict[str, MemberStatus] = Field(default_factory=dict)
    """Engines in the gate, by id."""
    phases: dict[str, float] = Field(default_factory=dict)
    """Milliseconds of the last sync, by phase: wait, pause, transfer, apply, resume."""
    seconds: float = 0.0
    """Duration of the last sync."""
    syncs: int = 0
    """Syncs that were committed."""
    aborts: int = 0
    """Attempts at a sync that were aborted."""
    trouble: str = ""
    """Why the last attempt was aborted; empty where it was committed."""
    pulls: int = 0
    """Committed versions fetched by single engines."""
    canary_failures: int = 0
    """Engines whose logprobs of the canary prompt did not fit the weights they were sent."""
    quarantined: int = 0
    """Engines that are quarantined now."""


class TrainerStatus(Status):
    """Status of a trainer: the counters that pace the others."""

    generation: int = 0
    """Rises with each start of the trainer; 0: it has not started to train."""
    step: int = 0
    """Train steps that changed the weights."""
    progress: int | None = None
    """Closed batches consumed."""
    committed: Version | None = None
    """Version of the weights committed last."""
    committed_progress: int | None = None
    """Closed batches behind the committed weights."""
    answered: int | None = None
    """The last batch for which a request of the explorer for newer weights has been answered."""
    epoch: int = 0
    """Membership epoch of the gate."""
    phase: str = ""
    """Phase of the sync that is under way: idle where none is."""
    members: list[str] = Field(default_factory=list)
    """Ids of the engines in the gate."""
    in_hand: list[str] = Field(default_factory=list)
    """Tickets of batches that have arrived and are not consumed yet."""
    sync: GateStatus | None = None
    """The gate in detail."""
    finished: bool = False
    """The last batch has been consumed and its weights are committed."""
    doing: str = ""
    """Work under way, such as ``the train step on batch 7``; empty: it waits."""
    doing_seconds: float = 0.0
    """Seconds since that work began."""
    usual_seconds: float = 0.0
    """Median duration in seconds of such work in the last batches; 0: none was done."""
    folder_id: str = ""
    """Id of the trainer's run folder; empty: not known. A trainer that waits for the lock, and whose folder has another
    id, ends."""
    place: str = ""
    """Host and run folder of the trainer; empty: not known."""


class EngineStatus(Status):
    """Status of an engine, sent by its host; a process that hosts engines for an explorer elsewhere sends ``hosts``
    alone.
    """

    id: str | None = None
    """The engine's id."""
    url: str | None = None
    """Base URL of its HTTP server; null: this heartbeat is not an engine's."""
    name: str | None = None
    """Name under which the server serves the model."""
    model_path: str = ""
    """Folder or hub id of the model."""
    version: Version | None = None
    """Version of the weights served; null: none, or an auxiliary model."""
    role: str = ""
    """``rollout`` (the policy) or ``auxiliary``."""
    load: int = 0
    """Sequences being generated or waiting."""
    state: str = ""
    """loading, empty, current, paused, dirty, draining or gone."""
    fingerprint: str = ""
    """Fingerprint of the model's architecture."""
    progress: int = 0
    """Closed batches behind the weights served."""
    tokens: int = 0
    """Tokens sampled since the engine's process started."""
    restarts: int = 0
    """Starts of the engine's process after its first."""
    unanswered: float = 0.0
    """Seconds for which the engine's process has left its host's oldest question unanswered; 0: none is open. A living
    process answers at once, also while it generates."""
    hosts: list[str] = Field(default_factory=list)
    """Ids of the engines that the sender hosts."""


class GatewayStatus(Status):
    """Status of a gateway. The counters count since its process started."""

    url: str = ""
    """Base URL of its HTTP server; empty: it does not serve yet."""
    acting: bool = False
    """It is the one that makes tasks of sessions that are over."""
    open: int = 0
    """Sessions that may still ask."""
    parked: int = 0
    """Sessions that are over and wait for a reward, or for the others of their group."""
    waiting: int = 0
    """Sessions that were handed to the explorer, and whose batch has not been trained on yet."""
    kept_bytes: int = 0
    """Bytes of the answers of all these sessions."""
    asking: int = 0
    """Requests that wait for an engine's answer now."""
    calls: int = 0
    """Requests answered."""
    unrecorded: int = 0
    """Answers that were given although the broker had not confirmed them in time."""
    trained: int = 0
    """Sessions that were trained on."""
    dropped: int = 0
    """Sessions that were dropped."""
    sampled_out: int = 0
    """Sessions that were not recorded because training was behind."""


AnyStatus = (
    ExplorerStatus
    | SchedulerStatus
    | RunnerStatus
    | OperatorStatus
    | TrainerStatus
    | EngineStatus
    | GatewayStatus
    | Status
)

STATUS_BY_ROLE: dict[Role, type[AnyStatus]] = {
    "explorer": ExplorerStatus,
    "scheduler": SchedulerStatus,
    "runner": RunnerStatus,
    "operator": OperatorStatus,
    "trainer": TrainerStatus,
    "engine": EngineStatus,
    "gateway": GatewayStatus,
    "supervisor": Status,
}
