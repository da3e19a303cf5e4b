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
    """Number of tasks in a batch; in mode ``train`` the number of records."""
    total_steps: int | None = Field(default=None, ge=1)
    """Number of batches of the run. None: ``total_epochs`` over the taskset."""
    total_epochs: int = Field(default=1, ge=1)
    """Number of passes over the taskset (in mode ``train``: over the data). Ignored if ``total_steps`` is given."""
    taskset: TasksetConfig = Field(default_factory=lambda: TasksetConfig(storage_type="queue"))
    """Source of the training tasks."""
    tasksets: tuple[TasksetConfig, ...] = ()
    """Several sources of training tasks, instead of ``taskset``: interleaved by ``ratio``, or in proportion to their
    size."""
    trainer_input: TrainerInputConfig = Field(default_factory=TrainerInputConfig)
    """The data that the trainer trains on: rollouts, or existing records."""
    explorer_output: ExplorerOutputConfig = Field(default_factory=ExplorerOutputConfig)
    """Output of mode ``explore``."""
    eval_tasksets: tuple[TasksetConfig, ...] = ()
    """Sources of the evaluation tasks. Each is reported under its name."""

    @property
    def training_tasksets(self) -> tuple[TasksetConfig, ...]:
        """The sources of training tasks. Submitted tasks take missing settings from the first source."""
        return self.tasksets or (self.taskset,)

    @model_validator(mode="after")
    def _training(self) -> BufferConfig:
        names = [taskset.name for taskset in self.tasksets]
        if names and self.taskset != type(self).model_fields["taskset"].get_default(call_default_factory=True):
            raise ValueError("buffer.taskset and buffer.tasksets are both given; remove one of them")
        if len(set(names)) != len(names):
            raise ValueError(f"buffer.tasksets need different names, got {names}")
        if queues := [taskset.name for taskset in self.tasksets if not taskset.storage.holds_records]:
            raise ValueError(
                f"buffer.tasksets: {', '.join(queues)} of storage_type queue hold no tasks to interleave; remove them. "
                "Submitted tasks come into the next batches anyway"
            )
        has_ratio = [taskset.ratio is not None for taskset in self.tasksets]
        if any(has_ratio) and not all(has_ratio):
            raise ValueError("buffer.tasksets: only some have a ratio; give a ratio to all of them or to none")
        if self.taskset.ratio is not None:
            raise ValueError("buffer.taskset.ratio has no meaning with a single taskset; remove it")
        for taskset in self.eval_tasksets:
            if taskset.data_selector is not None or taskset.ratio is not None:
                raise ValueError(
                    f"eval taskset {taskset.name!r}: every task is run once, in order; remove data_selector and ratio"
                )
        return self

    @model_validator(mode="after")
    def _names(self) -> BufferConfig:
        names = [taskset.name for taskset in self.eval_tasksets]
        if len(set(names)) != len(names):
            raise ValueError(f"eval_tasksets need different names, got {names}")
        for taskset in self.eval_tasksets:
            if not taskset.storage.holds_records:
                raise ValueError(f"eval taskset {taskset.name!r} cannot be a queue: an evaluation needs a known set")
        return self
