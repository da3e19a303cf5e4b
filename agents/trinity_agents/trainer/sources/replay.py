"""Train batches of fresh rollouts with added groups of earlier rollouts, and the index of those groups."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import structlog

from trinity_agents.trainer.decisions import MAX_STARTS, replayed_key
from trinity_agents.trainer.sources.base import ExperiencesLost, Source, TrainBatch
from trinity_agents.trainer.sources.rollout_extension import RolloutExtension
from trinity_mq.config import Config, ReplayConfig
from trinity_mq.data.priorities import Priorities
from trinity_mq.experience import ExperienceBatch
from trinity_mq.telemetry.group_drops import REPLAY_LOST


@dataclass(slots=True)
class ReplayGroup:
    """A reference to a group that was trained on: all rollout runs of one task in a batch."""

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
        self._priorities = (
            None if config.priority_fn is None else Priorities(config.priority_fn, config.priority_fn_args)
        )
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
        """Return at most ``count`` groups that train step ``step`` may replay, by descending priority plus noise; for
        equal values the oldest group first.
        """
        config = self._config
        fit = [
            group
            for group in self._groups.values()
            if group.uses < config.max_uses
            and step - group.used >= config.cooldown
            and step - group.born <= config.max_age
            and self._priority(group) > -math.inf
        ]
        random = np.random.default_rng([self._seed, step])
        noise = random.normal(0.0, config.sigma, len(fit)) if config.sigma else np.zeros(len(fit))
        ranked = sorted(range(len(fit)), key=lambda n: -(self._priority(fit[n]) + noise[n]))
        return [fit[number] for number in ranked[:count]]

    def _priority(self, group: ReplayGroup) -> float:
        if self._priorities is not None:
            return self._priorities.of(group.born, group.uses)
        return linear_decay(group.born, group.uses, self._config.decay)

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
            for group in sorted(self._groups.values(), key=self._priority)[:beyond]:
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


log = structlog.get_logger(__name__)

CACHE_BYTES = 2**28
"""Bytes of memory for groups that may be replayed; other groups are read again from the broker's stream. Small next to
the weights of a model.
"""


class RereadableSource(Source, Protocol):
    """A source whose batches can be read again."""

    starts: Callable[[str], int]
    """Returns the number of crashed starts for a key of :mod:`trinity_agents.trainer.decisions`."""
    pinned: Callable[[], Collection[str]]
    """Returns consumed tickets that the state must keep at any age."""

    async def read_again(self, offsets: Sequence[int]) -> ExperienceBatch:
        """Return the experiences of a consumed batch.

        Args:
            offsets: Stream offsets of its chunks.

        Raises:
            ExperiencesLost: The stream does not hold the chunks any more.
        """


class ReplaySource(RolloutExtension):
    """Adds groups of earlier batches to every train step that has fresh groups; the fresh groups set the pace.

    The state includes the index of groups, so that a trainer that resumes from a checkpoint makes the same choices.

    Args:
        rollouts: Source of rollouts, which sets the pace, counts progress and reads batches again.
        config: The run's configuration.
    """

    def __init__(self, rollouts: RereadableSource, config: Config) -> None:
        super().__init__(rollouts)
        self._reader = rollouts
        settings = config.buffer.trainer_input.replay
        self._index = ReplayIndex(settings, config.seed)
        rollouts.pinned = lambda: self._index.tickets
        self._count = replayed_groups_per_step(config)
        self._cache = _Cache(CACHE_BYTES // max(1, config.estimated_batch_bytes))
        self._step = 0
        """Number of train steps with experiences to train on."""
        self._next: tuple[TrainBatch, list[ReplayGroup], dict[str, list[str]]] | None = None
        """The current batch, its replayed groups, and the ids of its fresh groups by ticket."""

    async def next(self) -> TrainBatch:
        """Return the next rollouts, with replayed groups if the step has fresh groups to train on and its batch is not
        tried alone.
        """
        batch = await self._rollouts.next()
        parts = [part for part in batch.parts if part.state == "ready"]
        fresh = {part.ticket: list(dict.fromkeys(part.experiences.ids("tid"))) for part in parts}
        groups = self._chosen() if any(fresh.values()) and not batch.is_alone else []
        replayed, usable_groups, lost = [], list[ReplayGroup](), 0
        for ticket in dict.fromkeys(group.ticket for group in groups):
            tids = {group.tid for group in groups if group.ticket == ticket}
            try:
                whole = await self._read(ticket)
            except ExperiencesLost as error:
                lost += self._index.remove(ticket)
                log.warning("replayed_groups_lost", ticket=ticket, groups=len(tids), reason=str(error))
                continue
            replayed.append(whole.select([n for n, tid in enumerate(whole.ids("tid")) if tid in tids]))
            usable_groups += [group for group in groups if group.ticket == ticket]
        batch.replayed = ExperienceBatch.concat(replayed)
        batch.metrics |= self._metrics(usable_groups, len(batch.replayed), lost)
        self._next = batch, usable_groups, fresh
        return batch

    def _chosen(self) -> list[ReplayGroup]:
        """Return the replayed groups of the next step, after dropping groups with :data:`MAX_STARTS` crashed starts."""
        while True:
            groups = self._index.choose(self._count, self._step + 1)
            deadly = [group.tid for group in groups if self._reader.starts(replayed_key(group.tid)) >= MAX_STARTS]
            if not deadly:
                return groups
            log.warning("replayed_groups_left_out", groups=deadly, reason="the trainer did not survive steps with them")
            self._index.drop(deadly)

    def _metrics(self, groups: Sequence[ReplayGroup], experiences: int, lost: int) -> dict[str, float]:
        metrics = {
            "replay/groups": float(len(groups)),
            "replay/experiences": float(experiences),
            "replay/known_groups": float(len(self._index)),
        }
        if lost:
            metrics[REPLAY_LOST.metric] = float(lost)
        if groups:
            metrics["replay/age/mean"] = sum(self._step + 1 - group.born for group in groups) / len(groups)
            metrics["replay/age/max"] = float(max(self._step + 1 - group.born for group in groups))
            metrics["replay/uses/mean"] = sum(group.uses for group in groups) / len(groups)
        return metrics

    async def _read(self, ticket: str) -> ExperienceBatch:
        if (cached := self._cache.get(ticket)) is not None:
            return cached
        batch = await self._reader.read_again(self._index.offsets(ticket))
        self._cache.put(ticket, batch)
        return batch

    def consumed(self) -> None:
        """Advance past the batches of the step. Their groups may be replayed from now on if they were trained on and
        have a nonzero advantage, or an experience without advantages.
        """
        assert self._next is not None
        batch, groups, fresh = self._next
        self._rollouts.consumed()
        parts = [part for part in batch.parts if part.trained and part.ticket in fresh]
        self._step += bool(parts or batch.replayed)
        if batch.replayed:
            self._index.use(groups, self._step)
        for part in parts:
            # without the ids of expert answers, which another source added to the part after next() had returned
            fresh_tids = set(fresh[part.ticket])
            tids = [tid for tid in _with_advantage(part.experiences) if tid in fresh_tids]
            if tids:
                self._index.add(tids, part.ticket, part.offsets, self._step)
                self._cache.put(part.ticket, part.experiences)
        self._cache.keep(self._index.tickets)
        self._next = None

    def state(self) -> dict[str, Any]:
        """Return the state of the rollouts, which includes the index of groups."""
        return {**self._rollouts.state(), "replay": {"step": self._step, **self._index.state()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; keep the index empty if the state does not hold an index."""
        self._next = None
        if "replay" in state:
            self._step = int(state["replay"]["step"])
            self._index.restore(state["replay"])
        self._rollouts.restore(state)  # last, because it reads the tickets of the index


class _Cache:
    """LRU cache of experiences by ticket, for at most ``size`` tickets."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._batches: OrderedDict[str, ExperienceBatch] = OrderedDict()

    def get(self, ticket: str) -> ExperienceBatch | None:
        if (batch := self._batches.get(ticket)) is not None:
            self._batches.move_to_end(ticket)
        return batch

    def put(self, ticket: str, batch: ExperienceBatch) -> None:
        self._batches[ticket] = batch
        self._batches.move_to_end(ticket)
        while len(self._batches) > self._size:
            self._batches.popitem(last=False)

    def keep(self, tickets: Sequence[str]) -> None:
        """Remove all tickets except ``tickets``."""
        for ticket in self._batches.keys() - set(tickets):
            del self._batches[ticket]


def replayed_groups_per_step(config: Config) -> int:
    """Return the number of replayed groups in a train step. In a step with all rollouts, replayed groups are the share
    ``replay.share`` of all groups.
    """
    share = config.buffer.trainer_input.replay.share
    return round(config.buffer.batch_size * config.trainer.batches_per_step * share / (1 - share))


def _with_advantage(batch: ExperienceBatch) -> list[str]:
    """Return the ids of the groups that have a nonzero advantage or an experience without advantages."""
    lengths = batch.lengths("advantages")
    token_counts = np.maximum(lengths, 0)
    useful = lengths < 0
    if token_counts.any():
        nonzero = np.concatenate([[0], np.cumsum(batch.dense("advantages").numpy().reshape(-1) != 0)])
        ends = np.cumsum(token_counts)
        useful |= nonzero[ends] > nonzero[ends - token_counts]
    useful_by_group: dict[str, bool] = {}
    for tid, is_useful in zip(batch.ids("tid"), useful.tolist(), strict=True):
        useful_by_group[tid] = useful_by_group.get(tid, False) or is_useful
    return [tid for tid, is_useful in useful_by_group.items() if is_useful]
