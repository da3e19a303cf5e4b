"""The buffer section: sources of tasks and training data, and the length of a run."""

from trinity_mq.config.buffer.explorer_output import ExplorerOutputConfig
from trinity_mq.config.buffer.replay import ReplayConfig
from trinity_mq.config.buffer.section import BufferConfig
from trinity_mq.config.buffer.taskset import FormatConfig, TasksetConfig
from trinity_mq.config.buffer.trainer_input import ExperienceBufferConfig, RecordFormatConfig, TrainerInputConfig

__all__ = [
    "BufferConfig",
    "ExperienceBufferConfig",
    "ExplorerOutputConfig",
    "FormatConfig",
    "RecordFormatConfig",
    "ReplayConfig",
    "TasksetConfig",
    "TrainerInputConfig",
]
