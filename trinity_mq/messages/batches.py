"""Bodies that carry a batch from the explorer through an operator to the trainer, and the trainer's progress."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trinity_mq.messages.base import BatchId, Message

BatchState = Literal["ready", "empty", "failed", "gone"]
StepOutcome = Literal["trained", "empty", "failed", "gone", "dropped", "skipped"]


class Accepted(Message):
    """An attempt at a slice; its experiences are part of the batch."""

    kind: ClassVar[str] = "accepted"

    task_id: int
    run_base: int
    attempt: str
    runs: list[int]
    parts: int


class Wanted(Message):
    """A submitter that asked for the experiences of its task."""

    kind: ClassVar[str] = "wanted"

    task_id: int
    reply_to: str
    correlation_id: str | None = None


class BatchClosed(Message):
    """The manifest of a batch: the attempts that are part of it. It never changes once saved."""

    kind: ClassVar[str] = "batch_closed"

    batch: BatchId
    ticket: str
    accepted: list[Accepted] = Field(default_factory=list)
    outcomes: dict[str, int] = Field(default_factory=dict)
    """Slices by outcome."""
    repeat_times: int = 1
    metrics: dict[str, float] = Field(default_factory=dict)
    wanted: list[Wanted] = Field(default_factory=list)
    """Submitters to whom the operator sends the experience parts of their tasks."""


class BatchReady(Message):
    """A processed batch is complete on the stream: ``chunks`` chunks under ``(ticket, op)``. This message decides the
    ticket.
    """

    kind: ClassVar[str] = "batch_ready"

    batch: BatchId
    ticket: str
    op: str
    """The processing id, a uuid: chunks of different processings never mix."""
    state: BatchState = "ready"
    chunks: int = 0
    experiences: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    reason: str | None = None
    filtered_groups: int = Field(default=0, ge=0)
    """Groups that entered the operator chain and lost all their experiences there."""
    other_chain: bool = False
    """True if the operator's configuration of operators and estimator differs from the explorer's. Both then belong to
    different runs of the same name."""


class ExperienceReference(Message):
    """Stands for an experience part or chunk with a single experience that exceeds the size limit of messages. The
    experience body lies in the blob store. Content type ``application/vnd.trinity-mq.reference``. Headers and message
    id equal the headers and message id of the experience body.
    """

    kind: ClassVar[str] = "experience_reference"

    url: str
    """URL under ``broker.blob_store``; a reader does not open any other URL."""
    bytes: int = Field(ge=1)
    """Size of the experience body."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum of the experience body, in hexadecimal."""
    experiences: int = Field(default=1, ge=1)
    """Experiences in the body."""


class Mark(Message):
    """A marker that a reader publishes on a stream: when the marker arrives, the reader has read every message before
    it. In a batch queue the marker is the owner's probe of whether the queue answers. Other readers skip it.
    """

    kind: ClassVar[str] = "mark"

    nonce: str


class Progress(Message):
    """The trainer has consumed one closed batch, whatever the outcome."""

    kind: ClassVar[str] = "progress"

    progress: int
    """Closed batches consumed, including this batch."""
    generation: int
    step: int
    """Train steps that changed the weights."""
    batch: BatchId
    ticket: str
    outcome: StepOutcome
    dropped: int = 0
    """Experiences dropped before the step (stale groups)."""
    stale_tasks: list[int] = Field(default_factory=list)
    """Tasks of the batch whose groups were too old to train on. Under ``stale: requeue`` the explorer puts these tasks
    into another batch."""
    reason: str | None = None
    filtered_groups: int = Field(default=0, ge=0)
    """Copied from the ``batch_ready`` that decided the ticket. Under ``explorer.refill`` the explorer adds the same
    number of tasks to later batches."""


class RunEnd(Message):
    """No more batches will be opened; the trainer is done when its progress equals ``batches``."""

    kind: ClassVar[str] = "run_end"

    batches: int
