"""The operator: turns a closed batch into a processed batch."""

from trinity_agents.operator.agent import Operator

__all__ = ["Operator"]
