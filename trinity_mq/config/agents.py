"""The sections of explorer, runner, operator and trainer, and of monitoring and supervision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trinity_mq.config.algorithm import OperatorConfig
from trinity_mq.config.base import Section, Threads
from trinity_mq.config.engines import AuxiliaryModelConfig, PolicyEngine, check_tensor_parallel_size, engine_row
from trinity_mq.config.vllm import VllmConfig

REVIEW_SECONDS = 300.0
"""Default wait of the operator ``human_review``, in seconds; its argument ``seconds`` overrides it."""
REVIEW_MARGIN = 15.0
"""Seconds that a review takes after its wait, in which the operator publishes the verdicts that count."""

AUTO_TOKENS = 16384
"""Number of tokens that ``trainer.max_tokens_per_micro_batch: auto`` means on a CPU."""

ConcurrentMode = Literal["sequential", "asynchronous", "multi-threading"]


class RolloutModelConfig(Section):
    """The rollout engine and the sampling parameters of training rollouts."""

    engine: PolicyEngine = "transformers"
    """``transformers``: our own server, with torch only. ``vllm``: vLLM's server, with the settings in ``vllm``.
    A dotted path names your own engine class, a subclass of ``trinity_mq.engines.Engine``."""
    engine_num: int = Field(default=1, ge=1, le=4096)
    """Number of engines that the explorer hosts, and that each ``trinity-mq explorer --engines-only`` hosts in
    addition. Each engine is a process."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=4096)
    """vllm: number of devices among which each engine splits the model, for a model that does not fit on one device. It
    must divide the model's number of attention heads."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of training rollouts. Values below 1 need ``algorithm.allow_truncated_sampling``."""
    min_response_tokens: int = Field(default=0, ge=0)
    """Minimum number of tokens of an answer. ``rollout_args.min_tokens`` of a taskset overrides it. The logprobs do not
    take this limit into account."""
    ignore_eos: bool = False
    """Continue answers after the tokens that end an answer, up to ``model.max_response_tokens``.
    ``rollout_args.ignore_eos`` of a taskset overrides it."""
    num_threads: Threads = "auto"
    """CPU threads of torch on each device of an engine. ``auto``: an equal share of the cores, which the trainer's
    processes and all engines of the run divide among themselves."""
    max_batch_sequences: int = Field(default=1024, ge=1)
    """Maximum number of sequences that an engine generates at once. Further requests wait: with ``transformers`` for
    the next static batch, with ``vllm`` until a sequence ends."""
    lease: float = Field(default=60.0, ge=5)
    """Seconds that an engine keeps running after its host is gone: long enough for a restart of the host."""
    host: str = "127.0.0.1"
    """Address on which engines listen and at which runners reach them. If runners are on other machines, set an address
    of this machine that they can reach."""
    enable_history: bool = False
    """Record the model calls of a workflow as experiences. Workflows that call the model through ``client`` need it."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of the engine ``vllm``."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_external(cls, data: Any) -> Any:
        if isinstance(data, dict) and not engine_row(engine := data.get("engine", "")).takes_weights:
            raise ValueError(
                f"engine is {engine!r}, but a server elsewhere takes no weights from the trainer, so it cannot be the "
                "policy. Name it in explorer.auxiliary_models: there workflows may ask it, and it answers evaluation "
                "tasksets with rollout_args: {model: <its name>}"
            )
        return data

    @model_validator(mode="after")
    def _splits(self) -> RolloutModelConfig:
        check_tensor_parallel_size(self.engine, self.tensor_parallel_size)
        return self

    @property
    def ending(self) -> dict[str, Any]:
        """Sampling parameters that decide where an answer may end. Parameters without an effect are left out."""
        parameters = {"min_tokens": self.min_response_tokens, "ignore_eos": self.ignore_eos}
        return {name: value for name, value in parameters.items() if value}


class DynamicTimeoutConfig(Section):
    """A slice timeout that follows the mean duration of slices, once one training batch is complete."""

    enable: bool = False
    """Use this timeout."""
    ratio: float = Field(default=3.0, gt=1)
    """The timeout as a multiple of the mean duration of a slice. The configured limits also apply."""


class OverRolloutConfig(Section):
    """Closing a batch without waiting for its slowest tasks."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of a batch's tasks that may be cut off. 0: the batch waits for all tasks."""
    wait_after_min: float = Field(default=30.0, ge=0)
    """Seconds that the other tasks still have once enough tasks are done."""
    return_partial_tasks: bool = False
    """Keep the finished runs of tasks that were cut off for this reason. Otherwise such tasks count as not run. After
    ``batch_timeout`` finished runs are always kept."""


class RefillConfig(Section):
    """Extra tasks that replace the groups dropped by operators (dynamic sampling)."""

    max: float = Field(default=0.0, ge=0, le=100)
    """Maximum number of replacement tasks in one batch, as a multiple of ``buffer.batch_size``, rounded up. If
    operators drop a share p of all groups, p / (1 - p) keeps the number of trained groups constant. 0: dropped groups
    are not replaced."""


class ExplorerConfig(Section):
    """Scheduling of tasks, evaluation, and the engines that the explorer hosts."""

    eval_interval: int = Field(default=100, ge=1)
    """Number of batches between evaluations."""
    eval_on_startup: bool = True
    """Evaluate before the first batch."""
    max_timeout: float = Field(default=360.0, gt=0)
    """Seconds for one attempt of one run of a task. The value may be several hours if ``batch_timeout`` and
    ``stall_timeout`` allow it."""
    max_retry_times: int = Field(default=2, ge=0)
    """Maximum number of further attempts after the first attempt of a task's run has failed."""
    max_repeat_times_per_runner: int | None = Field(default=None, ge=1)
    """Maximum number of runs in one slice. None: all runs of a task, sampled with a single request."""
    batch_timeout: float = Field(default=3600.0, gt=0)
    """Maximum seconds that a batch stays open. The clock runs only while at least one runner and one engine are alive.
    """
    eval_timeout: float = Field(default=1800.0, gt=0)
    """Maximum seconds for an evaluation."""
    operator_deadline: float = Field(default=60.0, gt=0)
    """Seconds for which an operator may be idle while a closed batch waits; then the batch's manifest is published
    again. After three such waits the batch is reported as failed. Without an operator, or while all operators are busy,
    batches wait."""
    max_open_batches: int = Field(default=8, ge=1)
    """Maximum number of batches that are opened and not yet consumed by the trainer."""
    max_consecutive_empty: int = Field(default=3, ge=1)
    """Number of batches in a row without an experience to train on after which the whole run ends with an error."""
    stall_timeout: float = Field(default=7200.0, gt=0)
    """Seconds without any progress after which the whole run saves its state and ends with an error."""
    unfinished: Literal["requeue", "drop"] = "requeue"
    """Treatment of tasks that have no finished run when their batch closes: ``requeue`` them once, or ``drop`` them."""
    dynamic_timeout: DynamicTimeoutConfig = Field(default_factory=DynamicTimeoutConfig)
    """A slice timeout that follows the mean duration of slices."""
    over_rollout: OverRolloutConfig = Field(default_factory=OverRolloutConfig)
    """Closing a batch without waiting for its slowest tasks."""
    refill: RefillConfig = Field(default_factory=RefillConfig)
    """Extra tasks that replace the groups dropped by operators (dynamic sampling)."""
    rollout_model: RolloutModelConfig = Field(default_factory=RolloutModelConfig)
    """The rollout engine."""
    auxiliary_models: tuple[AuxiliaryModelConfig, ...] = ()
    """Models passed to workflows as ``auxiliary_models``, in this order, and to operators by name."""

    @model_validator(mode="after")
    def _auxiliary_names(self) -> ExplorerConfig:
        names = [model.name for model in self.auxiliary_models]
        if len(set(names)) != len(names):
            raise ValueError(f"auxiliary_models need different names, got {names}")
        return self

    @model_validator(mode="after")
    def _times(self) -> ExplorerConfig:
        if not self.slice_timeout <= self.batch_timeout <= self.stall_timeout:
            raise ValueError(
                f"times must grow: a slice may take {self.slice_timeout:g} s (max_timeout x tries), batch_timeout is "
                f"{self.batch_timeout:g} s, stall_timeout {self.stall_timeout:g} s"
            )
        return self

    @property
    def slice_timeout(self) -> float:
        """Seconds that a runner has for a slice, including retries."""
        return self.max_timeout * (self.max_retry_times + 1)


class CircuitBreakerConfig(Section):
    """Pauses a lane (training or evaluation) while infrastructure that its slices need is unavailable: a sandbox, a
    tool, a provider or the environment, but not the model. A slice has an infrastructure failure if this is the
    reason why none of its runs finished. The slice then returns to its queue, and any runner retries it.

    The slice fails for good at its 16th infrastructure failure. While its lane is not paused, it also fails for good
    if, in one runner, two of its retries failed although another slice had succeeded since its previous failure: then
    the slice itself counts as faulty. If no other slice of the lane fails at the time, ``tries_alone`` failures or one
    such retry are enough.

    The first pause takes 5 seconds. Then the runner tries one slice: if one of its runs finishes, the pause ends; if
    the slice has an infrastructure failure again, the next pause is twice as long, up to 300 seconds. While all runners
    pause a lane, the clocks of its batches and evaluations stand still, and only ``explorer.stall_timeout`` ends the
    run.
    """

    enable: bool = True
    """``false``: a slice fails at its first infrastructure failure, and no lane is paused."""
    failures: int = Field(default=8, ge=1)
    """Number of consecutive infrastructure failures of a lane's slices in one runner at which the runner pauses the
    lane. If all of them are failures of the same slice, 3 are enough. One finished run, or a failure of the task or of
    its workflow, restarts the count."""
    tries_alone: int = Field(default=8, ge=1)
    """Number of infrastructure failures, counted over all runners, at which a slice fails for good if no other slice of
    the lane fails at the time, so that the slice itself may be at fault. 8 failures take about three minutes, for which
    a bad task can hold up its batch."""


class RunnerConfig(Section):
    """Runners: processes that execute slices of tasks."""

    num_runners: int = Field(default=2, ge=1)
    """Number of runner processes that ``trinity-mq run`` starts."""
    concurrency: int = Field(default=16, ge=1)
    """Number of training slices in flight in one runner: its prefetch. As many evaluation slices are in flight in
    addition."""
    concurrent_mode: ConcurrentMode = "asynchronous"
    """Execution of the runs of a slice, for workflows whose instances do one run each. ``sequential``: one after the
    other. If the workflow can be reset, one instance does all of them, and the runner keeps it for later slices (except
    for slices in a process of their own). ``asynchronous``: concurrently, each run with its own instance.
    ``multi-threading``: also concurrently, and each asynchronous workflow has its own thread, event loop and
    connections."""
    blocking: Literal["thread", "process"] = "thread"
    """Place where synchronous workflows run. ``thread``: in the runner. A workflow that never returns is abandoned, and
    its thread continues; with more than 16 such threads the runner requeues its slices and restarts. ``process``: in
    one process for each slice, which is killed when its time is over. An asynchronous workflow that blocks the event
    loop for 30 seconds ends the process of the runner. A slice with an earlier delivery that failed or was lost always
    runs in a process of its own."""
    recycle_after: int | None = Field(default=None, ge=1)
    """Number of slices after which a runner restarts, so that memory leaks of workflows do not add up. None: never."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the runners, set before any workflow is imported."""
    memory_limit: int | None = Field(default=None, ge=2**20)
    """Bytes that the process of a slice may allocate in addition to its memory at the start. None: no limit."""
    circuit_breaker: CircuitBreakerConfig = Field(default_factory=CircuitBreakerConfig)
    """Pauses a lane while a sandbox or a service that it needs is unavailable."""
    drain_timeout: float = Field(default=20.0, gt=0)
    """Seconds that a draining runner has to finish its slices; then it requeues them. Draining explorers, operators and
    gateways do not wait longer for their work either."""

    @property
    def eval_slots(self) -> int:
        """Number of evaluation slices in flight in one runner."""
        return self.concurrency


class OperatorsConfig(Section):
    """Operators: processes that run a chain of operators on each batch."""

    num_operators: int = Field(default=1, ge=1)
    """Number of operator processes that ``trinity-mq run`` starts."""
    operators: tuple[OperatorConfig, ...] = ()
    """The chain of operators. It runs before the algorithm's advantage function."""
    timeout: float = Field(default=800.0, gt=0)
    """Seconds for the whole chain on one batch. It includes the waits of ``human_review``; several ``human_review``
    operators in the chain add up."""

    @property
    def review_seconds(self) -> float:
        """Maximum seconds that a batch waits for people: the sum over the ``human_review`` operators of the chain."""
        waits = [
            operator.args.get("seconds", REVIEW_SECONDS) for operator in self.operators if _is_human_review(operator)
        ]
        return float(sum(wait + REVIEW_MARGIN for wait in waits if isinstance(wait, int | float)))

    @model_validator(mode="after")
    def _reviews(self) -> OperatorsConfig:
        if (waits := self.review_seconds) >= self.timeout:
            raise ValueError(
                f"human_review may wait {waits:g} s for people (seconds, and {REVIEW_MARGIN:g} s to write down what "
                f"counted, each), and operator.timeout is {self.timeout:g} s for the whole chain: raise "
                "operator.timeout (and broker.consumer_timeout, if its own check asks for it), or lower seconds. An "
                "operator process does nothing else while it waits: operator.num_operators says how many batches may "
                "wait at a time"
            )
        return self


def _is_human_review(operator: OperatorConfig) -> bool:
    return operator.name == "human_review" or operator.name.endswith(".HumanReview")


class GuardConfig(Section):
    """Limits beyond which the trainer skips an optimizer step of the policy or stops. A step whose loss or gradient
    norm is not finite is always skipped. A skipped step leaves weights and optimizer unchanged.
    """

    max_norm_ratio: float | None = Field(default=None, gt=1)
    """Maximum gradient norm, before clipping, as a multiple of its recent median. A step with a larger norm is skipped.
    The median covers the last 100 applied steps, and the limit applies once 20 steps have been applied. 10 excludes
    only extreme outliers. None: no limit."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Maximum ``mismatch/k3`` of the first optimizer step of a batch, in nats: the difference between the logprobs of
    engine and trainer under the same weights. A step with a larger value is skipped. None: no limit."""
    max_consecutive_skips: int | None = Field(default=5, ge=1)
    """Number of optimizer steps skipped in a row at which the trainer stops with an error. The batch of the last
    skipped step is not counted as trained: a restarted trainer trains on it first. None: never."""


class TrainerConfig(Section):
    """The trainer. It runs the optimizer steps."""

    save_interval: int = Field(default=50, ge=1)
    """Number of batches between checkpoints. A checkpoint is saved earlier for ``keep_every``, or if the batches since
    the last checkpoint take more than a quarter of ``broker.ready_max_bytes``."""
    max_checkpoints_to_keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. Older checkpoints are deleted, unless ``keep_every`` keeps them."""
    keep_every: int | None = Field(default=None, ge=1)
    """Number of batches between checkpoints that are never deleted: a checkpoint is saved by the train step that
    reaches each multiple of this number of batches. None: no such checkpoints."""
    async_save: bool = True
    """Write checkpoints while training continues: training waits only until weights and optimizer state are copied to
    host memory. The copy's memory is reused for the next checkpoint. ``false``, and ``synchronizer.colocated`` with
    ``export: every`` or ``model.lora``: training waits until the checkpoint is written."""
    export: Literal["every", "last"] = "every"
    """Places to which the model is written in the format of ``transformers``. ``every``: as ``model/`` in every
    checkpoint and as ``final/`` at the end. ``last``: only as ``final/``, which saves a quarter of a checkpoint's
    bytes."""
    max_tokens_per_micro_batch: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Maximum number of tokens in one forward and backward pass, including padding. A longer sequence gets its own
    pass. ``auto``: 16384 on a CPU. On a GPU a power of two from 2048 to 65536, the largest that fits into the free
    memory by the estimate; the log gives the reason. Checkpoints store the value, and a resumed run on the same kind of
    GPU uses it again."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """Layout of the sequences in a pass. ``padded``: one row for each sequence, padded to the longest. ``packed``: one
    sequence after the other in a single row, without padding. Models whose layers would mix packed sequences (Mamba,
    linear attention and similar) are refused. On a CPU, packing needs a mask of tokens x tokens. ``auto``: packed if
    model and device have a suitable attention (CUDA with flash attention and ``model.dtype: bfloat16``, or with flex
    attention), otherwise padded."""
    share_prefixes: bool = True
    """Compute a common prefix of several sequences in a pass, such as the prompt of a group of answers, only once if
    that saves at least a tenth of the positions. It applies to padded rows in a single process without gradient
    checkpointing and ``model.router_replay``, if every layer of the model attends to all earlier tokens. The results
    are equal up to rounding."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Keep only the input of each layer for the backward pass, which recomputes the rest of the layer: less memory,
    about a third more time. ``auto``: on a GPU if the model supports it, not on a CPU."""
    num_threads: Threads = "auto"
    """CPU threads of torch in each trainer process. ``auto``: an equal share of the cores, which the trainer's
    processes and all engines of the run divide among themselves."""
    nproc: int = Field(default=1, ge=1, le=4096)
    """Number of processes that share a train step. Each holds a part of the model (FSDP2) and, if there are GPUs, uses
    its own GPU. The trainer starts them on its machine. Under ``torchrun``, the processes started by ``torchrun`` count
    instead."""
    rank_timeout: float = Field(default=600.0, gt=0)
    """Seconds for which a process waits for another process in a train step before it gives up; the trainer then
    restarts from its last checkpoint. The end of a process is noticed at once."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak floating point operations per second of the device in ``model.dtype``, in units of 10^12, from its data
    sheet (H100, bfloat16: 989), for the metric ``perf/mfu``. None: no such metric."""
    batches_per_step: int = Field(default=1, ge=1)
    """Number of batches in one train step. Each batch counts as progress, and the last step of a run takes the
    remaining batches. Under ``fixed`` the number must divide ``synchronizer.sync_interval``. Under the other styles it
    is at most ``pipeline_depth + 1``, so that explorer and trainer do not wait for each other."""
    guard: GuardConfig = Field(default_factory=GuardConfig)
    """Limits beyond which an optimizer step is skipped."""

    def recomputes(self, device: str) -> bool:
        """Return whether gradient checkpointing is enabled on ``device``, which is ``cpu`` or ``cuda``."""
        return device == "cuda" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing

    @property
    def first_max_tokens(self) -> int:
        """``max_tokens_per_micro_batch`` until the trainer has chosen a value for its GPU."""
        setting = self.max_tokens_per_micro_batch
        return AUTO_TOKENS if setting == "auto" else setting


class TrackerConfig(Section):
    """A service that collects the metrics of runs. Its own environment variables and configuration set keys and
    servers, such as ``WANDB_API_KEY`` and ``MLFLOW_TRACKING_URI``.
    """

    kind: Literal["wandb", "mlflow", "swanlab"]
    """``wandb``: Weights & Biases (extra ``wandb``). ``mlflow``: MLflow (extra ``mlflow``). ``swanlab``: SwanLab
    (extra ``swanlab``)."""
    project: str = "trinity-mq"
    """Project, or MLflow experiment, that contains the run under its ``name``."""
    group: str = ""
    """wandb, swanlab: group of related runs."""
    offline: bool = False
    """wandb, swanlab: write into the run's folder, for a later ``wandb sync`` or ``swanlab sync``."""


class OtlpConfig(Section):
    """A collector that receives the spans of each batch by OTLP over HTTP. A separate process next to the agents sends
    them.
    """

    endpoint: str = Field(pattern=r"^https?://")
    """Base URL of the collector, such as ``http://localhost:4318``. ``/v1/traces`` is appended unless the URL ends with
    it."""
    headers_env: str = "OTEL_EXPORTER_OTLP_HEADERS"
    """Name of the environment variable with request headers, as ``name=value,name=value`` with special characters
    percent-encoded, such as ``Authorization=Basic%20dXNlcjpwYXNz``. If the variable is not set, no headers are sent."""
    sample: float = Field(default=1.0, ge=0, le=1)
    """Share of the batches whose spans are exported. A batch is exported completely or not at all."""
    timeout: float = Field(default=10.0, gt=0)
    """Seconds for the collector to answer a request."""
    flush_timeout: float = Field(default=20.0, gt=0)
    """Seconds at the end of a run for sending the remaining spans. ``trinity-mq track`` can send the rest later."""


class MonitorConfig(Section):
    """Metrics and logs."""

    tensorboard: bool = True
    """Also write the metrics for TensorBoard."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Services to which ``trinity-mq run`` sends all metrics. ``trinity-mq track`` sends the metrics of a run later."""
    detailed_stats: bool = False
    """Evaluations: report ``/mean``, ``/max``, ``/min`` and ``/std`` of every metric over the tasks of a set, instead
    of only the mean."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written to the log files."""
    samples_per_step: int = Field(default=16, ge=0)
    """Approximate number of experiences of each batch that are kept in the run's folder ``samples`` when the batch was
    trained on, as whole groups, so that ``trinity-mq dash`` can show them without the broker. 0: none."""
    samples_max_bytes: int = Field(default=64 * 1024**2, ge=1024**2)
    """Maximum bytes of all kept samples. The oldest samples are deleted first."""
    eval_answers_max_bytes: int = Field(default=32 * 1024**2, ge=0)
    """Maximum bytes of evaluation answers, by question, in the run's folder ``evaluations``, for ``trinity-mq dash``
    and ``trinity-mq inspect --evaluation``. The oldest answers are deleted first. 0: no answers are kept."""
    log_max_bytes: int = Field(default=64 * 1024**2, ge=1024**2)
    """Bytes at which the log of an agent is rotated. The previous file is kept as ``<agent>.1.jsonl``."""
    trace: bool = False
    """Write spans of the work of every process on each batch into ``trace/`` of the run's folder: about 50 kB for a
    batch of 32 tasks. ``trinity-mq timeline RUN --batch N`` shows them."""
    otlp: OtlpConfig | None = None
    """Export the spans of each batch to an OpenTelemetry collector (extra ``otel``). ``trace/`` then holds the spans of
    exported batches even if ``trace`` is off. None: no export."""

    @property
    def traced(self) -> bool:
        """Whether processes write their spans."""
        return self.trace or self.otlp is not None

    @property
    def sample(self) -> float:
        """Share of the batches that are sampled for the export: ``otlp.sample``, or 1 without an export."""
        return 1.0 if self.otlp is None else self.otlp.sample

    @model_validator(mode="after")
    def _trackers(self) -> MonitorConfig:
        kinds = [tracker.kind for tracker in self.trackers]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"monitor.trackers are {', '.join(kinds)}, wanted each kind once")
        return self


class SupervisorConfig(Section):
    """Restarts of the processes of ``trinity-mq run``."""

    max_restarts: int = Field(default=10, ge=0)
    """Maximum number of restarts of one process within ``restart_window``. After that the run fails."""
    restart_window: float = Field(default=600.0, gt=0)
    """Seconds over which restarts are counted."""
    grace: float = Field(default=30.0, gt=0)
    """Seconds that a process has to drain before it is killed."""
    fork: bool = True
    """Fork agents and engines from one process that has already imported their modules (Linux): a run starts sooner and
    takes less memory. ``false``: start each with its command line, for libraries that do not work after a fork."""
