"""Modes of a run: the agents of each mode, and the agent whose end is the end of the run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Mode = Literal["both", "train", "explore", "bench", "serve"]


class Agents(NamedTuple):
    """The agents of a mode."""

    roles: tuple[str, ...]
    """Roles of the processes that ``trinity-mq run`` starts, in starting order."""
    ends: str
    """Role of the agent whose end is the end of the run."""


AGENTS: Mapping[Mode, Agents] = MappingProxyType(
    {
        "both": Agents(("explorer", "trainer", "operator", "runner"), ends="explorer"),
        # the trainer writes the experiences instead of training on them, and sends the weights to engines
        "explore": Agents(("explorer", "trainer", "operator", "runner"), ends="explorer"),
        "train": Agents(("trainer",), ends="trainer"),
        # the trainer sends the weights of one checkpoint after another to engines
        "bench": Agents(("explorer", "trainer", "runner"), ends="explorer"),
        # gateways answer; runners turn ended sessions into experiences
        "serve": Agents(("explorer", "trainer", "operator", "runner", "gateway"), ends="explorer"),
    }
)
"""Agents by mode. The configuration refuses a mode without an entry."""

TRAINING_MODES = frozenset[Mode]({"both", "train", "serve"})
"""Modes that produce a trained model."""
