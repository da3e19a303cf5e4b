"""Stop strings: detected while sampling, cut from the text afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TAIL_SLACK = 16
"""Tokens decoded beyond one token per character of the longest stop string. Some tokens decode to no character."""

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


class StopStrings:
    """Detects stop strings in the sampled text of rows that have stop strings. Decodes only the end of each row's
    tokens.
    """

    def __init__(self, stops: Sequence[tuple[str, ...]], decode: Decode) -> None:
        """Create the detector. ``stops[row]`` holds the stop strings of a row; it is empty for rows without stop
        strings.
        """
        self._stops = stops
        self._decode = decode
        self._sampled: dict[int, list[int]] = {row: [] for row, strings in enumerate(stops) if strings}

    def __call__(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Add the tokens that ``rows`` just sampled. Return True for rows in which a stop string is complete."""
        watched = [
            (position, row, token)
            for position, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True))
            if row in self._sampled
        ]
        tails = []
        for _, row, token in watched:
            self._sampled[row].append(token)
            tails.append(self._sampled[row][-(max(map(len, self._stops[row])) + TAIL_SLACK) :])
        hits = torch.zeros(len(rows), dtype=torch.bool)
        for (position, row, _), tail in zip(watched, self._decode(tails), strict=True):
            hits[position] = any(stop in tail for stop in self._stops[row])
        return hits.to(rows.device)


def stop_in(text: str, stops: Sequence[str]) -> str | None:
    """Return the stop string at which :func:`cut` cuts ``text``, or None without a cut. If several stop strings
    begin there, return the shortest.
    """
    positions = sorted((position, len(stop), stop) for stop in stops if (position := text.find(stop)) >= 0)
    return positions[0][2] if positions else None


def cut(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first stop string in it."""
    positions = [position for position in (text.find(stop) for stop in stops) if position >= 0]
    return text[: min(positions)] if positions else text


def without_stop_token(token_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Return ``token_ids`` without a final end-of-sequence token, which belongs to the tokens but not to the text."""
    return token_ids[:-1] if token_ids and token_ids[-1] in stop_ids else token_ids
