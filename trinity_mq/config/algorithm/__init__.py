"""The algorithm section of a configuration: pieces, presets and how they are resolved."""

from trinity_mq.config.algorithm.critic import CriticConfig
from trinity_mq.config.algorithm.section import AlgorithmConfig, OperatorConfig, OptimizerConfig

__all__ = ["AlgorithmConfig", "CriticConfig", "OperatorConfig", "OptimizerConfig"]
