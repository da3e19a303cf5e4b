"""Requests to a generation engine and its answers: plain data without torch."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trinity_mq.messages import Version

FinishReason = Literal["stop", "length"]
Alternatives = Sequence[tuple[int, float]]
"""Likeliest tokens at the place of a token, the likeliest first: token id and logprob."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request for ``n`` completions of one prompt."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    """Divisor of the logits. 0: always the most likely token."""
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end a completion. They are kept in its token ids."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. The completion's text is cut before them; its token ids are not cut."""
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Numbers added to logits before the division by the temperature, by token id."""
    min_tokens: int = 0
    """Minimum number of tokens: until it is reached, ``stop_ids`` are not sampled. It does not hold back stop strings.
    """
    top_logprobs: int = 0
    """Number of likeliest tokens to return for each token."""
    grammar: str = ""
    """Structural tag of the package xgrammar, as JSON: only texts of this form are sampled. Empty: any text."""
    marks_constrained: bool = False
    """True if the request wants :attr:`Completion.constrained`."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Request for the logprobs of given tokens."""

    token_ids: Sequence[int]
    """Token ids, at least two."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that a mixture-of-experts model chose for each token of a prompt and its response, except the last
    token, which the model has not read.
    """

    shape: tuple[int, int, int]
    """Tokens, layers with a router, experts per token."""
    data: bytes
    """Numbers of the experts, one byte each, in the order of the shape."""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form for an API answer: ``shape``, and ``data`` in base64."""
        return {"shape": list(self.shape), "data": base64.b64encode(self.data).decode()}


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response."""

    token_ids: list[int]
    """Sampled token ids, including the end-of-sequence token if it was sampled."""
    logprobs: list[float]
    """Logprob of each token: ``log_softmax((logits + bias) / temperature)`` among the tokens that the request allows,
    before truncation; at temperature 0 untempered.
    """
    text: str
    """Text without the end-of-sequence token; other special tokens are included."""
    finish_reason: FinishReason
    versions: tuple[tuple[int, int, int], ...] = ()
    """``(first token, generation, step)`` of each stretch of tokens that was sampled under one version. May be empty if
    one version sampled all tokens.
    """
    stopped_by: str | None = None
    """The stop string before which the text is cut. None: the text is not cut."""
    routed_experts: RoutedExperts | None = None
    """Set if the engine reports the experts of its model."""
    top_logprobs: Sequence[Alternatives] = ()
    """Likeliest tokens at the place of each token, if the request wants them; logprobs as in ``logprobs``."""
    constrained: tuple[int, ...] = ()
    """Positions of tokens that the grammar of the request decided, so that their logprobs are not the model's."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token as it is sampled."""

    request: int
    """Number of the request in its batch step."""
    choice: int
    """Index of the token's completion among the ``n`` completions of the request."""
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    """Set on the last token of a completion."""
    version: Version | None = None
    """Weight version, set only on the first token under changed weights. For the first token of a request, changed
    means other than the version with which the request began.
    """
    top_logprobs: Alternatives = ()
    """Likeliest tokens at the place of this token; see :attr:`Completion.top_logprobs`."""
    is_constrained: bool = False
    """True if the grammar of the request decided this token; see :attr:`Completion.constrained`."""


class GenerationListener(Protocol):
    """Listener of a batch step, called in the worker thread. Requests are numbered within the batch step."""

    def listens(self, request: int) -> bool:
        """Return whether the tokens of ``request`` are wanted one at a time."""

    def left(self, request: int) -> bool:
        """Return whether no caller waits for ``request`` any more."""

    def sampled(self, tokens: list[Token]) -> None:
        """Receive the tokens of one decode step for the requests that listen."""

    def between(self, step: int) -> None:
        """Handle the point before decode step ``step`` (from 0). May block while the weights change, or raise to end
        the batch step.
        """
