"""Modes of a run: the agents of each mode, and the agent whose end is the end of the run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from trinity_mq.roles import ROLES

Mode = Literal["both", "train", "explore", "bench", "serve"]


class Agents(NamedTuple):
    """The agents of a mode."""

    roles: tuple[str, ...]
    """Roles of the processes that ``trinity-mq run`` starts, in starting order."""
    ends: str
    """Role of the agent whose end is the end of the run."""


LEADERS: Mapping[Mode, str] = {
    "both": "explorer",
    # the trainer writes the experiences instead of training on them, and sends the weights to engines
    "explore": "explorer",
    "train": "trainer",
    # the trainer sends the weights of one checkpoint after another to engines
    "bench": "explorer",
    # gateways answer; runners turn ended sessions into experiences
    "serve": "explorer",
}
"""Role of the agent whose end is the end of the run, by mode."""
AGENTS: Mapping[Mode, Agents] = MappingProxyType(
    {
        mode: Agents(tuple(role for role, row in ROLES.items() if mode in row.modes), ends)
        for mode, ends in LEADERS.items()
    }
)
"""Agents by mode. The configuration refuses a mode without an entry."""

TRAINING_MODES = frozenset[Mode]({"both", "train", "serve"})
"""Modes that produce a trained model."""
