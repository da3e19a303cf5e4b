"""The explorer: opens batches of tasks, follows their outcomes, evaluates and hosts engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_agents.explorer.agent import Explorer

__all__ = ["Explorer"]


def __getattr__(name: str) -> Any:
    """Load ``Explorer`` on first use: the command line reads other modules of this package without torch."""
    if name != "Explorer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trinity_agents.explorer.agent import Explorer

    return Explorer
