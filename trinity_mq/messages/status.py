"""The state that each role reports in its heartbeats.

On the wire a status is the heartbeat's ``detail``: a map of the keys that were set. Every field has a default, so that
a heartbeat of an older agent decodes. Unknown keys are kept.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field

from trinity_mq.messages.base import Version
from trinity_mq.roles import ROLES, Role


class AgentStatus(BaseModel):
    """A heartbeat's ``detail``, or a map within it. A supervisor does not have keys of its own."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    def as_map(self) -> dict[str, Any]:
        """Return the keys that were set, in the order of the field declarations."""
        return self.model_dump(exclude_unset=True)


class SchedulerStatus(AgentStatus):
    """Status of an agent that schedules task slices."""

    open: list[str] = Field(default_factory=list)
    """Tickets whose results are still expected. A runner drops a slice whose ticket is missing here
    (``opened_beat``)."""


class BatchCounters(AgentStatus):
    """Numbers of closed batches that the explorer last received from the trainer."""

    progress: int = 0
    """Batches that the trainer has consumed."""
    committed_progress: int = 0
    """Batches that the trainer had consumed when it made the served weights."""


class FailureStatus(AgentStatus):
    """Slices with the same failure, since the explorer's process started."""

    text: str = ""
    """Error with file and line of the workflow's own code, in one line, taken from the first slice."""
    count: int = 0
    """Slices with this failure."""
    failed: int = 0
    """Slices of ``count`` that failed or finished only a part of their runs. In the other slices a retry succeeded, or
    a run does not have a usable reward for training."""
    first: str = ""
    """Task, batch and record of the first slice."""

    def line(self) -> str:
        """Return the failure in one line for a person."""
        slices = "1 slice" if self.count == 1 else f"{self.count} slices"
        if self.failed == self.count:
            how = "failed"
        else:
            how = f"of which {self.failed} failed" if self.failed else "finished with a fault"
        return f"{slices} {how}: {self.text}; first: {self.first}"


class EmptyBatchStatus(AgentStatus):
    """The last batch without experiences to train on."""

    batch: int = 0
    reason: str = ""
    """Reason in one line."""
    in_a_row: int = 0
    """Consecutive batches without experiences to train on, including this batch."""
    limit: int = 0
    """Number of consecutive empty batches that ends the run (``explorer.max_consecutive_empty``)."""

    def line(self) -> str:
        """Return the status in one line for a person."""
        streak = f"{self.in_a_row} in a row, the run ends at {self.limit}"
        return f"batch {self.batch} had nothing to train on ({streak}): {self.reason}"


class SilentAgent(AgentStatus):
    """An agent that ended without a last heartbeat, or whose process is frozen."""

    id: str = ""
    role: str = ""
    seconds: float = 0.0
    """Seconds since its last heartbeat was received."""
    slices: list[tuple[str, int, int, float]] = Field(default_factory=list)
    """Slices of its last heartbeat (``RunnerStatus.slices``) if the agent is a runner."""


class ExplorerStatus(SchedulerStatus):
    """Status of an explorer."""

    run_id: str = ""
    """Id of the run, created with the explorer's first state; empty: this explorer waits for another explorer to
    end."""
    place: str = ""
    """Host and run folder of this explorer; empty: unknown."""
    chain: str = ""
    """Digest of the explorer's configuration of operators and estimator; empty: unknown."""
    ready_offset: int = 0
    """Offset of the ready stream at which this run begins; earlier messages belong to an earlier run."""
    left_over: int = 0
    """Messages of earlier runs of this name that were on the broker when this run began."""
    opened: int = 0
    """Training batches opened so far."""
    closed: int = 0
    """Training batches closed so far."""
    following: list[str] = Field(default_factory=list)
    """Tickets of closed batches that the trainer has not consumed yet."""
    total_batches: int | None = None
    """Training batches of the whole run; null: the length of the taskset is unknown."""
    counters: BatchCounters = Field(default_factory=BatchCounters)
    """Progress of the trainer, which paces the explorer."""
    wants: int = 0
    """The last batch for which the explorer requests the newest weights; 0: none."""
    evaluating: int | None = None
    """Training batches closed before the requested or running evaluation; null: no evaluation."""
    pending: int = 0
    """Tasks that wait for a batch: submitted tasks and returned tasks."""
    ended: bool = False
    """True if no further batch will be opened."""
    finished: bool = False
    """True if the run is over: runners, operators and the trainer end."""
    failures: list[FailureStatus] = Field(default_factory=list)
    """The most frequent kinds of slice failures, at most 4."""
    empty: EmptyBatchStatus | None = None
    """The last batch without experiences to train on; null: there was none, or the trainer has trained on a later
    batch."""
    dropped_dead: int = 0
    """Dead letters that the broker dropped because the queue ``dead`` was full, during the whole run."""
    resent: int = 0
    """Slices sent again since the explorer's process started, because neither a queue nor a runner held them."""
    lost: str = ""
    """The most recently resent slices in one line, while one of their batches is open; empty: none."""
    silent: list[SilentAgent] = Field(default_factory=list)
    """Agents whose heartbeats stopped without a last heartbeat, at most 8. An agent that sends heartbeats again is
    removed. Observers that start later depend on this list."""


class PausedLane(AgentStatus):
    """A lane that a runner has paused: the last attempts all failed because of infrastructure, such as a sandbox
    (``runner.circuit_breaker``). The runner does not take slices of a paused lane.
    """

    lane: str = ""
    """``train`` or ``eval``."""
    failures: int = 0
    """Consecutive failed attempts at slices."""
    kind: str = ""
    """Kind of the last failure: ``sandbox``, ``tool``, ``provider`` or ``environment``."""
    reason: str = ""
    """The last failure in one line."""
    pause: float = 0.0
    """Seconds between the last attempt and the next."""

    def line(self) -> str:
        """Return the pause in one line for a person, as the condition that the runner waits for."""
        failed = f"the last {self.failures} tries of slices failed ({self.reason})"
        return f"the {self.kind} of the {self.lane} lane: {failed}; next try in {self.pause:g} s"


class RunnerStatus(AgentStatus):
    """Status of a runner. The counters count slices since the process started."""

    running: int = 0
    """Slices in flight."""
    slices: list[tuple[str, int, int, float]] = Field(default_factory=list)
    """The oldest slices in flight, at most 4: ticket, task id, first run, seconds since delivery."""
    holds: dict[str, list[tuple[int, int]]] | None = None
    """By ticket: task id and first run of each slice that the runner holds; null: the runner does not report it."""
    done: int = 0
    """Slices whose result was published."""
    cancelled: int = 0
    """Slices dropped because their ticket was no longer open."""
    given_back: int = 0
    """Slices returned to their queue for another attempt."""
    late: int = 0
    """Slices whose result arrived too late to count."""
    poisoned: int = 0
    """Slices that reached ``broker.delivery_limit`` and were dead-lettered."""
    duplicates: int = 0
    """Redelivered slices whose result was already published."""
    stuck: int = 0
    """Abandoned workflows that are still running."""
    paused: list[PausedLane] = Field(default_factory=list)
    """Lanes that are paused now."""
    pauses: int = 0
    """How often a lane was paused."""
    grouped_slices: bool = False
    """The runner accepts several slices in one message (``task_slices``)."""
    slots: int = 0
    """Maximum number of concurrent slices, both lanes together; 0: unknown."""
    usual_seconds: float = 0.0
    """Median duration of the last finished slices in seconds; 0: no slice has finished."""


class OperatorStatus(AgentStatus):
    """Status of an operator."""

    ticket: str | None = None
    """Ticket of the batch in progress; null: none."""
    seconds: float = 0.0
    """Seconds since the operator took the batch in progress."""
    usual_seconds: float = 0.0
    """Median duration of the last batches in seconds; 0: no batch has finished."""
    reviews: int = 0
    """Runs of that batch that wait for a person's verdict."""
    review_seconds: float = 0.0
    """Seconds until the default verdicts take effect for those runs."""


class MemberStatus(AgentStatus):
    """One engine in the gate of weight syncs."""

    version: Version | None = None
    """Weight version that the engine serves; null: no valid version."""
    given: tuple[int, int] | None = None
    """Membership epoch and attempt of the commit that assigned the version to the engine."""
    state: str = ""
    """The engine's state in the gate, such as current, pulling or quarantined."""


class GateStatus(AgentStatus):
    """The gate of weight syncs, coordinated by the trainer. The counters count since the trainer started."""

    fingerprint: str = ""
    """Digest of the trainer's tokenizer and chat template, which must equal the engines' digest; empty: unknown."""
    version: Version | None = None
    """Last committed weight version."""
    members: dict[str, MemberStatus] = Field(default_factory=dict)
    """Engines in the gate, by id."""
    phases: dict[str, float] = Field(default_factory=dict)
    """Milliseconds of the last sync, by phase: wait, pause, transfer, apply, resume."""
    seconds: float = 0.0
    """Duration of the last sync in seconds."""
    syncs: int = 0
    """Committed syncs."""
    aborts: int = 0
    """Aborted attempts at a sync."""
    trouble: str = ""
    """Why the last attempt was aborted; empty: it was committed."""
    pulls: int = 0
    """How often a single engine fetched a committed version."""
    canary_failures: int = 0
    """Engines whose logprobs of the canary prompt did not fit the weights that they received."""
    quarantined: int = 0
    """Engines that are quarantined now."""
    num_bytes: int = 0
    """Bytes of the weights of the current or last sync."""
    method: str = ""
    """Channel of the current or last sync."""
    deadline: float = 0.0
    """Seconds that the transfer of the current or last sync may take; 0: no sync has begun."""


class TrainerStatus(AgentStatus):
    """Status of a trainer, with the counters that pace the other agents."""

    generation: int = 0
    """Rises with each start of the trainer; 0: training has not started."""
    step: int = 0
    """Train steps that changed the weights."""
    progress: int | None = None
    """Closed batches consumed."""
    committed: Version | None = None
    """Last committed weight version."""
    committed_progress: int | None = None
    """Closed batches that the trainer had consumed when it made the committed weights."""
    answered: int | None = None
    """The last batch for which the trainer has answered the explorer's request for newer weights."""
    epoch: int = 0
    """Membership epoch of the gate."""
    phase: str = ""
    """Phase of the current sync; ``idle`` without a sync."""
    members: list[str] = Field(default_factory=list)
    """Ids of the engines in the gate."""
    in_hand: list[str] = Field(default_factory=list)
    """Tickets of batches that have arrived and are not consumed yet."""
    sync: GateStatus | None = None
    """The gate in detail."""
    finished: bool = False
    """True if the last batch has been consumed and its weights are committed."""
    doing: str = ""
    """Current work, such as ``the train step on batch 7``; empty: the trainer waits."""
    doing_seconds: float = 0.0
    """Seconds since that work began."""
    usual_seconds: float = 0.0
    """Median duration in seconds of this kind of work in the last batches; 0: unknown."""
    folder_id: str = ""
    """Id of the trainer's run folder; empty: unknown. A trainer that waits for the lock with a different folder id
    ends."""
    place: str = ""
    """Host and run folder of the trainer; empty: unknown."""


class EngineUse(AgentStatus):
    """Use of the batch and the KV cache of an engine whose server reports them (``vllm``)."""

    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Sequences that wait for room in the batch or in the KV cache."""
    cache_used: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the KV cache in use."""
    prompt_tokens: int = 0
    """Prompt tokens looked up in the prefix cache since the engine's server started."""
    cached_prompt_tokens: int = 0
    """Prompt tokens found in the prefix cache since the engine's server started; they are not computed again."""
    preemptions: int = 0
    """Sequences that lost their place in the KV cache since the engine's server started; their tokens are computed
    again.
    """


class EngineStatus(AgentStatus):
    """Status of an engine, sent by its host. A host of engines for a remote explorer sends ``hosts`` only."""

    id: str | None = None
    """Id of the engine."""
    url: str | None = None
    """Base URL of its HTTP server; null: this heartbeat does not describe an engine."""
    name: str | None = None
    """Name under which the server serves the model."""
    model_path: str = ""
    """Folder or hub id of the model."""
    version: Version | None = None
    """Served weight version; null: none, or an auxiliary model."""
    role: str = ""
    """``rollout`` (the policy) or ``auxiliary``."""
    load: int = 0
    """Sequences being generated or waiting."""
    state: str = ""
    """``loading``, ``empty``, ``current``, ``paused``, ``dirty``, ``draining`` or ``gone``."""
    fingerprint: str = ""
    """Digest of the engine's tokenizer and chat template."""
    progress: int = 0
    """Closed batches that the trainer had consumed when it made the served weights."""
    tokens: int = 0
    """Tokens sampled since the engine's process started."""
    restarts: int = 0
    """Restarts of the engine's process."""
    unanswered: float = 0.0
    """Seconds for which the engine's process has not answered its host's oldest question; 0: no open question. A
    healthy process answers at once, even during generation."""
    hosts: list[str] = Field(default_factory=list)
    """Ids of the engines that the sender hosts."""
    use: EngineUse | None = None
    """Use of the batch and the KV cache; null: the engine does not report it."""


class GatewayStatus(AgentStatus):
    """Status of a gateway. The counters count since its process started."""

    url: str = ""
    """Base URL of its HTTP server; empty: the gateway does not serve yet."""
    acting: bool = False
    """True if this gateway acts for the run: it makes tasks from sessions that are over."""
    open: int = 0
    """Sessions that may still send requests."""
    parked: int = 0
    """Sessions that are over and wait for a reward, or for the other sessions of their group."""
    waiting: int = 0
    """Sessions that were handed to the explorer and are not yet trained on."""
    kept_bytes: int = 0
    """Bytes of the recorded answers of all these sessions."""
    asking: int = 0
    """Requests that currently wait for an engine's answer."""
    calls: int = 0
    """Answered requests."""
    unrecorded: int = 0
    """Answers returned to the client although the broker had not confirmed them in time."""
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
    | AgentStatus
)

_CLASSES: dict[str, type[AnyStatus]] = {status.__name__: status for status in get_args(AnyStatus)}
STATUS_BY_ROLE: dict[Role, type[AnyStatus]] = {role: _CLASSES[ROLES[role].status] for role in get_args(Role)}
