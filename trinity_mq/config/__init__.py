"""The configuration of a run: pydantic sections and their loading. It builds nothing."""

from trinity_mq.config.agents import (
    CircuitBreakerConfig,
    DynamicTimeoutConfig,
    ExplorerConfig,
    MonitorConfig,
    OperatorsConfig,
    OtlpConfig,
    OverRolloutConfig,
    RolloutModelConfig,
    RunnerConfig,
    SupervisorConfig,
    TrackerConfig,
    TrainerConfig,
)
from trinity_mq.config.algorithm import AlgorithmConfig, OperatorConfig, OptimizerConfig
from trinity_mq.config.buffer import (
    BufferConfig,
    ExperienceBufferConfig,
    ExplorerOutputConfig,
    FormatConfig,
    RecordFormatConfig,
    ReplayConfig,
    TasksetConfig,
    TrainerInputConfig,
)
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.config.engines import AuxiliaryModelConfig
from trinity_mq.config.loading.load import ConfigError, escape_interpolations, load_config
from trinity_mq.config.loading.stages import Stage, load_stages
from trinity_mq.config.model import ModelConfig, TinyModelConfig
from trinity_mq.config.run import Config
from trinity_mq.config.sync import SyncConfig

__all__ = [
    "AlgorithmConfig",
    "AuxiliaryModelConfig",
    "BrokerConfig",
    "BufferConfig",
    "CircuitBreakerConfig",
    "Config",
    "ConfigError",
    "DynamicTimeoutConfig",
    "ExperienceBufferConfig",
    "ExplorerConfig",
    "ExplorerOutputConfig",
    "FormatConfig",
    "ModelConfig",
    "MonitorConfig",
    "OperatorConfig",
    "OperatorsConfig",
    "OptimizerConfig",
    "OtlpConfig",
    "OverRolloutConfig",
    "RecordFormatConfig",
    "ReplayConfig",
    "RolloutModelConfig",
    "RunnerConfig",
    "Stage",
    "SupervisorConfig",
    "SyncConfig",
    "TasksetConfig",
    "TinyModelConfig",
    "TrackerConfig",
    "TrainerConfig",
    "TrainerInputConfig",
    "escape_interpolations",
    "load_config",
    "load_stages",
]
