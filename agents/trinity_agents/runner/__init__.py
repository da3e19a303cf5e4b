"""The runner: runs workflows on task slices and publishes their experiences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_agents.runner.agent import Runner

__all__ = ["Runner"]


def __getattr__(name: str) -> Any:
    """Load ``Runner`` on first use: the command line reads other modules of this package without torch."""
    if name != "Runner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trinity_agents.runner.agent import Runner

    return Runner
