"""The buffer section: which tasks, how many a batch, for how long."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from trinity_mq.config.base import Section


class FormatConfig(Section):
    """Where a record keeps its parts."""

    prompt_key: str = "question"
    response_key: str = "answer"
    system_prompt: str | None = None


class TasksetConfig(Section):
    """A source of tasks.

    ``file``: JSON lines at ``path``. ``huggingface``: a dataset folder or hub id at ``path`` (extra ``datasets``).
    ``synthetic``:
    problems made here from ``path`` (its name, such as ``ops3``) without any file. ``queue``: tasks submitted from
    outside.
    """

    name: str = "train"
    storage_type: Literal["file", "huggingface", "synthetic", "queue"] = "file"
    path: str = ""
    subset_name: str | None = None
    split: str = "train"
    limit: int | None = Field(default=None, ge=1)
    """At most so many records."""
    selector: Literal["sequential", "shuffle"] = "shuffle"
    format: FormatConfig = Field(default_factory=FormatConfig)
    workflow: str = "async_simple_workflow"
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    reward_fn: str = ""
    """Registered name or dotted path; empty means the workflow's own."""
    reward_fn_args: dict[str, Any] = Field(default_factory=dict)
    rollout_args: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters over those of ``explorer.rollout_model``."""
    repeat_times: int = Field(default=1, ge=1)
    """Evaluation tasksets only: samples a task; training uses ``algorithm.repeat_times``."""

    @model_validator(mode="after")
    def _path(self) -> TasksetConfig:
        if self.storage_type != "queue" and not self.path:
            raise ValueError(f"taskset {self.name!r} of storage_type {self.storage_type!r} needs a path")
        return self


class BufferConfig(Section):
    """Batches and epochs."""

    batch_size: int = Field(default=32, ge=1)
    """Tasks a batch."""
    total_steps: int | None = Field(default=None, ge=1)
    """Batches of the run. None: ``total_epochs`` over the taskset."""
    total_epochs: int = Field(default=1, ge=1)
    taskset: TasksetConfig = Field(default_factory=lambda: TasksetConfig(storage_type="queue"))
    eval_tasksets: tuple[TasksetConfig, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> BufferConfig:
        names = [taskset.name for taskset in self.eval_tasksets]
        if len(set(names)) != len(names):
            raise ValueError(f"eval_tasksets need different names, got {names}")
        for taskset in self.eval_tasksets:
            if taskset.storage_type == "queue":
                raise ValueError(f"eval taskset {taskset.name!r} cannot be a queue: an evaluation needs a known set")
        return self
