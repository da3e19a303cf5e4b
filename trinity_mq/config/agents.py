"""The sections of the four agents."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from trinity_mq.config.algorithm import OperatorConfig
from trinity_mq.config.base import Section, Threads
from trinity_mq.config.engines import AuxiliaryModelConfig
from trinity_mq.config.vllm import VllmConfig

REVIEW_SECONDS = 300.0
"""Seconds for which the operator ``human_review`` waits unless its arguments say otherwise."""
REVIEW_MARGIN = 15.0
"""Seconds beyond them that an operator of people's verdicts needs: what counted is written down."""

ConcurrentMode = Literal["sequential", "asynchronous", "multi-threading"]


class RolloutModelConfig(Section):
    """The rollout engine and the sampling parameters of training rollouts."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """``transformers``: our own server, torch only. ``vllm``: vLLM's server, with the settings in ``vllm``."""
    engine_num: int = Field(default=1, ge=1)
    """Engines that the explorer hosts, and each ``trinity-mq explorer --engines-only`` beside it; a process each."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of training rollouts; below 1 only with ``algorithm.allow_truncated_sampling``."""
    num_threads: Threads = "auto"
    """CPU threads of the engine's torch. ``auto``: its share of the cores, which the trainer's processes and all
    engines of the run divide among themselves."""
    max_batch_sequences: int = Field(default=1024, ge=1)
    """Most sequences generated at once; further requests wait for the next static batch."""
    max_batch_delay: float = Field(default=0.005, ge=0)
    """Seconds for which the engine collects concurrent requests before a static batch starts."""
    lease: float = Field(default=60.0, ge=5)
    """Seconds that an engine outlives its host: long enough for a restart of the host."""
    host: str = "127.0.0.1"
    """Address on which engines listen and at which runners ask them: for runners on other machines an address of this
    machine that they can reach."""
    enable_history: bool = False
    """Record the model calls of a workflow as experiences; workflows that ask through ``client`` need it."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of the engine ``vllm``."""

    @model_validator(mode="before")
    @classmethod
    def _takes_weights(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("engine") == "external":
            raise ValueError(
                "engine is 'external', but a server elsewhere takes no weights from the trainer, so it cannot be the "
                "policy. Name it in explorer.auxiliary_models: there workflows may ask it, and it answers evaluation "
                "tasksets with rollout_args: {model: <its name>}"
            )
        return data


class DynamicTimeoutConfig(Section):
    """A time limit of slices that follows their mean duration."""

    enable: bool = False
    """Use the limit."""
    ratio: float = Field(default=3.0, gt=1)
    """The limit as a multiple of the mean duration of a slice; the configured limits still hold."""
    warmup_min_steps: int = Field(default=1, ge=1)
    """Training batches that are complete before the limit is used."""


class OverRolloutConfig(Section):
    """Closing a batch without its slowest tasks."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of a batch's tasks that may be cut off. 0: the batch waits for all."""
    wait_after_min: float = Field(default=30.0, ge=0)
    """Seconds left to the other tasks once enough tasks are done."""
    return_partial_tasks: bool = False
    """Keep the finished runs of tasks that were cut off; otherwise such tasks count as not run."""


class RefillConfig(Section):
    """Further tasks in place of the groups that operators drop (dynamic sampling)."""

    max: float = Field(default=0.0, ge=0, le=100)
    """Most such tasks in one batch, as a multiple of ``buffer.batch_size``, rounded up. Where operators drop a share p
    of all groups, p / (1 - p) keeps up the number of groups that are trained on. 0: dropped groups are not replaced."""


class ExplorerConfig(Section):
    """Scheduling of tasks, evaluation, and the engines that the explorer hosts."""

    eval_interval: int = Field(default=100, ge=1)
    """Batches between evaluations."""
    eval_on_startup: bool = True
    """Evaluate before the first batch."""
    max_timeout: float = Field(default=360.0, gt=0)
    """Seconds for one attempt of one run; hours where ``batch_timeout`` and ``stall_timeout`` allow it."""
    max_retry_times: int = Field(default=2, ge=0)
    """Further attempts of a failed run."""
    max_repeat_times_per_runner: int | None = Field(default=None, ge=1)
    """Most runs in one slice. None: all runs of a task, so that one request asks for all of them."""
    batch_timeout: float = Field(default=3600.0, gt=0)
    """Seconds for a batch, counted only while a runner and an engine live."""
    eval_timeout: float = Field(default=1800.0, gt=0)
    """Seconds for an evaluation."""
    operator_deadline: float = Field(default=60.0, gt=0)
    """Seconds for which an operator is idle though a closed batch waits, until its manifest is published again; without
    an operator, or while all are at work, batches wait."""
    batch_tries: int = Field(default=3, ge=1)
    """Publishes of one manifest before the batch is reported as failed."""
    max_open_batches: int = Field(default=8, ge=1)
    """Most batches open at a time."""
    max_consecutive_empty: int = Field(default=3, ge=1)
    """Consecutive empty batches that end the run with an error."""
    stall_timeout: float = Field(default=7200.0, gt=0)
    """Seconds without any progress after which the run ends with an error, its state saved."""
    unfinished: Literal["requeue", "drop"] = "requeue"
    """Tasks without a finished run when their batch closes: ``requeue`` them once, or ``drop`` them."""
    dynamic_timeout: DynamicTimeoutConfig = Field(default_factory=DynamicTimeoutConfig)
    """A time limit of slices that follows their mean duration."""
    over_rollout: OverRolloutConfig = Field(default_factory=OverRolloutConfig)
    """Closing a batch without its slowest tasks."""
    refill: RefillConfig = Field(default_factory=RefillConfig)
    """Further tasks in place of the groups that operators drop (dynamic sampling)."""
    cancel_grace: float = Field(default=2.0, ge=0)
    """Seconds after a cut-off in which finished runs still arrive, where partial results are kept."""
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
        """Seconds that a runner has for a slice, retries included."""
        return self.max_timeout * (self.max_retry_times + 1)


class CircuitBreakerConfig(Section):
    """Pausing a lane (training or evaluation) while what its slices need beside the model is away: a sandbox, a tool, a
    provider, the environment. A slice none of whose runs finished for such a reason goes back to its queue and is tried
    again, by any runner. It fails for good when other slices have gone well between its tries twice, or at ``tries``.
    """

    enable: bool = True
    """``false``: such slices fail at once, and nothing is paused."""
    failures: int = Field(default=8, ge=1)
    """Tries of slices of a lane that failed in a row in one runner, all for such a reason, after which it pauses the
    lane; 3 where it is one slice that fails again and again. One finished run, or a failure of the task or of its
    workflow, begins a new row."""
    pause: float = Field(default=5.0, gt=0)
    """Seconds of the first pause. Then one slice is tried: if one of its runs finishes, the pause is over; if it fails
    for such a reason too, the next pause is twice as long."""
    max_pause: float = Field(default=300.0, gt=0)
    """Seconds of the longest pause. While all runners pause a lane, the time of its batches and evaluations stands
    still, and ``explorer.stall_timeout`` ends the run."""
    tries: int = Field(default=16, ge=1)
    """Most tries of one slice that fail for such a reason, on all runners together."""
    tries_alone: int = Field(default=8, ge=1)
    """The same where no other slice of the lane fails meanwhile, so that the fault may be the slice's own. With these
    pauses 8 tries take about three minutes, for which a bad task can hold up its batch."""

    @model_validator(mode="after")
    def _pauses(self) -> CircuitBreakerConfig:
        if self.pause > self.max_pause:
            raise ValueError(
                f"pause is {self.pause:g} s, max_pause {self.max_pause:g} s: pauses grow, raise max_pause to at least "
                f"{self.pause:g} or lower pause"
            )
        return self


class RunnerConfig(Section):
    """Runners: processes that run the slices of tasks."""

    num_runners: int = Field(default=2, ge=1)
    """Runner processes that ``trinity-mq run`` starts."""
    concurrency: int = Field(default=16, ge=1)
    """Training slices in flight in one runner: its prefetch."""
    eval_concurrency: int | None = Field(default=None, ge=1)
    """Evaluation slices in flight in one runner, in addition to those of training. None: as ``concurrency``."""
    concurrent_mode: ConcurrentMode = "asynchronous"
    """Execution of the runs of a slice where an instance of a workflow does one run. ``sequential``: one after the
    other, by one instance if the workflow can be reset, which the runner keeps for later slices (not those that have a
    process of their own). ``asynchronous``: concurrently, each by an instance of its own.
    ``multi-threading``: the same, and each asynchronous workflow in a thread with an event loop and connections of its
    own."""
    blocking: Literal["thread", "process"] = "thread"
    """Place of synchronous workflows. ``thread``: in the runner; one that never returns is abandoned, and its thread
    runs on. ``process``: a process for each slice, killed when its time is over."""
    max_stuck: int = Field(default=16, ge=0)
    """Abandoned workflows that may still run; with more, the runner requeues its slices and is restarted."""
    max_block: float = Field(default=30.0, gt=0)
    """Seconds for which a workflow may block the event loop; beyond, the runner ends its process."""
    recycle_after: int | None = Field(default=None, ge=1)
    """Slices after which a runner is restarted, so that leaks of workflows do not add up. None: never."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the runners, set before any workflow is imported."""
    memory_limit: int | None = Field(default=None, ge=2**20)
    """Bytes that the process of a slice may allocate beyond those at its start. None: no limit."""
    max_isolated: int = Field(default=2, ge=1)
    """Most redelivered slices that run in child processes at a time."""
    circuit_breaker: CircuitBreakerConfig = Field(default_factory=CircuitBreakerConfig)
    """Pausing a lane while its sandbox or a service that it needs is away."""
    drain_timeout: float = Field(default=20.0, gt=0)
    """Seconds in which a draining runner finishes its slices before it requeues them."""

    @property
    def eval_slots(self) -> int:
        """``eval_concurrency`` with its default filled in."""
        return self.concurrency if self.eval_concurrency is None else self.eval_concurrency


class OperatorsConfig(Section):
    """Operators: processes that run a chain of operators on each batch."""

    num_operators: int = Field(default=1, ge=1)
    """Operator processes that ``trinity-mq run`` starts."""
    operators: tuple[OperatorConfig, ...] = ()
    """The chain, which runs before the algorithm's advantage function."""
    timeout: float = Field(default=800.0, gt=0)
    """Seconds for the chain on one batch. The waits of ``human_review`` are part of it: with several in the chain their
    sum."""

    @property
    def review_seconds(self) -> float:
        """Longest time that a batch waits for people: the sum over the ``human_review`` operators of the chain."""
        waits = [one.args.get("seconds", REVIEW_SECONDS) for one in self.operators if _asks_people(one)]
        return float(sum(wait + REVIEW_MARGIN for wait in waits if isinstance(wait, int | float)))

    @model_validator(mode="after")
    def _reviews(self) -> OperatorsConfig:
        if (waits := self.review_seconds) >= self.timeout:
            raise ValueError(
                f"human_review may wait {waits:g} s for people (seconds, and {REVIEW_MARGIN:g} s to write down what "
                f"counted, each), and operator.timeout is {self.timeout:g} s for the whole chain: raise that, and "
                "broker.consumer_timeout with it where that is asked for, or lower seconds. An operator process does "
                "nothing else meanwhile: operator.num_operators says how many batches may wait at a time"
            )
        return self


def _asks_people(operator: OperatorConfig) -> bool:
    return operator.name == "human_review" or operator.name.endswith(".HumanReview")


class GuardConfig(Section):
    """Optimizer steps of the policy that the trainer skips, and when it stops. A step whose loss or gradient norm is
    not finite is always skipped. Skipped steps leave weights and optimizer as they were.
    """

    max_norm_ratio: float | None = Field(default=None, gt=1)
    """Largest gradient norm, before clipping, as a multiple of the usual one; a step beyond is skipped. Usual is the
    median of the last 100 applied steps, of which there have to be 20. 10 leaves out what is far from it. None: no
    limit."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Largest ``mismatch/k3`` of the first optimizer step of a batch, in nats: how far the logprobs of engine and
    trainer are apart under the same weights; a step beyond is skipped. None: no limit."""
    max_consecutive_skips: int | None = Field(default=5, ge=1)
    """Optimizer steps skipped in a row at which the trainer stops, with an error. The batch of the last one is not
    counted: a trainer started after that trains on it first. None: never."""


class TrainerConfig(Section):
    """The trainer, which steps the optimizer."""

    save_interval: int = Field(default=50, ge=1)
    """Batches between checkpoints."""
    max_checkpoints_to_keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept; older ones are deleted, unless ``keep_every`` keeps them."""
    keep_every: int | None = Field(default=None, ge=1)
    """Batches between checkpoints that stay for good: one is saved whenever a multiple of so many batches is reached.
    None: none stays."""
    async_save: bool = True
    """Write checkpoints while training goes on: it waits only until weights and optimizer state are copied in host
    memory, where that copy stays for the next checkpoint. Otherwise it waits until they are written."""
    export: Literal["every", "last"] = "every"
    """Places where the model is written for ``transformers``: as ``model/`` in ``every`` checkpoint and at the end as
    ``final/``, or only as ``final/``, which saves a quarter of a checkpoint's bytes."""
    max_tokens_per_micro_batch: int = Field(default=16384, ge=1)
    """Most tokens in one forward and backward pass, padding included; a longer sequence has a pass of its own."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """Sequences of a pass. ``padded``: a row each, filled up to the longest. ``packed``: one after the other in one
    row, without padding; refused for models whose layers would mix them (Mamba, linear attention and the like). On a
    CPU that takes a mask of tokens x tokens. ``auto``: packed where model and device have an attention for it (CUDA
    with flash attention and ``model.dtype: bfloat16``, or with flex attention), padded elsewhere."""
    share_prefixes: bool = True
    """Compute what the sequences of a pass begin with, such as the prompt of a group of answers, once for all of them,
    where that saves a tenth of the positions. In padded rows of a single process without gradient checkpointing, for
    models in which every layer attends to all tokens before; the numbers are equal but for rounding."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, which computes the rest of the layer anew: less memory,
    about a third more time."""
    num_threads: Threads = "auto"
    """CPU threads of the trainer's torch, in each of its processes. ``auto``: their share of the cores, which the
    trainer's processes and all engines of the run divide among themselves."""
    nproc: int = Field(default=1, ge=1)
    """Processes that share a train step, each with a part of the model (FSDP2) and, where there are GPUs, a GPU of its
    own. The trainer starts them on its machine; under ``torchrun`` those that it has started count instead."""
    rank_timeout: float = Field(default=600.0, gt=0)
    """Seconds after which a process that waits for another in a train step gives up; the trainer then begins anew from
    its last checkpoint. One that ends is noticed at once."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Most floating point operations a second of the device in ``model.dtype``, in units of 10^12, as its data sheet
    says (H100, bfloat16: 989), for the metric ``perf/mfu``. None: no such metric."""
    batches_per_step: int = Field(default=1, ge=1)
    """Batches in one train step. Each counts as progress; the last step of a run takes the remaining ones. Under
    ``fixed`` it must divide ``synchronizer.sync_interval``; otherwise it is at most ``pipeline_depth + 1``, so that
    explorer and trainer do not wait for each other."""
    guard: GuardConfig = Field(default_factory=GuardConfig)
    """Optimizer steps that are skipped."""


class TrackerConfig(Section):
    """A service that collects the metrics of runs. Keys and servers are what its own environment variables and
    configuration say, such as ``WANDB_API_KEY`` and ``MLFLOW_TRACKING_URI``.
    """

    kind: Literal["wandb", "mlflow", "swanlab"]
    """``wandb``: Weights & Biases (extra ``wandb``). ``mlflow``: MLflow (extra ``mlflow``). ``swanlab``: SwanLab
    (extra ``swanlab``)."""
    project: str = "trinity-mq"
    """Project, or experiment of MLflow, in which the run appears by its ``name``."""
    group: str = ""
    """wandb, swanlab: group of runs that belong together."""
    offline: bool = False
    """wandb, swanlab: write into the run's folder, for ``wandb sync`` or ``swanlab sync`` later."""


class OtlpConfig(Section):
    """A collector that takes the spans of each batch by OTLP over HTTP. One process beside the agents sends them."""

    endpoint: str = Field(pattern=r"^https?://")
    """Its base URL, such as ``http://localhost:4318``; ``/v1/traces`` is added where it does not end with that."""
    headers_env: str = "OTEL_EXPORTER_OTLP_HEADERS"
    """Environment variable with headers for it, as ``name=value,name=value`` with what is special percent-encoded, such
    as ``Authorization=Basic%20dXNlcjpwYXNz``. Where it is not set, none are sent."""
    sample: float = Field(default=1.0, ge=0, le=1)
    """Share of the batches that are exported, each whole or not at all."""
    timeout: float = Field(default=10.0, gt=0)
    """Seconds in which the collector must answer a request."""
    flush_timeout: float = Field(default=20.0, gt=0)
    """Seconds at the end of a run in which what is left may be sent; ``trinity-mq track`` sends the rest later."""


class MonitorConfig(Section):
    """Metrics and logs."""

    tensorboard: bool = True
    """Write the metrics for TensorBoard too."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Services to which ``trinity-mq run`` sends all metrics; ``trinity-mq track`` sends those of a run later."""
    detailed_stats: bool = False
    """Evaluations: ``/mean``, ``/max``, ``/min`` and ``/std`` over the tasks of a set for every metric, instead of the
    mean alone."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level written to the log files."""
    samples_per_step: int = Field(default=16, ge=0)
    """Experiences of each train step that are kept in the folder ``samples`` of the run, as whole groups, so that
    ``trinity-mq dash`` shows them without the broker; 0: none."""
    samples_max_bytes: int = Field(default=64 * 1024**2, ge=1024**2)
    """Bytes of all of these; the oldest go first."""
    eval_answers_max_bytes: int = Field(default=32 * 1024**2, ge=0)
    """Bytes of the answers to evaluations that are kept in the folder ``evaluations`` of the run, by question, for
    ``trinity-mq dash`` and ``trinity-mq inspect --evaluation``; the oldest go first; 0: none are kept."""
    log_max_bytes: int = Field(default=64 * 1024**2, ge=1024**2)
    """Size at which the log of an agent is begun anew; the file before that is kept as ``<agent>.1.jsonl``."""
    trace: bool = False
    """Write what every process does for each batch, and when, into ``trace/`` of the run's folder: about 50 kB a
    batch of 32 tasks. ``trinity-mq timeline RUN --batch N`` shows it."""
    otlp: OtlpConfig | None = None
    """Export the spans of each batch to a collector of OpenTelemetry (extra ``otel``). ``trace/`` has those of exported
    batches then, even where ``trace`` is off. None: no."""

    @property
    def traced(self) -> bool:
        """Whether processes write their spans."""
        return self.trace or self.otlp is not None

    @property
    def sample(self) -> float:
        """The share of the batches whose traces are exported, where they are."""
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
    """Restarts of one process within ``restart_window`` before the run fails for good."""
    restart_window: float = Field(default=600.0, gt=0)
    """Seconds in which restarts are counted."""
    grace: float = Field(default=30.0, gt=0)
    """Seconds in which a process drains before it is killed."""
    fork: bool = True
    """Agents and engines are forked from one process that has imported what they need (Linux): a run starts sooner and
    takes less memory. ``false`` starts each with its command line, which a library may need that cannot be forked."""
