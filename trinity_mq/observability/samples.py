"""Experiences for the page: a table of rows and the encoded bodies behind them, both bounded in memory.

Bodies are decoded only when the page requests them. Until then they cost only memory.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trinity_mq.messages import DecodeError

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.experience import Experience

MOST_ROWS = 10_000
MOST_BYTES = 256 * 1024**2
"""Maximum total size of the bodies in bytes."""
PREVIEW = 96
"""Maximum characters of an answer shown in the table."""
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
"""Columns of the rows that :meth:`SampleStore.rows` returns."""


@dataclass(frozen=True, slots=True)
class DecodedSamples:
    """An encoded batch of experiences with a row, without its number, for each experience."""

    body: bytes
    rows: dict[str, list[Any]]
    """Rows by uid, in the order of the body."""


def decoded(body: bytes, step: int | None, workflows: Mapping[str, str]) -> DecodedSamples:
    """Return the rows of an encoded batch. Call it in a thread, because it is slow.

    Args:
        body: An encoded batch of experiences.
        step: Train step that used the experiences. None: unknown.
        workflows: Workflow name by taskset name.

    Raises:
        DecodeError: The body is damaged.
    """
    # imported here because it imports torch, and many runs have no samples
    from trinity_mq.experience import ExperienceBatch

    experiences = ExperienceBatch.decode(body).settle().to_list()
    return DecodedSamples(body, {experience.eid.uid: _row(experience, step, workflows) for experience in experiences})


def decode_latest(
    bodies: Sequence[tuple[bytes, int | None]], workflows: Mapping[str, str], max_rows: int
) -> tuple[list[DecodedSamples], list[str]]:
    """Return (the latest decoded batches with together about ``max_rows`` rows, oldest first, the problems of
    unreadable batches). Earlier batches are not decoded, because the table could not hold their rows.

    Args:
        bodies: Encoded batches, each with the train step that used it, oldest first.
        workflows: Workflow name by taskset name.
        max_rows: Number of rows from which on no earlier batch is decoded.
    """
    batches: list[DecodedSamples] = []
    problems: list[str] = []
    uids: set[str] = set()
    for body, step in reversed(bodies):
        if len(uids) >= max_rows:
            break
        try:
            batches.append(decoded(body, step, workflows))
        except DecodeError as error:
            problems.append(f"samples of step {step} cannot be read: {error}")
        else:
            uids.update(batches[-1].rows)
    return batches[::-1], problems[::-1]


class SampleStore:
    """The latest experiences of the run. Use it only in the event loop's thread.

    Args:
        workflows: Workflow name by taskset name.
        max_rows: Maximum rows of the table. The newest batch is kept whole even if it has more rows.
        max_bytes: Maximum size of the decoded bodies, and of the pending bodies, in bytes.
    """

    def __init__(
        self, workflows: Mapping[str, str] | None = None, max_rows: int = MOST_ROWS, max_bytes: int = MOST_BYTES
    ) -> None:
        self._workflows = workflows or {}
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._pending: collections.deque[tuple[bytes, int | None]] = collections.deque()
        """Bodies that are not decoded yet, each with the train step that used it."""
        self._pending_bytes = 0
        self._decoding = asyncio.Lock()
        self.seen = 0
        """Number of bodies received so far."""
        self._rows: dict[str, tuple[list[Any], DecodedSamples]] = {}
        """Row and samples of each experience, by uid."""
        self._decoded: collections.deque[DecodedSamples] = collections.deque()
        self._bytes = 0
        self.number = 0
        """Number of the last row. It increases with each row."""

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, body: bytes, step: int | None) -> None:
        """Add an encoded batch of experiences that train step ``step`` used. If the batches that are not decoded yet
        exceed a limit, the oldest batches are dropped.
        """
        self.seen += 1
        self._pending.append((body, step))
        self._pending_bytes += len(body)
        while self._pending_bytes > self._max_bytes or len(self._pending) > self._max_rows:
            oldest, _ = self._pending.popleft()
            self._pending_bytes -= len(oldest)

    async def decode(self) -> list[str]:
        """Decode the pending batches into the table and return the problems of batches that could not be decoded."""
        async with self._decoding:
            if not self._pending:
                return []
            last, bodies = self.seen, list(self._pending)
            batches, problems = await asyncio.to_thread(decode_latest, bodies, self._workflows, self._max_rows)
            # Remove bodies only after decoding, because the caller may be cancelled. Bodies that arrived during
            # decoding stay for the next call.
            for _ in range(len(self._pending) - (self.seen - last)):
                body, _ = self._pending.popleft()
                self._pending_bytes -= len(body)
            for batch in batches:
                self.add(batch)
        return problems

    def add(self, samples: DecodedSamples) -> int:
        """Add decoded samples to the table and return the number of new rows. Experiences that the table already has
        are skipped.
        """
        new = 0
        for uid, row in samples.rows.items():
            if uid in self._rows:
                continue
            new += 1
            self.number += 1
            self._rows[uid] = [self.number, *row], samples
        if new:
            self._decoded.append(samples)
            self._bytes += len(samples.body)
            self._trim()
        return new

    def _trim(self) -> None:
        while len(self._decoded) > 1 and (self._bytes > self._max_bytes or len(self._rows) > self._max_rows):
            oldest = self._decoded.popleft()
            self._bytes -= len(oldest.body)
            for uid in oldest.rows:
                if uid in self._rows and self._rows[uid][1] is oldest:
                    del self._rows[uid]

    def rows(self, after: int = 0) -> list[list[Any]]:
        """Return the rows with a number above ``after``, oldest first."""
        newest_first: list[list[Any]] = []
        for row, _ in reversed(self._rows.values()):
            if row[0] <= after:
                break
            newest_first.append(row)
        return newest_first[::-1]

    def body_of(self, uid: str) -> tuple[bytes, int] | None:
        """Return (the body that holds an experience, its index in the body), or None if it is no longer kept."""
        if uid not in self._rows:
            return None
        _, samples = self._rows[uid]
        return samples.body, list(samples.rows).index(uid)


def experience_at(body: bytes, index: int) -> Experience:
    """Return the experience at ``index`` of an encoded batch."""
    from trinity_mq.experience import ExperienceBatch

    return ExperienceBatch.decode(body).settle()[index]


def _row(experience: Experience, step: int | None, workflows: Mapping[str, str]) -> list[Any]:
    from trinity_mq.experience.rules import ENGINE

    eid = experience.eid
    versions = [(generation, of_step) for _, generation, of_step in experience.versions or ()]
    oldest = min(versions, default=None)
    texts = sorted({f"{generation}.{of_step}" for generation, of_step in versions})
    text = experience.response_text or ""
    return [
        eid.uid,
        step,
        eid.batch,
        eid.task,
        eid.run,
        eid.step,
        experience.taskset,
        workflows.get(experience.taskset or ""),
        None if experience.reward is None else round(experience.reward, 6),
        _mean(experience.advantages, experience.action_mask),
        experience.prompt_length,
        max(0, len(experience.tokens) - experience.prompt_length),
        experience.truncate_status,
        " ".join(texts) or None,
        None if step is None or oldest is None else max(0, step - 1 - oldest[1]),
        _mean(experience.logprobs, experience.action_mask),
        experience.info.get(ENGINE),
        text[:PREVIEW] + ("…" if len(text) > PREVIEW else ""),
    ]


def _mean(values: Tensor | None, mask: Tensor | None) -> float | None:
    """Return the mean over the trained tokens, or over all values if no token is trained. None: no values."""
    if values is None or not len(values):
        return None
    array = values.float().numpy()  # numpy needs a tenth of torch's time for many small arrays
    if mask is not None and len(mask) == len(values):
        trained = mask.numpy()
        array = array[trained] if trained.any() else array
    return round(float(array.mean()), 6)
