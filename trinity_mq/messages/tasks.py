"""Bodies between the senders of tasks (submitters, the explorer) and the runners that execute them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trinity_mq.messages.base import BatchId, Message, Version

MAX_REPEAT_TIMES = 65_536
"""Maximum runs of one task. It equals the number of experiences that one body can hold, and exceeds a sensible number
of slices for a broker."""

TRUTH = "truth"
"""Key in the ``info`` of an experience: the expected answer of its task, for people."""
MOST_TRUTH = 1000
"""Maximum characters of the expected answer, because each run of the task carries it."""
MOST_ANSWER, MOST_ANSWERS = 2000, 16
"""Maximum characters of an evaluation answer, and maximum answers of one slice, in a result."""

Lane = Literal["train", "eval"]
Deliver = Literal["pipeline", "caller", "none"]
Outcome = Literal["finished", "partial", "failed", "cancelled", "poisoned", "late"]

INFRASTRUCTURE = ("sandbox", "tool", "provider", "environment")
"""Kinds of failures that do not depend on the task: a retry may succeed when the infrastructure works again."""
FAILURE_KINDS = (*INFRASTRUCTURE, "timeout", "engine", "workflow", "task", "process")
"""Kinds of failures that the library assigns; workflows may use other names."""


class TaskBody(Message):
    """The task of a workflow; the wire form of :class:`trinity_mq.workflows.Task`."""

    kind: ClassVar[str] = "task"

    workflow: str = ""
    """Registered name or dotted path; empty: the taskset's default."""
    raw_task: dict[str, Any] = Field(default_factory=dict)
    """The unchanged record of the dataset."""
    repeat_times: int = Field(default=1, ge=1, le=MAX_REPEAT_TIMES)
    """Runs of this task: the group size of group-relative algorithms."""
    format_args: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``raw_task`` by their meaning (``prompt_key``, ``response_key``, ``system_prompt_key``), and texts around
    the prompt (``system_prompt``, ``reply_prefix``), as in ``format`` of a taskset."""
    rollout_args: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters of the OpenAI API, and ``min_tokens``, ``ignore_eos``, ``enable_thinking``."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    reward_fn: str | None = None
    reward_fn_args: dict[str, Any] = Field(default_factory=dict)
    is_eval: bool = False
    index: dict[str, Any] = Field(default_factory=dict)
    """``{"taskset": name, "index": position}`` of the record, if it has a position."""
    record_args: list[str] | None = None
    """Arguments that ``raw_task`` of an external task may set; null: all arguments that the workflow accepts from
    records."""


class TaskSubmission(Message):
    """An external task. Its outcome is sent to the AMQP properties ``reply_to`` and ``correlation_id``."""

    kind: ClassVar[str] = "task_submission"

    task: TaskBody
    submission_id: str = ""
    """De-duplicates repeated publishes; empty means the message's ``message_id``."""
    want_experiences: bool = False
    """Also send the experiences to ``reply_to``, after the outcome."""
    exact_runs: bool = False
    """Use ``repeat_times`` literally. If False, the default value 1 stands for the group size of the run."""


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
    """Number of experience parts sent to ``reply_to``."""


class TaskSlice(Message):
    """Part of a task: ``repeat_times`` runs, numbered from ``run_base``. A slice is the unit of delivery."""

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
    """Run ``r`` of the slice uses ``hash(seed, r)``. A repeated run samples the same tokens if the engine honours
    seeds."""
    max_timeout: float = 1800.0
    """Maximum seconds for one attempt at one run."""
    max_retry_times: int = 2
    """Maximum retries of failed runs."""
    slice_timeout: float = 1800.0
    """Maximum seconds for one runner's execution of the slice, including retries."""
    pinned: Version | None = None
    """Evaluation: the weight version that must serve the slice."""
    opened_beat: int = 0
    """``seq`` of the explorer's first heartbeat that lists the ticket as open. A runner may drop a slice whose ticket
    is missing in a later heartbeat."""
    explorer: str = ""
    """Id of the scheduling explorer, which sends the heartbeats of ``opened_beat``."""
    keep_partial: bool = False
    """True if partial results are wanted: a runner that stops the slice early, because its ticket is missing in a
    heartbeat or because the runner must end, publishes the finished runs and their result."""

    @property
    def message_id(self) -> str:
        """Id of the slice's message, the same for all deliveries."""
        return f"{self.ticket}-{self.task_id}-{self.run_base}"


class TaskSlices(Message):
    """Short slices of one ticket in one message, for runners whose status has ``grouped_slices``. Each slice gets its
    own result. A redelivered message is split into messages of one slice.
    """

    kind: ClassVar[str] = "task_slices"

    slices: list[TaskSlice]


class TaskResult(Message):
    """The outcome of one attempt at a slice. The first result decides the slice."""

    kind: ClassVar[str] = "task_result"

    batch: BatchId
    ticket: str
    task_id: int
    run_base: int = 0
    repeat_times: int = 1
    attempt: str
    """Id of the attempt, a uuid made when a runner started the slice. Parts of other attempts do not count."""
    outcome: Outcome
    runs: list[int] = Field(default_factory=list)
    """Ids of the runs that finished."""
    parts: int = 0
    """Number of experience parts published under this attempt."""
    metrics: list[dict[str, float]] = Field(default_factory=list)
    """Metrics of each finished run."""
    answers: list[str] = Field(default_factory=list)
    """Answers of the first finished runs, in an evaluation that keeps answers (``monitor.eval_answers_max_bytes``). The
    middle of a long answer is cut out."""
    message: str | None = None
    failure_kind: str | None = None
    """Kind of the failure in ``message``, such as ``sandbox``, ``tool``, ``provider``, ``environment``, ``timeout``,
    ``engine``, ``workflow``, ``task`` or ``process``; null: no failure, or unknown kind."""
    runner: str = ""
    returned: int = 0
    """How often the slice was returned to its queue before this attempt."""
    seconds: float = 0.0
    version_min: Version | None = None
    version_max: Version | None = None


class TaskResults(Message):
    """Results of several slices of one batch id in one message."""

    kind: ClassVar[str] = "task_results"

    results: list[TaskResult]
