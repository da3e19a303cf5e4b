"""Experiences for the page: a table of rows, and the bodies behind them, both bounded in memory."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.experience import Experience

MOST_ROWS = 10_000
MOST_BYTES = 256 * 1024**2
"""Bytes of all bodies."""
PREVIEW = 96
"""Characters of an answer that the table shows."""
COLUMNS = (
    "number",
    "uid",
    "step",
    "batch",
    "task",
    "run",
    "turn",
    "taskset",
    "workflow",
    "reward",
    "advantage",
    "prompt",
    "response",
    "truncated",
    "version",
    "staleness",
    "logprob",
    "engine",
    "text",
)
"""Columns of a row, as :meth:`SampleStore.rows` returns them."""


@dataclass(frozen=True, slots=True)
class DecodedSamples:
    """A body of experiences, and a row without its number for each of them."""

    body: bytes
    rows: dict[str, list[Any]]
    """By uid, in the order in which the body has them."""


def decoded(body: bytes, step: int | None, workflows: Mapping[str, str]) -> DecodedSamples:
    """Return the rows of an encoded batch; slow enough to belong into a thread.

    Args:
        body: An encoded batch of experiences.
        step: Train step that was made on them, None where it is not known.
        workflows: By taskset, the workflow that its tasks are run by.

    Raises:
        DecodeError: The body is damaged.
    """
    from trinity_mq.experience import ExperienceBatch  # here: it imports torch, and not everybody has samples

    experiences = ExperienceBatch.decode(body).settle().to_list()
    return DecodedSamples(body, {one.eid.uid: _row(one, step, workflows) for one in experiences})


class SampleStore:
    """The latest experiences that were seen. One thread uses it."""

    def __init__(self) -> None:
        self._rows: collections.OrderedDict[str, list[Any]] = collections.OrderedDict()
        self._kept: collections.deque[DecodedSamples] = collections.deque()
        self._owner: dict[str, DecodedSamples] = {}
        self._bytes = 0
        self.number = 0
        """Number of the last row; it rises with each."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, samples: DecodedSamples) -> int:
        """Take in samples, and return how many of them are new."""
        new = 0
        for uid, row in samples.rows.items():
            if uid in self._rows:
                continue
            new += 1
            self.number += 1
            self._rows[uid] = [self.number, *row]
            self._owner[uid] = samples
        if new:
            self._kept.append(samples)
            self._bytes += len(samples.body)
            self._trim()
        return new

    def _trim(self) -> None:
        while len(self._kept) > 1 and (self._bytes > MOST_BYTES or len(self._rows) > MOST_ROWS):
            oldest = self._kept.popleft()
            self._bytes -= len(oldest.body)
            for uid in oldest.rows:
                if self._owner.get(uid) is oldest:
                    del self._owner[uid], self._rows[uid]

    def rows(self, after: int = 0) -> list[list[Any]]:
        """Return the rows with a number above ``after``, oldest first."""
        found: list[list[Any]] = []
        for row in reversed(self._rows.values()):
            if row[0] <= after:
                break
            found.append(row)
        return found[::-1]

    def body_of(self, uid: str) -> tuple[bytes, int] | None:
        """Return the body that holds an experience, and its place there; None where it is not kept any more."""
        owner = self._owner.get(uid)
        return None if owner is None else (owner.body, list(owner.rows).index(uid))


def experience_at(body: bytes, place: int) -> Experience:
    """Return one experience of an encoded batch."""
    from trinity_mq.experience import ExperienceBatch

    return ExperienceBatch.decode(body).settle()[place]


def _row(one: Experience, step: int | None, workflows: Mapping[str, str]) -> list[Any]:
    from trinity_mq.experience.rules import ENGINE

    eid = one.eid
    versions = [(generation, of_step) for _, generation, of_step in one.versions or ()]
    oldest = min(versions, default=None)
    texts = sorted({f"{generation}.{of_step}" for generation, of_step in versions})
    text = one.response_text or ""
    return [
        eid.uid,
        step,
        eid.batch,
        eid.task,
        eid.run,
        eid.step,
        one.taskset,
        workflows.get(one.taskset or ""),
        None if one.reward is None else round(one.reward, 6),
        _mean(one.advantages, one.action_mask),
        one.prompt_length,
        max(0, len(one.tokens) - one.prompt_length),
        one.truncate_status,
        " ".join(texts) or None,
        None if step is None or oldest is None else max(0, step - 1 - oldest[1]),
        _mean(one.logprobs, one.action_mask),
        one.info.get(ENGINE),
        text[:PREVIEW] + ("…" if len(text) > PREVIEW else ""),
    ]


def _mean(values: Tensor | None, mask: Tensor | None) -> float | None:
    """Return the mean over the tokens that are trained on, None where there is none."""
    if values is None or not len(values):
        return None
    found = values.float().numpy()  # many small ones: numpy takes a tenth of the time
    if mask is not None and len(mask) == len(values):
        trained = mask.numpy()
        found = found[trained] if trained.any() else found
    return round(float(found.mean()), 6)
