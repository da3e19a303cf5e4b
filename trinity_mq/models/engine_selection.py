"""Selects an engine from heartbeats, by health, then by load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args, runtime_checkable

from trinity_mq.bus.retry import exponential_pause
from trinity_mq.messages import EngineStatus, Heartbeat
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost
from trinity_mq.models.inference import ModelRole

STALE = 5.0
"""Seconds without a heartbeat after which an engine is used only if all other engines are silent or did not answer
recently. An engine sends one heartbeat every two seconds.
"""
BACKOFF = 5.0
"""Seconds for which an engine that did not answer is used only if the other engines are silent or did not answer
either. Doubles with each further failure, up to ``MAX_BACKOFF``.
"""
MAX_BACKOFF = 60.0
STICKY_LOAD = 16
"""Sequences by which the load of a preferred engine may exceed the smallest load."""


@runtime_checkable
class Engines(Protocol):
    """Chooses the engine to use; callers report engines that did not answer."""

    def __call__(self) -> InferenceModel: ...

    def lost(self, engine: InferenceModel) -> None: ...


@runtime_checkable
class AuxiliaryEngines(Protocol):
    """Chooses the engine of an auxiliary model."""

    def auxiliary(self, name: str) -> InferenceModel: ...


def auxiliary_models(
    names: Sequence[str], models: object, explicit: Sequence[InferenceModel] = ()
) -> list[InferenceModel]:
    """Return the auxiliary models of a workflow: ``explicit`` if it is not empty, else a living engine for each name of
    ``names``, in that order. Empty if ``models`` does not choose auxiliary engines.

    Raises:
        EngineLost: An auxiliary model has no living engine.
    """
    if explicit or not names or not isinstance(models, AuxiliaryEngines):
        return list(explicit)
    return [models.auxiliary(name) for name in names]


class AuxiliaryAsPolicy:
    """Chooses engines of an auxiliary model where a workflow expects the policy's engines, for evaluation tasks with
    ``rollout_args.model``.

    Args:
        name: Name of the auxiliary model.
        choice: Chooses the engine of a model.
    """

    def __init__(self, name: str, choice: AuxiliaryEngines) -> None:
        self._name, self._choice = name, choice

    def __call__(self) -> InferenceModel:
        """Return the engine to use now; errors as :meth:`EngineSelector.auxiliary`."""
        return self._choice.auxiliary(self._name)

    def auxiliary(self, name: str) -> InferenceModel:
        """Return an engine of another auxiliary model."""
        return self._choice.auxiliary(name)

    def lost(self, engine: InferenceModel) -> None:
        """Report an engine that did not answer, if ``choice`` takes such reports."""
        if isinstance(self._choice, Engines):
            self._choice.lost(engine)


@dataclass(slots=True)
class _EngineEntry:
    """Last heartbeat of an engine, and the requests sent to it since then."""

    model: InferenceModel
    load: int
    """Load in sequences from the heartbeat, plus the number of requests sent since then."""
    beat: Heartbeat
    received: float

    @property
    def serves(self) -> bool:
        """Whether the engine reported that it can answer requests."""
        return self.beat.state == "working" if self.model.role == "auxiliary" else self.model.version is not None


@dataclass(slots=True)
class _Backoff:
    url: str
    times: int = 0
    until: float = 0.0


class EngineSelector:
    """Chooses a rollout engine when it is called, and an engine of an auxiliary model with :meth:`auxiliary`.

    First come engines that serve. Then come engines that serve nothing at present (without weights, or without the
    external server behind them). Last come engines that are silent or did not answer recently. Among equals the engine
    with the least load wins; its load counts the requests sent since its last heartbeat. A tie is broken at random.

    Args:
        beats: Returns the latest heartbeats of the living engines.
    """

    def __init__(self, beats: Callable[[], Iterable[Heartbeat]]) -> None:
        self._beats = beats
        self._entries: dict[str, _EngineEntry] = {}
        self._backoffs: dict[str, _Backoff] = {}

    def receive(self) -> None:
        """Read the heartbeats. Call this when new heartbeats have come."""
        now = asyncio.get_running_loop().time()
        before, self._entries = self._entries, {}
        for beat in self._beats():
            entry = before.get(beat.id)
            if entry is not None and entry.beat is beat:
                self._entries[beat.id] = entry
            elif isinstance(beat.detail, EngineStatus) and (model := announced_model(beat)) is not None:
                self._entries[beat.id] = _EngineEntry(model, beat.detail.load, beat, now)
        self._backoffs = {name: backoff for name, backoff in self._backoffs.items() if name in self._entries}

    def lost(self, engine: InferenceModel) -> None:
        """Give an engine the last rank because it did not answer, until its backoff ends or it has another URL."""
        backoff = self._backoffs.get(engine.id)
        if backoff is None or backoff.url != engine.url:
            backoff = self._backoffs[engine.id] = _Backoff(engine.url)
        now = asyncio.get_running_loop().time()
        if now >= backoff.until:  # within the backoff the failure belongs to requests sent at the same time
            backoff.times = 1 if now - backoff.until > MAX_BACKOFF else backoff.times + 1
            backoff.until = now + exponential_pause(BACKOFF, MAX_BACKOFF, backoff.times)

    def __call__(self, prefer: str = "") -> InferenceModel:
        """Return the engine to use now.

        Args:
            prefer: Id of the engine whose cache holds the beginning of the prompt. It is chosen unless another engine
                is in a better class or its load exceeds the smallest load by more than ``STICKY_LOAD``.

        Raises:
            EngineLost: No rollout engine is alive.
        """
        return self._select(lambda model: model.role == "rollout", "rollout engine", prefer)

    def auxiliary(self, name: str) -> InferenceModel:
        """Return the engine of an auxiliary model to use now.

        Raises:
            EngineLost: The model has no living engine.
        """
        return self._select(
            lambda model: model.role == "auxiliary" and model.name == name, f"engine of auxiliary model {name!r}"
        )

    def _select(self, matches: Callable[[InferenceModel], bool], description: str, prefer: str = "") -> InferenceModel:
        now = asyncio.get_running_loop().time()
        candidates = [entry for entry in self._entries.values() if matches(entry.model)]
        if not candidates or any(now - entry.received > STALE for entry in candidates):
            self.receive()
            candidates = [entry for entry in self._entries.values() if matches(entry.model)]
        if not candidates:
            raise EngineLost(f"no living {description} is known")
        ranked: dict[tuple[bool, bool, int], list[_EngineEntry]] = {}
        for entry in candidates:
            ranked.setdefault((self._is_doubtful(entry, now), not entry.serves, entry.load), []).append(entry)
        best = min(ranked)
        preferred = [
            entry
            for rank, entries in ranked.items()
            if rank[:2] == best[:2] and rank[2] <= best[2] + STICKY_LOAD
            for entry in entries
            if entry.model.id == prefer
        ]
        chosen = preferred[0] if preferred else random.choice(ranked[best])
        chosen.load += 1
        return chosen.model

    def _is_doubtful(self, entry: _EngineEntry, now: float) -> bool:
        backoff = self._backoffs.get(entry.model.id)
        backing_off = backoff is not None and backoff.url == entry.model.url and now < backoff.until
        return backing_off or now - entry.received > STALE


def announced_model(beat: Heartbeat) -> InferenceModel | None:
    """Return the model that an engine's heartbeat announces; None if the heartbeat lacks an id, a URL, a name or a
    known role.
    """
    status = beat.detail
    if not isinstance(status, EngineStatus) or status.id is None or status.url is None or status.name is None:
        return None
    role = next((role for role in get_args(ModelRole) if role == status.role), None)
    if role is None:
        return None
    return InferenceModel(status.id, status.url, status.name, status.model_path, status.version, role)
