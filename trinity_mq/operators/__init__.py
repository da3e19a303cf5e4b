"""Operators: filter, change and annotate the experiences of a batch before training."""

from trinity_mq.operators.advantage import AdvantageOperator
from trinity_mq.operators.base import ColumnOperator, ExperienceOperator, ExperienceOperatorV1, ThreadedOperator
from trinity_mq.operators.chain import OperatorError, run_chain
from trinity_mq.operators.registry import EXPERIENCE_OPERATORS, OPERATORS, OperatorConfigError, create_operators

__all__ = [
    "EXPERIENCE_OPERATORS",
    "OPERATORS",
    "AdvantageOperator",
    "ColumnOperator",
    "ExperienceOperator",
    "ExperienceOperatorV1",
    "OperatorConfigError",
    "OperatorError",
    "ThreadedOperator",
    "create_operators",
    "run_chain",
]
