"""The operator: turns a closed batch into a processed batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_agents.operator.agent import Operator

__all__ = ["Operator"]


def __getattr__(name: str) -> Any:
    """Load ``Operator`` on first use: the command line reads other modules of this package without torch."""
    if name != "Operator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trinity_agents.operator.agent import Operator

    return Operator
