"""Requests to a generation engine and its answers; plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trinity_mq.messages import Version

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``n`` completions of one prompt."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    """0: the likeliest token."""
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a completion; they are kept in its token ids."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; its text is cut before them, its token ids are not."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Logprobs of given tokens."""

    token_ids: Sequence[int]
    """At least two."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response."""

    token_ids: list[int]
    """The end of sequence included, where it was sampled."""
    logprobs: list[float]
    """Logprob of each token: ``log_softmax(logits / temperature)`` before truncation; at temperature 0 untempered."""
    text: str
    """Without the end of sequence; other special tokens show."""
    finish_reason: FinishReason
    versions: tuple[tuple[int, int, int], ...] = ()
    """``(first token, generation, step)`` of each run of tokens, where weights may change while it is sampled."""
    stopped_by: str | None = None
    """The stop string before which the text is cut."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token as it is sampled."""

    request: int
    """Number of the request in its batch step."""
    choice: int
    """Number of the completion, among the request's ``n``, that it belongs to."""
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    """Set on the last token of a completion."""
    version: Version | None = None
    """Set on the first token that other weights sampled than the one before; of the first one, than those that the
    request began with."""


class GenerationListener(Protocol):
    """Listener of a batch step, called in the worker thread. Requests are numbered within the step."""

    def listens(self, request: int) -> bool:
        """Return whether the tokens of ``request`` are wanted one by one."""

    def left(self, request: int) -> bool:
        """Return whether nobody waits for ``request`` any more."""

    def sampled(self, tokens: list[Token]) -> None:
        """Take what one step sampled for those who listen."""

    def between(self, step: int) -> None:
        """Called before the model is asked for step ``step`` (from 0); may take its time, during which the weights may
        change, or raise to end the batch step.
        """
