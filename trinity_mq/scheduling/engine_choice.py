"""Which of the engines heard of a runner asks: by health and load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from trinity_mq.messages import Beat
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost

STALE = 5.0
"""Seconds without a beat (they come every two) after which an engine is asked only if all others are as silent."""
SHUNNED = 5.0
"""Seconds an engine that did not answer is left out; twice as many each time it does not answer again."""
LONGEST_SHUNNED = 60.0


@runtime_checkable
class Engines(Protocol):
    """Says which engine to use, and is told which one did not answer."""

    def __call__(self) -> InferenceModel: ...

    def lost(self, engine: InferenceModel) -> None: ...


@dataclass(slots=True)
class _Known:
    """An engine as last heard of, and what happened since."""

    model: InferenceModel
    load: int
    """What the beat says, and what was sent to it since."""
    beat: Beat
    heard: float


@dataclass(slots=True)
class _Trouble:
    url: str
    times: int = 0
    until: float = field(default=0.0)


class EngineChoice:
    """Chooses among rollout engines: an object to call.

    Those that are silent or did not answer lately come last, then those without weights; among the others the one with
    the least load wins, counting what was sent to it since its last beat. A tie is drawn by lot.

    Args:
        beats: Returns the beats of the living engines.
    """

    def __init__(self, beats: Callable[[], Iterable[Beat]]) -> None:
        self._beats = beats
        self._known: dict[str, _Known] = {}
        self._troubles: dict[str, _Trouble] = {}

    def hear(self) -> None:
        """Look at the beats; to be called when there are new ones."""
        self._look(asyncio.get_running_loop().time())

    def lost(self, engine: InferenceModel) -> None:
        """An engine did not answer: leave it out for a while, or until it is served elsewhere."""
        trouble = self._troubles.get(engine.id)
        if trouble is None or trouble.url != engine.url:
            trouble = self._troubles[engine.id] = _Trouble(engine.url)
        now = asyncio.get_running_loop().time()
        if now >= trouble.until:  # else one of many that asked it at the same time
            trouble.times = 1 if now - trouble.until > LONGEST_SHUNNED else trouble.times + 1
            trouble.until = now + min(LONGEST_SHUNNED, SHUNNED * 2 ** (trouble.times - 1))

    def __call__(self) -> InferenceModel:
        """Return the engine to ask now.

        Raises:
            EngineLost: There is none.
        """
        now = asyncio.get_running_loop().time()
        if not self._known or any(now - known.heard > STALE for known in self._known.values()):
            self._look(now)
        if not self._known:
            raise EngineLost("no living rollout engine is known")
        if len(self._known) == 1:
            return next(iter(self._known.values())).model
        ranked: dict[tuple[bool, bool, int], list[_Known]] = {}
        for known in self._known.values():
            ranked.setdefault((self._doubtful(known, now), known.model.version is None, known.load), []).append(known)
        chosen = random.choice(ranked[min(ranked)])
        chosen.load += 1
        return chosen.model

    def _doubtful(self, known: _Known, now: float) -> bool:
        trouble = self._troubles.get(known.model.id)
        shunned = trouble is not None and trouble.url == known.model.url and now < trouble.until
        return shunned or now - known.heard > STALE

    def _look(self, now: float) -> None:
        found: dict[str, _Known] = {}
        for beat in self._beats():
            known = self._known.get(beat.id)
            if known is not None and known.beat is beat:
                found[beat.id] = known
            elif (made := _known(beat, now)) is not None:
                found[beat.id] = made
        self._known = found
        self._troubles = {name: trouble for name, trouble in self._troubles.items() if name in found}


def _known(beat: Beat, now: float) -> _Known | None:
    """Return the engine in a beat; None for one that does not say where it is served, or serves something else."""
    load = beat.detail.get("load", 0)
    try:
        model = InferenceModel.from_dict(beat.detail)
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    if model.role != "rollout" or beat.detail.get("role") != "rollout" or not isinstance(load, int):
        return None
    return _Known(model=model, load=load, beat=beat, heard=now)
