"""Samples tokens from rows of logits: inverts the cumulative distribution at a uniform random number of the request.

A request's random numbers do not depend on the rest of the batch, so a seeded request is reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 24
"""Maximum logits processed at once: with a large vocabulary, the intermediate results of all rows would take gigabytes.
"""

UNIFORMS_AT_ONCE = 64
"""Decode steps for which uniform numbers are drawn together. A different value changes the samples of a given seed."""


def choose(
    logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor, source: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the chosen token and its logprob for each sample.

    The logprob is ``log_softmax(logits / temperature)`` before truncation by top-p. At temperature 0 the most likely
    token is chosen, and its logprob is from the untempered distribution.

    Args:
        logits: ``[rows, vocabulary]``, any floating dtype.
        temperature: ``[rows]`` float32, at least 0.
        top_p: ``[rows]`` float32 in (0, 1].
        uniforms: ``[samples]`` float64 in [0, 1).
        source: ``[samples]`` int64, the row from which each sample is drawn. None: one sample per row, in order.

    Returns:
        Token ids int64 ``[samples]`` and logprobs float32 ``[samples]``.
    """
    max_rows = max(1, MAX_ELEMENTS // logits.shape[-1])
    if len(uniforms) <= max_rows:
        return _choose(logits, temperature, top_p, uniforms, source)
    parts = []
    for start in range(0, len(uniforms), max_rows):
        chunk = slice(start, start + max_rows)
        if source is None:
            parts.append(_choose(logits[chunk], temperature[chunk], top_p[chunk], uniforms[chunk], None))
        else:
            rows, row_of_sample = torch.unique(source[chunk], return_inverse=True)
            parts.append(_choose(logits[rows], temperature[rows], top_p[rows], uniforms[chunk], row_of_sample))
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _choose(
    logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor, source: Tensor | None
) -> tuple[Tensor, Tensor]:
    def of_samples(values: Tensor) -> Tensor:
        return values if source is None else values[source]

    logprobs = tempered_logprobs(logits, temperature)
    greedy = temperature == 0
    if bool(greedy.all()):
        tokens = of_samples(logprobs.argmax(-1))
    else:
        probabilities = logprobs.exp()
        if bool((top_p < 1).any()):
            probabilities = _nucleus(probabilities, top_p)
        cumulative = of_samples(probabilities.cumsum(-1, dtype=torch.float64))
        total = cumulative[:, -1]
        # strictly below the total, so that rounding never points behind the last token
        target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # a row of NaN must not fail the other rows
        if bool(greedy.any()):
            tokens = torch.where(of_samples(greedy), of_samples(logprobs.argmax(-1)), tokens)
    if source is None:
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
    return tokens, logprobs[source, tokens]


class LogitRules:
    """Changes of logits that requests ask for: biases, and stop tokens that are not sampled yet.

    Args:
        biases: For each request, the numbers to add to logits, by token id.
        min_tokens: For each request, the number of tokens that must be sampled before a stop token.
        stop_ids: For each request, its stop tokens.
        vocabulary: Size of the vocabulary; larger token ids have no effect.
        device: Device of the logits.
    """

    def __init__(
        self,
        biases: Sequence[Mapping[int, float]],
        min_tokens: Sequence[int],
        stop_ids: Sequence[Collection[int]],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        entries = [
            (number, token, value)
            for number, bias in enumerate(biases)
            for token, value in bias.items()
            if token < vocabulary
        ]
        held = [
            (number, token)
            for number, (count, tokens) in enumerate(zip(min_tokens, stop_ids, strict=True))
            if count
            for token in tokens
            if token < vocabulary
        ]
        self._bias = _table([entry[:2] for entry in entries], [entry[2] for entry in entries], device)
        self._held = _table(held, [-math.inf] * len(held), device)
        self._min_tokens = torch.tensor(min_tokens, device=device)
        self._last = max(min_tokens, default=0)

    def apply(self, logits: Tensor, requests: Tensor, step: int) -> Tensor:
        """Return the logits from which token ``step`` (from 0) is sampled.

        Args:
            logits: ``[rows, vocabulary]``.
            requests: ``[rows]`` int64, the request of each row.
            step: Number of tokens sampled so far.
        """
        logits = _added(logits, requests, self._bias)
        if step < self._last:
            early = self._min_tokens[requests] > step
            logits = _added(logits, torch.where(early, requests, -torch.ones_like(requests)), self._held)
        return logits


class _Table(NamedTuple):
    """Numbers to add to logits, with one entry per pair of request and token."""

    requests: Tensor
    tokens: Tensor
    values: Tensor


def _table(places: Sequence[tuple[int, int]], values: Sequence[float], device: torch.device) -> _Table | None:
    if not places:
        return None
    requests, tokens = torch.tensor(places, device=device).unbind(1)
    return _Table(requests, tokens, torch.tensor(values, dtype=torch.float32, device=device))


def _added(logits: Tensor, requests: Tensor, table: _Table | None) -> Tensor:
    """Return logits with the table's values added in the rows of its requests."""
    if table is None:
        return logits
    rows, entries = (requests[:, None] == table.requests[None, :]).nonzero(as_tuple=True)
    if not len(rows):
        return logits
    changed = logits.float() if logits.dtype != torch.float32 else logits.clone()
    return changed.index_put_((rows, table.tokens[entries]), table.values[entries], accumulate=True)


def likeliest(logits: Tensor, temperature: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` likeliest tokens of each row and their logprobs as :func:`choose` reports them, the
    likeliest first: int64 and float32 ``[rows, count]``.
    """
    values, tokens = tempered_logprobs(logits, temperature).topk(min(count, logits.shape[-1]), dim=-1)
    return tokens, values


def tempered_logprobs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return ``log_softmax(logits / temperature)`` in float32 for each row; a temperature of 0 counts as 1."""
    divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    return torch.log_softmax(logits.float() / divisor[:, None], dim=-1)


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose sum reaches ``top_p`` (Holtzman et al., arXiv
    1904.09751).
    """
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    nucleus_values = torch.where(before < top_p[:, None].double(), ordered, torch.zeros_like(ordered))
    nucleus_values[:, 0] = ordered[:, 0]  # the most likely token, however small top_p is
    nucleus = torch.zeros_like(probabilities).scatter_(-1, order, nucleus_values)
    return torch.where((top_p < 1)[:, None], nucleus, probabilities)


class Uniforms:
    """Uniform numbers in [0, 1). Each request has its own generator; numbers are drawn for a block of decode steps at a
    time.
    """

    def __init__(self, seeds: Sequence[int | None], counts: Sequence[int], device: torch.device) -> None:
        """Seed the generators: ``counts[i]`` rows draw from the generator with ``seeds[i]``. None: seeded by the
        system.
        """
        self._counts = counts
        self._device = device
        self._generators = [torch.Generator() for _ in seeds]
        for generator, seed in zip(self._generators, seeds, strict=True):
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
        self._block = torch.empty(0)

    def step(self, number: int) -> Tensor:
        """Return the numbers of decode step ``number``, float64 ``[rows]``. Call this for the steps in order."""
        column = number % UNIFORMS_AT_ONCE
        if column == 0:
            drawn = [
                torch.rand(count, UNIFORMS_AT_ONCE, dtype=torch.float64, generator=generator)
                for count, generator in zip(self._counts, self._generators, strict=True)
            ]
            self._block = torch.cat(drawn).to(self._device)
        return self._block[:, column]
