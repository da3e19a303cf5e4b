"""The sections of the four agents."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from trinity_mq.config.algorithm import OperatorConfig
from trinity_mq.config.base import Section
from trinity_mq.config.engines import AuxiliaryModelConfig
from trinity_mq.config.vllm import VllmConfig

ConcurrentMode = Literal["sequential", "asynchronous", "multi-threading"]


class RolloutModelConfig(Section):
    """The engine that samples, and the sampling parameters of training rollouts."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """``transformers``: a process of ours, torch only. ``vllm``: vLLM's server, with the section ``vllm`` here."""
    engine_num: int = Field(default=1, ge=1)
    """Engines that the explorer hosts, and each ``trinity-mq explorer --engines-only`` beside it; a process each."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the engine's torch."""
    max_batch_sequences: int = Field(default=1024, ge=1)
    """Sequences generated at once; requests beyond wait for the next round."""
    max_batch_delay: float = Field(default=0.005, ge=0)
    """Seconds the engine gathers concurrent requests before a round starts."""
    lease: float = Field(default=60.0, ge=5)
    """Seconds an engine outlives a host that is gone: long enough for the host's restart."""
    host: str = "127.0.0.1"
    """Where engines listen, and the address at which runners ask them: for runners on other machines one of this
    machine's that they can reach."""
    enable_history: bool = False
    vllm: VllmConfig = Field(default_factory=VllmConfig)

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
    """A limit for slices that follows what slices take."""

    enable: bool = False
    ratio: float = Field(default=3.0, gt=1)
    """Times the mean seconds of a slice; never more than the limits that are set."""
    warmup_min_steps: int = Field(default=1, ge=1)
    """Training batches complete before it is used."""


class OverRolloutConfig(Section):
    """Closing a batch without its slowest tasks."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of a batch's tasks that need not be done. 0: all are waited for."""
    wait_after_min: float = Field(default=30.0, ge=0)
    """Seconds that the rest still has once enough tasks are done."""
    return_partial_tasks: bool = False
    """Finished runs of tasks that were cut off count; else such tasks are as if they had not been run."""


class ExplorerConfig(Section):
    """Tasks out, outcomes in, engines hosted."""

    eval_interval: int = Field(default=100, ge=1)
    """Batches between evaluations."""
    eval_on_startup: bool = True
    max_timeout: float = Field(default=500.0, gt=0)
    """Seconds for one attempt of one run."""
    max_retry_times: int = Field(default=2, ge=0)
    max_repeat_times_per_runner: int | None = Field(default=None, ge=1)
    """Runs in one slice. None: all runs of a task in one, so that one request asks for all of them."""
    batch_timeout: float = Field(default=3600.0, gt=0)
    """Seconds for a batch; the clock runs only while a runner and an engine live."""
    eval_timeout: float = Field(default=1800.0, gt=0)
    operator_deadline: float = Field(default=60.0, gt=0)
    """Seconds without progress and without an operator at work until a manifest is published again."""
    batch_tries: int = Field(default=3, ge=1)
    """Publishes of one manifest before it is given up with a tombstone."""
    max_open_batches: int = Field(default=8, ge=1)
    max_consecutive_empty: int = Field(default=3, ge=1)
    """Empty batches in a row that end the run with an error."""
    stall_timeout: float = Field(default=7200.0, gt=0)
    """Seconds of holding after which the run ends with an error, its state saved."""
    unfinished: Literal["requeue", "drop"] = "requeue"
    """Tasks without a finished run when their batch closes: give them back once, or drop them."""
    dynamic_timeout: DynamicTimeoutConfig = Field(default_factory=DynamicTimeoutConfig)
    over_rollout: OverRolloutConfig = Field(default_factory=OverRolloutConfig)
    cancel_grace: float = Field(default=2.0, ge=0)
    """Seconds in which finished runs of slices that were cut off still count, where they are to be kept."""
    rollout_model: RolloutModelConfig = Field(default_factory=RolloutModelConfig)
    auxiliary_models: tuple[AuxiliaryModelConfig, ...] = ()
    """Models that workflows get as ``auxiliary_models``, in this order, and operators by name."""

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
        """Seconds a runner has for a slice, retries included."""
        return self.max_timeout * (self.max_retry_times + 1)


class RunnerConfig(Section):
    """Who does the slices."""

    num_runners: int = Field(default=2, ge=1)
    """Runner processes that ``trinity-mq run`` starts."""
    concurrency: int = Field(default=16, ge=1)
    """Slices of training one runner works on at a time; its prefetch."""
    eval_concurrency: int | None = Field(default=None, ge=1)
    """Slices of evaluations one runner works on at a time, beside those of training. None: as many."""
    concurrent_mode: ConcurrentMode = "asynchronous"
    """How the runs of a slice are done where a workflow does one at a time. ``sequential``: one after the other, by one
    instance if the workflow can be reset. ``asynchronous``: all at once, each by an instance of its own.
    ``multi-threading``: the same, asynchronous workflows too each in a thread, on an event loop and connections of its
    own."""
    blocking: Literal["thread", "process"] = "thread"
    """Where synchronous workflows run. ``thread``: in the runner; one that never returns is given up, but its thread
    cannot be ended from outside. ``process``: in a process for each slice, killed when its time is over."""
    max_stuck: int = Field(default=16, ge=0)
    """Workflows given up that run on all the same, beyond which the runner gives back what it holds and is started
    again."""
    max_block: float = Field(default=30.0, gt=0)
    """Seconds a workflow may hold the event loop; a runner that stands still for longer ends its process."""
    recycle_after: int | None = Field(default=None, ge=1)
    """Slices after which a runner is started again, so that what workflows leak does not add up. None: never."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the runners, set before any workflow is imported."""
    memory_limit: int | None = Field(default=None, ge=2**20)
    """Bytes that the process of a slice may allocate beyond what it starts with. None: no limit."""
    max_isolated: int = Field(default=2, ge=1)
    """Redelivered slices that run in child processes at a time."""
    drain_timeout: float = Field(default=20.0, gt=0)
    """Seconds a draining runner has to finish before it gives slices back."""

    @property
    def eval_slots(self) -> int:
        """``eval_concurrency`` with its default filled in."""
        return self.concurrency if self.eval_concurrency is None else self.eval_concurrency


class OperatorsConfig(Section):
    """Who processes batches, and with what chain."""

    num_operators: int = Field(default=1, ge=1)
    operators: tuple[OperatorConfig, ...] = ()
    """The chain, before the algorithm's advantage function."""
    timeout: float = Field(default=1200.0, gt=0)
    """Seconds for the chain on one batch; below the broker's limit for holding a delivery."""


class TrainerConfig(Section):
    """Who steps the optimizer."""

    save_interval: int = Field(default=50, ge=1)
    """Batches between checkpoints."""
    max_checkpoints_to_keep: int = Field(default=2, ge=1)
    max_tokens_per_micro_batch: int = Field(default=16384, ge=1)
    """Padded tokens in one forward and backward pass; a longer single sequence is a pass of its own."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer's torch."""
    batches_per_step: int = Field(default=1, ge=1)
    """Batches that make a train step together. Each of them counts as progress; the last step of a run takes what is
    left. Under ``fixed`` it divides ``synchronizer.sync_interval``, else it is at most ``pipeline_depth + 1``: the
    explorer would wait for the trainer, and the trainer for the explorer."""


class MonitorConfig(Section):
    """What is written down."""

    tensorboard: bool = True
    detailed_stats: bool = False
    """Evaluations: ``/mean``, ``/max``, ``/min`` and ``/std`` over the tasks of a set for every metric, instead of the
    mean alone."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class SupervisorConfig(Section):
    """How ``trinity-mq run`` keeps its processes alive."""

    max_restarts: int = Field(default=10, ge=0)
    """Restarts of one process within ``restart_window`` before the run fails for good."""
    restart_window: float = Field(default=600.0, gt=0)
    grace: float = Field(default=30.0, gt=0)
    """Seconds a process has to drain before it is killed."""
