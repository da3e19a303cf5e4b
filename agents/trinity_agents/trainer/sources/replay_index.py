"""The index of groups that may be replayed. Pure logic: groups and train steps in, choices out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trinity_mq.config import ReplayConfig


@dataclass(slots=True)
class ReplayGroup:
    """All runs of one task in a train step."""

    tid: str
    """Group id, as returned by :meth:`trinity_mq.experience.ExperienceBatch.ids`."""
    ticket: str
    """Ticket of the group's batch."""
    born: int
    """Train step at which the group was fresh."""
    used: int
    """Train step at which the group was trained on last."""
    uses: int = 0
    """Number of train steps that replayed the group."""


def linear_decay(born: float, uses: int, decay: float) -> float:
    """Return the priority ``born - decay x uses`` (Trinity-RFT's ``linear_decay``, in train steps)."""
    return born - decay * uses


class ReplayIndex:
    """Groups in order of arrival, and the stream offsets of their batches.

    Args:
        config: Limits and priorities.
        seed: Seed of the random part of priorities.
    """

    def __init__(self, config: ReplayConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._groups: dict[str, ReplayGroup] = {}
        self._offsets: dict[str, list[int]] = {}
        """Stream offsets of chunks by ticket, for the tickets of the groups in the index."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def tickets(self) -> list[str]:
        """Tickets whose chunks are still needed."""
        return list(self._offsets)

    def offsets(self, ticket: str) -> list[int]:
        """Return the stream offsets of a ticket's chunks."""
        return self._offsets[ticket]

    def choose(self, count: int, step: int) -> list[ReplayGroup]:
        """Return at most ``count`` groups for train step ``step``, by priority; for equal priority the oldest first."""
        config = self._config
        fit = [
            group
            for group in self._groups.values()
            if group.uses < config.max_uses
            and step - group.used >= config.cooldown
            and step - group.born <= config.max_age
        ]
        random = np.random.default_rng([self._seed, step])
        noise = random.normal(0.0, config.sigma, len(fit)) if config.sigma else np.zeros(len(fit))
        ranked = sorted(
            range(len(fit)), key=lambda n: -(linear_decay(fit[n].born, fit[n].uses, config.decay) + noise[n])
        )
        return [fit[number] for number in ranked[:count]]

    def use(self, groups: Iterable[ReplayGroup], step: int) -> None:
        """Record that groups were replayed in train step ``step``."""
        for group in groups:
            group.uses, group.used = group.uses + 1, step

    def add(self, tids: Sequence[str], ticket: str, offsets: Sequence[int], step: int) -> None:
        """Add the groups of a batch that was trained on in train step ``step``."""
        for tid in tids:
            self._groups[tid] = ReplayGroup(tid, ticket, born=step, used=step)
        self._offsets[ticket] = list(offsets)
        self._forget(step)

    def remove(self, ticket: str) -> int:
        """Remove the groups of a ticket whose chunks are lost; return the number of groups."""
        lost = [tid for tid, group in self._groups.items() if group.ticket == ticket]
        self.drop(lost)
        return len(lost)

    def drop(self, tids: Iterable[str]) -> None:
        """Remove groups by id."""
        for tid in tids:
            del self._groups[tid]
        self._forget_offsets()

    def _forget(self, step: int) -> None:
        """Remove groups that no later step can use, then the groups with the lowest priority beyond the capacity."""
        config = self._config
        for tid, group in list(self._groups.items()):
            if group.uses >= config.max_uses or step + 1 - group.born > config.max_age:
                del self._groups[tid]
        if (beyond := len(self._groups) - config.capacity) > 0:
            ranked = sorted(self._groups.values(), key=lambda group: linear_decay(group.born, group.uses, config.decay))
            for group in ranked[:beyond]:
                del self._groups[group.tid]
        self._forget_offsets()

    def _forget_offsets(self) -> None:
        needed = {group.ticket for group in self._groups.values()}
        self._offsets = {ticket: offsets for ticket, offsets in self._offsets.items() if ticket in needed}

    def state(self) -> dict[str, Any]:
        """Return the index as JSON."""
        return {"groups": [list(asdict(group).values()) for group in self._groups.values()], "offsets": self._offsets}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a ``state`` that :meth:`state` returned."""
        self._groups = {values[0]: ReplayGroup(*values) for values in state["groups"]}
        self._offsets = {ticket: list(offsets) for ticket, offsets in state["offsets"].items()}
