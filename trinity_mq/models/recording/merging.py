"""Merges turns of a conversation into one experience where each prompt continues the previous tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED, SINGLE_TURN, Versions
from trinity_mq.models.recording.beginnings import TOKEN_BYTES, Beginnings, new_state, token_bytes

T = TypeVar("T")


class TokenDigest:
    """Digest of a sequence of tokens. Two digests are equal if and only if the sequences and the temperatures are
    equal.

    Args:
        state: Digest of the tokens.
        length: Number of tokens.
    """

    def __init__(self, state: hashlib.blake2b, length: int) -> None:
        self.state, self.length = state, length

    @classmethod
    def empty(cls, temperature: float | None) -> TokenDigest:
        """Return the digest of an empty sequence at a sampling temperature."""
        return cls(new_state(repr(temperature).encode()), 0)

    def extended(self, tokens: Sequence[int] | Tensor) -> TokenDigest:
        """Return the digest of this sequence followed by ``tokens``."""
        state = self.state.copy()
        state.update(_as_bytes(tokens))
        return TokenDigest(state, self.length + len(tokens))


class TokenPrefixes(Generic[T]):
    """Token sequences, each with an item. Finds the longest sequence with which a prompt begins, in time linear in the
    prompt and in the number of different lengths.
    """

    def __init__(self) -> None:
        self._beginnings: Beginnings[T] = Beginnings()

    def add(self, sequence: TokenDigest, item: T) -> None:
        """Add a sequence."""
        self._beginnings.add(sequence.length * TOKEN_BYTES, sequence.state.digest(), item)

    def remove(self, sequence: TokenDigest, item: T) -> None:
        """Remove a sequence that was added."""
        self._beginnings.remove(sequence.length * TOKEN_BYTES, sequence.state.digest(), item)

    def longest(self, start: TokenDigest, tokens: Sequence[int] | Tensor) -> list[T]:
        """Return the items of the longest sequence with which the prompt begins. Empty: the prompt does not begin with
        any sequence.

        Args:
            start: Beginning of the prompt. Only sequences longer than ``start`` count.
            tokens: The remaining tokens of the prompt.
        """
        matches = self._beginnings.of(_as_bytes(tokens), start.state, start.length * TOKEN_BYTES)
        return matches[-1] if matches else []


def _as_bytes(tokens: Sequence[int] | Tensor) -> bytes:
    return tokens.numpy().tobytes() if isinstance(tokens, Tensor) else token_bytes(tokens)


def merge_turns(experiences: Iterable[Experience]) -> list[Experience]:
    """Return ``experiences`` with each turn appended to the turn that it continues.

    A turn continues an earlier turn if its prompt begins with exactly the earlier turn's prompt and response tokens,
    and both were sampled at the same temperature. A turn is continued once: of several turns that branch off it, the
    first is appended and the others stay separate, because otherwise the common part would be trained on twice. The
    action mask of a merged experience covers the sampled tokens; tokens between the turns are masked and have logprob
    0. ``info["turns"]`` is the number of turns. The id comes from the first turn; response text, reward, info and
    metrics come from the last turn. Experiences of other types, and placeholders for prompts that are too long, are
    returned unchanged.
    """
    rows: list[list[Experience]] = []
    ends: TokenPrefixes[int] = TokenPrefixes()
    digests: list[TokenDigest | None] = []
    for experience in experiences:
        if experience.experience_type != SINGLE_TURN or experience.truncate_status == PROMPT_TRUNCATED:
            rows.append([experience])
            digests.append(None)
            continue
        start, tokens = TokenDigest.empty(experience.temperature), experience.tokens
        continued = ends.longest(start, tokens[: experience.prompt_length])
        if continued:
            row = continued[0]
            previous = digests[row]
            assert previous is not None  # rows without a digest cannot be continued
            ends.remove(previous, row)
            digest = previous.extended(tokens[previous.length :])
            rows[row].append(experience)
            digests[row] = digest
        else:
            row, digest = len(rows), start.extended(tokens)
            rows.append([experience])
            digests.append(digest)
        ends.add(digest, row)
    return [row[0] if len(row) == 1 else join_turns(row) for row in rows]


def join_turns(turns: Sequence[Experience], overlaps: Sequence[int] | None = None) -> Experience:
    """Join consecutive turns to one experience, with the fields that :func:`merge_turns` describes.

    Args:
        turns: At least two turns, each continuing the turn before it.
        overlaps: For each turn after the first, the number of tokens at the beginning of its prompt that end the turns
            before it, at least 1. None: each prompt holds all tokens of the turns before it.
    """
    first, last = turns[0], turns[-1]
    overlaps = [turn.tokens.shape[0] for turn in turns[:-1]] if overlaps is None else overlaps
    tokens, experts = [first.tokens], [first.routed_experts]
    shifts = [0]
    """Distance of each turn's tokens from their place in the result."""
    size = first.tokens.shape[0]
    for turn, overlap in zip(turns[1:], overlaps, strict=True):
        shifts.append(size - overlap)
        tokens.append(turn.tokens[overlap:])
        experts.append(None if turn.routed_experts is None else turn.routed_experts[overlap - 1 :])
        size += turn.tokens.shape[0] - overlap
    starts = [turn.prompt_length + shift - first.prompt_length for turn, shift in zip(turns, shifts, strict=True)]
    response = size - first.prompt_length
    mask, logprobs = torch.zeros(response, dtype=torch.bool), torch.zeros(response)
    for turn, start in zip(turns, starts, strict=True):
        sampled = slice(start, start + turn.tokens.shape[0] - turn.prompt_length)
        mask[sampled] = _present(turn.action_mask)
        logprobs[sampled] = _present(turn.logprobs)
    present_experts = [part for part in experts if part is not None]
    return Experience(
        eid=first.eid,
        tokens=torch.cat(tokens),
        logprobs=logprobs,
        action_mask=mask,
        prompt_length=first.prompt_length,
        reward=last.reward,
        prompt_text=first.prompt_text,
        response_text=last.response_text,
        truncate_status=last.truncate_status,
        versions=_versions(turns, starts),
        temperature=first.temperature,
        info={**last.info, "turns": len(turns)},
        metrics=last.metrics,
        # each row of experts comes from the first turn that read its token
        routed_experts=torch.cat(present_experts) if len(present_experts) == len(turns) else None,
    )


def _present(column: Tensor | None) -> Tensor:
    assert column is not None  # recorded experiences have both columns
    return column


def _versions(turns: Sequence[Experience], starts: Sequence[int]) -> Versions | None:
    """Return the run-length encoded versions of all turns as one list; None if the versions of a turn are not known."""
    rows: Versions = []
    for turn, start in zip(turns, starts, strict=True):
        if turn.versions is None:
            return None
        for first, generation, step in turn.versions:
            if not rows or rows[-1][1:] != (generation, step):
                rows.append((start + first, generation, step))
    return rows
