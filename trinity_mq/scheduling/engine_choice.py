"""Which of the engines heard of a runner asks."""

from __future__ import annotations

import random
from collections.abc import Iterable

from trinity_mq.messages import Beat
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost


def choose_engine(beats: Iterable[Beat]) -> InferenceModel:
    """Return the least loaded rollout engine, one that holds weights before one that does not; a tie is drawn by lot.

    Args:
        beats: Of the living engines; one that does not say where it is served is passed over.

    Raises:
        EngineLost: There is none.
    """
    found: dict[tuple[bool, int], list[InferenceModel]] = {}
    for beat in beats:
        load = beat.detail.get("load", 0)
        try:
            model = InferenceModel.from_dict(beat.detail)
        except (KeyError, TypeError, ValueError, IndexError):
            continue
        if beat.detail.get("role") == "rollout" and isinstance(load, int):
            found.setdefault((model.version is None, load), []).append(model)
    if not found:
        raise EngineLost("no living rollout engine is known")
    return random.choice(found[min(found)])
