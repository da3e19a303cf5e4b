"""The trainer: trains on processed batches and leads the weight sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_agents.trainer.agent import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """Load ``Trainer`` on first use: the command line reads other modules of this package without torch."""
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trinity_agents.trainer.agent import Trainer

    return Trainer
