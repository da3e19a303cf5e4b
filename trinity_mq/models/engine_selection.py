"""Selects a rollout engine from heartbeats, by health, then load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args, runtime_checkable

from trinity_mq.messages import EngineStatus, Heartbeat
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost
from trinity_mq.models.inference import ModelRole

STALE = 5.0
"""Seconds without a beat (they come every two) after which an engine is asked only if all others are as silent."""
BACKOFF = 5.0
"""Seconds an engine that did not answer is left out; twice as many each time it does not answer again."""
MAX_BACKOFF = 60.0
STICKY_LOAD = 16
"""Sequences by which the load of a preferred engine may be above the least one."""


@runtime_checkable
class Engines(Protocol):
    """Chooses the engine to use; callers report engines that did not answer."""

    def __call__(self) -> InferenceModel: ...

    def lost(self, engine: InferenceModel) -> None: ...


@runtime_checkable
class AuxiliaryEngines(Protocol):
    """Says which engine of an auxiliary model to use."""

    def auxiliary(self, name: str) -> InferenceModel: ...


def auxiliary_models(
    names: Sequence[str], models: object, given: Sequence[InferenceModel] = ()
) -> list[InferenceModel]:
    """Return the auxiliary models of a workflow, in order of ``names``: those ``given``, else engines now alive.

    Raises:
        EngineLost: One has no living engine.
    """
    if given or not names or not isinstance(models, AuxiliaryEngines):
        return list(given)
    return [models.auxiliary(name) for name in names]


class Answering:
    """In place of the policy an auxiliary model: what evaluation tasks with ``rollout_args.model`` ask.

    Args:
        name: Of the model.
        choice: Says which engine of it to use.
    """

    def __init__(self, name: str, choice: AuxiliaryEngines) -> None:
        self._name, self._choice = name, choice

    def __call__(self) -> InferenceModel:
        """Return the engine to ask now; errors as :meth:`EngineSelector.auxiliary`."""
        return self._choice.auxiliary(self._name)

    def auxiliary(self, name: str) -> InferenceModel:
        """Return an engine of another auxiliary model."""
        return self._choice.auxiliary(name)

    def lost(self, engine: InferenceModel) -> None:
        """An engine did not answer."""
        if isinstance(self._choice, Engines):
            self._choice.lost(engine)


@dataclass(slots=True)
class _Known:
    """Last heartbeat of an engine, and the requests sent since."""

    model: InferenceModel
    load: int
    """Load reported in the heartbeat, plus the requests sent since."""
    beat: Heartbeat
    received: float

    @property
    def serves(self) -> bool:
        """Whether it has said that it serves."""
        return self.beat.state == "working" if self.model.role == "auxiliary" else self.model.version is not None


@dataclass(slots=True)
class _Backoff:
    url: str
    times: int = 0
    until: float = 0.0


class EngineSelector:
    """Chooses among rollout engines: an object to call; and among those of an auxiliary model.

    Those that are silent or did not answer lately come last, then those that serve nothing at present (without weights,
    or without the server behind them); among the others the one with the least load wins, counting what was sent to it
    since its last beat. A tie is drawn by lot.

    Args:
        beats: Returns the beats of the living engines.
    """

    def __init__(self, beats: Callable[[], Iterable[Heartbeat]]) -> None:
        self._beats = beats
        self._known: dict[str, _Known] = {}
        self._backoffs: dict[str, _Backoff] = {}

    def receive(self) -> None:
        """Look at the beats; to be called when there are new ones."""
        now = asyncio.get_running_loop().time()
        before, self._known = self._known, {}
        for beat in self._beats():
            known = before.get(beat.id)
            if known is not None and known.beat is beat:
                self._known[beat.id] = known
            elif isinstance(beat.detail, EngineStatus) and (model := known_model(beat)) is not None:
                self._known[beat.id] = _Known(model, beat.detail.load, beat, now)
        self._backoffs = {name: backoff for name, backoff in self._backoffs.items() if name in self._known}

    def lost(self, engine: InferenceModel) -> None:
        """An engine did not answer: leave it out for a while, or until it is served elsewhere."""
        backoff = self._backoffs.get(engine.id)
        if backoff is None or backoff.url != engine.url:
            backoff = self._backoffs[engine.id] = _Backoff(engine.url)
        now = asyncio.get_running_loop().time()
        if now >= backoff.until:  # else one of many that asked it at the same time
            backoff.times = 1 if now - backoff.until > MAX_BACKOFF else backoff.times + 1
            backoff.until = now + min(MAX_BACKOFF, BACKOFF * 2 ** (backoff.times - 1))

    def __call__(self, prefer: str = "") -> InferenceModel:
        """Return the engine to ask now.

        Args:
            prefer: Id of the engine that is taken unless others are better off: it has the beginning of the prompt in
                its cache.

        Raises:
            EngineLost: There is none.
        """
        return self._chosen(lambda model: model.role == "rollout", "rollout engine", prefer)

    def auxiliary(self, name: str) -> InferenceModel:
        """Return the engine of an auxiliary model to ask now.

        Raises:
            EngineLost: There is none.
        """
        return self._chosen(
            lambda model: model.role == "auxiliary" and model.name == name, f"engine of auxiliary model {name!r}"
        )

    def _chosen(self, suits: Callable[[InferenceModel], bool], what: str, prefer: str = "") -> InferenceModel:
        now = asyncio.get_running_loop().time()
        found = [known for known in self._known.values() if suits(known.model)]
        if not found or any(now - known.received > STALE for known in found):
            self.receive()
            found = [known for known in self._known.values() if suits(known.model)]
        if not found:
            raise EngineLost(f"no living {what} is known")
        ranked: dict[tuple[bool, bool, int], list[_Known]] = {}
        for known in found:
            ranked.setdefault((self._doubtful(known, now), not known.serves, known.load), []).append(known)
        best = min(ranked)
        near = [
            known
            for rank, ones in ranked.items()
            if rank[:2] == best[:2] and rank[2] <= best[2] + STICKY_LOAD
            for known in ones
            if known.model.id == prefer
        ]
        chosen = near[0] if near else random.choice(ranked[best])
        chosen.load += 1
        return chosen.model

    def _doubtful(self, known: _Known, now: float) -> bool:
        backoff = self._backoffs.get(known.model.id)
        backing_off = backoff is not None and backoff.url == known.model.url and now < backoff.until
        return backing_off or now - known.received > STALE


def known_model(beat: Heartbeat) -> InferenceModel | None:
    """Return the model that an engine's heartbeat announces; None if it does not say what is served and where."""
    status = beat.detail
    if not isinstance(status, EngineStatus) or status.id is None or status.url is None or status.name is None:
        return None
    role = next((role for role in get_args(ModelRole) if role == status.role), None)
    if role is None:
        return None
    return InferenceModel(status.id, status.url, status.name, status.model_path, status.version, role)
