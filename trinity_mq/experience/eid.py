"""Identity of an experience: its batch, task, run and step."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_random = random.Random()  # own instance: seeding the module's generator for reproducible runs must not repeat ids
os.register_at_fork(after_in_child=_random.seed)


def _new_suffix() -> str:
    return f"{_random.getrandbits(48):012x}"


def _escaped(task: int | str) -> str:
    """Return ``task`` as text with ``%`` and ``/`` percent-encoded. Two different ids then never compose to the same
    text: the text before the task is the batch, whatever characters it has.
    """
    text = str(task)
    if "/" in text or "%" in text:
        return text.replace("%", "%25").replace("/", "%2F")
    return text


@dataclass(slots=True)
class EID:
    """Identifies one experience.

    Grouping uses the composed ids. The runner sets ``batch``, ``run`` and a missing ``task``. A workflow sets ``step``
    if a run of its task has several steps. If it makes several runs of a task in one call, it may also set ``run``;
    otherwise its experiences are divided equally among these runs. ``EID("3/gsm8k", 1).tid`` is ``3/gsm8k/1``. ``%``
    and ``/`` inside ``task`` are percent-encoded in the composed ids, so that ids of different tasks differ.
    """

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=_new_suffix)
    """Random (48 bits) unless given: distinguishes experiences of one step."""

    @property
    def uid(self) -> str:
        """``batch/task/run/step/suffix``: this experience alone."""
        return f"{self.batch}/{_escaped(self.task)}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """``batch/task/step``: the same step in all runs of a task."""
        return f"{self.batch}/{_escaped(self.task)}/{self.step}"

    @property
    def rid(self) -> str:
        """``batch/task/run``: all steps of one run of a task."""
        return f"{self.batch}/{_escaped(self.task)}/{self.run}"

    @property
    def tid(self) -> str:
        """``batch/task``: all runs of a task, the group of GRPO-like algorithms."""
        return f"{self.batch}/{_escaped(self.task)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the five parts by name; ``EID(**eid.to_dict()) == eid``."""
        return {"batch": self.batch, "task": self.task, "run": self.run, "step": self.step, "suffix": self.suffix}

    def __str__(self) -> str:
        return self.uid


def composed_ids(
    kind: str,
    batches: Sequence[int | str],
    tasks: Sequence[int | str],
    runs: Sequence[int],
    steps: Sequence[int],
    suffixes: Sequence[str],
) -> list[str]:
    """Return the ``uid``, ``sid``, ``rid`` or ``tid`` of each id; the ids are given as columns of their parts."""
    pairs = list(zip(batches, tasks, strict=True))
    names = {(batch, task): f"{batch}/{_escaped(task)}" for batch, task in dict.fromkeys(pairs)}
    tids = list(map(names.__getitem__, pairs))
    match kind:
        case "tid":
            return tids
        case "rid":
            return [f"{tid}/{run}" for tid, run in zip(tids, runs, strict=True)]
        case "sid":
            return [f"{tid}/{step}" for tid, step in zip(tids, steps, strict=True)]
        case "uid":
            rows = zip(tids, runs, steps, suffixes, strict=True)
            return [f"{tid}/{run}/{step}/{suffix}" for tid, run, step, suffix in rows]
    raise ValueError(f"{kind!r} is not a kind of id, wanted uid, sid, rid or tid")


def new_eids(count: int) -> list[EID]:
    """Return ids with empty parts and random suffixes, which are drawn at once."""
    digits = f"{_random.getrandbits(48 * count):0{12 * count}x}"
    return [EID("", "", 0, 0, digits[start : start + 12]) for start in range(0, 12 * count, 12)]
