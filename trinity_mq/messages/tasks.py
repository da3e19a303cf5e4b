"""Bodies between the senders of tasks (submitters, the explorer) and the runners that execute them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trinity_mq.messages.base import BatchId, Message, Version

MAX_REPEAT_TIMES = 65_536
"""Runs of one task: as many experiences as one body holds, and more slices than a broker wants."""

TRUTH = "truth"
"""Key in the ``info`` of an experience: the expected answer of its task, for people who look at it."""
MOST_TRUTH = 1000
"""Characters of it: each run of the task carries it."""
MOST_ANSWER, MOST_ANSWERS = 2000, 16
"""Characters of an answer to a question of an evaluation, and answers of one slice, that a result carries."""

Lane = Literal["train", "eval"]
Deliver = Literal["pipeline", "caller", "none"]
Outcome = Literal["finished", "partial", "failed", "cancelled", "poisoned", "late"]

INFRASTRUCTURE = ("sandbox", "tool", "provider", "environment")
"""Kinds of failures that say nothing about the task: a further attempt may go well, once what failed is back."""
FAILURE_KINDS = (*INFRASTRUCTURE, "timeout", "engine", "workflow", "task", "process")
"""Kinds of failures that the library itself knows; workflows may name others."""


class TaskBody(Message):
    """The task of a workflow; the wire form of :class:`trinity_mq.workflows.Task`."""

    kind: ClassVar[str] = "task"

    workflow: str = ""
    """Registered name or dotted path; empty means the taskset's default."""
    raw_task: dict[str, Any] = Field(default_factory=dict)
    """The record as the dataset gave it."""
    repeat_times: int = Field(default=1, ge=1, le=MAX_REPEAT_TIMES)
    """Runs of this task, the group size of group-relative algorithms."""
    format_args: dict[str, Any] = Field(default_factory=dict)
    rollout_args: dict[str, Any] = Field(default_factory=dict)
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    reward_fn: str | None = None
    reward_fn_args: dict[str, Any] = Field(default_factory=dict)
    is_eval: bool = False
    index: dict[str, Any] = Field(default_factory=dict)
    """``{"taskset": name, "index": position}`` of the record, where it has one."""
    record_args: list[str] | None = None
    """Arguments that ``raw_task`` may give, of a task from outside; null: all that the workflow takes from records."""


class TaskSubmission(Message):
    """A task from outside. Its outcome goes to the AMQP properties ``reply_to`` and ``correlation_id``."""

    kind: ClassVar[str] = "task_submission"

    task: TaskBody
    submission_id: str = ""
    """De-duplicates repeated publishes; empty means the message's ``message_id``."""
    want_experiences: bool = False
    """Send the experiences to ``reply_to`` too, after the outcome."""
    exact_runs: bool = False
    """``repeat_times`` is meant as it is; else 1, the default, stands for the group size of the run."""


class SubmissionOutcome(Message):
    """The answer to a :class:`TaskSubmission`, published to its ``reply_to``."""

    kind: ClassVar[str] = "submission_outcome"

    submission_id: str
    batch: BatchId
    ticket: str
    outcome: Outcome
    completed_runs: int = 0
    total_runs: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    message: str | None = None
    experiences: int = 0
    """Experience parts sent to ``reply_to``."""


class TaskSlice(Message):
    """Part of a task: ``repeat_times`` runs from ``run_base`` on. The unit of delivery."""

    kind: ClassVar[str] = "task_slice"

    batch: BatchId
    ticket: str
    task_id: int
    run_base: int = 0
    repeat_times: int = 1
    task: TaskBody
    lane: Lane = "train"
    deliver: Deliver = "pipeline"
    seed: int = 0
    """Run ``r`` of the slice uses ``hash(seed, r)``; a repeated run samples the same where the engine honours it."""
    max_timeout: float = 1800.0
    """Seconds for one attempt of one run."""
    max_retry_times: int = 2
    """Further attempts of failed runs."""
    slice_timeout: float = 1800.0
    """Seconds for one runner's execution of the slice, retries included."""
    pinned: Version | None = None
    """Evaluation: the version that must serve it."""
    opened_beat: int = 0
    """``seq`` of the explorer's first heartbeat that lists the ticket as open; a runner may drop a slice whose ticket a
    later one lacks."""
    explorer: str = ""
    """Id of the scheduling explorer, whose heartbeats ``opened_beat`` refers to."""
    keep_partial: bool = False
    """A runner that drops the slice because a heartbeat lacks its ticket first publishes the finished runs and their
    result."""

    @property
    def message_id(self) -> str:
        """The id of its message, over all deliveries."""
        return f"{self.ticket}-{self.task_id}-{self.run_base}"


class TaskSlices(Message):
    """Short slices of one ticket in one message, for runners whose status says ``grouped_slices``. Each is answered as
    if it had come alone; a message that comes again is taken apart into messages of one slice.
    """

    kind: ClassVar[str] = "task_slices"

    slices: list[TaskSlice]


class TaskResult(Message):
    """The outcome of one attempt at a slice. The first result of a slice decides it."""

    kind: ClassVar[str] = "task_result"

    batch: BatchId
    ticket: str
    task_id: int
    run_base: int = 0
    repeat_times: int = 1
    attempt: str
    """The attempt's id, a uuid made when a runner started on the slice: other attempts' parts do not count."""
    outcome: Outcome
    runs: list[int] = Field(default_factory=list)
    """Ids of the runs that finished."""
    parts: int = 0
    """Experience parts published under this attempt."""
    metrics: list[dict[str, float]] = Field(default_factory=list)
    """Metrics of each finished run."""
    answers: list[str] = Field(default_factory=list)
    """Answers of the first finished runs, of an evaluation whose answers are kept (``monitor.eval_answers_max_bytes``);
    a long one without its middle."""
    message: str | None = None
    failure_kind: str | None = None
    """Kind of the failure that ``message`` tells of, such as ``sandbox``, ``tool``, ``provider``, ``environment``,
    ``timeout``, ``engine``, ``workflow``, ``task`` or ``process``; null: there was none, or its kind is not known."""
    runner: str = ""
    returned: int = 0
    """Returns of the slice to its queue before this attempt."""
    seconds: float = 0.0
    version_min: Version | None = None
    version_max: Version | None = None


class TaskResults(Message):
    """Results of several slices of one batch id in one message."""

    kind: ClassVar[str] = "task_results"

    results: list[TaskResult]
