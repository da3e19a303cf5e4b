"""Batches, tasksets and length of a run."""

from __future__ import annotations

from pydantic import Field, model_validator

from trinity_mq.config.base import Section
from trinity_mq.config.buffer.explorer_output import ExplorerOutputConfig
from trinity_mq.config.buffer.taskset import TasksetConfig
from trinity_mq.config.buffer.trainer_input import TrainerInputConfig


class BufferConfig(Section):
    """Batches and epochs."""

    batch_size: int = Field(default=32, ge=1)
    """Tasks in a batch; in mode ``train`` records."""
    total_steps: int | None = Field(default=None, ge=1)
    """Batches of the run. None: ``total_epochs`` over the taskset."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the taskset, in mode ``train`` over the data, unless ``total_steps`` is given."""
    taskset: TasksetConfig = Field(default_factory=lambda: TasksetConfig(storage_type="queue"))
    """Source of the training tasks."""
    trainer_input: TrainerInputConfig = Field(default_factory=TrainerInputConfig)
    """What the trainer trains on: rollouts, or data that are there."""
    explorer_output: ExplorerOutputConfig = Field(default_factory=ExplorerOutputConfig)
    """Where mode ``explore`` writes experiences."""
    eval_tasksets: tuple[TasksetConfig, ...] = ()
    """Sources of the evaluation tasks, each reported by its name."""

    @model_validator(mode="after")
    def _names(self) -> BufferConfig:
        names = [taskset.name for taskset in self.eval_tasksets]
        if len(set(names)) != len(names):
            raise ValueError(f"eval_tasksets need different names, got {names}")
        for taskset in self.eval_tasksets:
            if taskset.storage_type == "queue":
                raise ValueError(f"eval taskset {taskset.name!r} cannot be a queue: an evaluation needs a known set")
        return self
