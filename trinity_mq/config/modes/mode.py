"""Modes of a run: which agents work in each, and which of them ends it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Mode = Literal["both", "train", "explore", "bench", "serve"]


class Agents(NamedTuple):
    """The agents of a mode."""

    roles: tuple[str, ...]
    """Roles of the processes that ``trinity-mq run`` starts, in the order of their start."""
    ends: str
    """Role of the one agent whose end is the end of the run."""


AGENTS: Mapping[Mode, Agents] = MappingProxyType(
    {
        "both": Agents(("explorer", "trainer", "operator", "runner"), ends="explorer"),
        # the trainer writes what it would train on, and gives engines the weights
        "explore": Agents(("explorer", "trainer", "operator", "runner"), ends="explorer"),
        "train": Agents(("trainer",), ends="trainer"),
        # the trainer gives engines the weights of one checkpoint after another
        "bench": Agents(("explorer", "trainer", "runner"), ends="explorer"),
        # gateways answer; runners make experiences of the sessions that are over
        "serve": Agents(("explorer", "trainer", "operator", "runner", "gateway"), ends="explorer"),
    }
)
"""Agents by mode; a mode without an entry is refused by the configuration."""

TRAINING_MODES = frozenset[Mode]({"both", "train", "serve"})
"""Modes that leave a trained model behind."""
