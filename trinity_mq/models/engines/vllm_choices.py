"""A streamed answer of vLLM put together, choice by choice, with stop strings found as they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.models.engines import vllm_api as api
from trinity_mq.models.engines.feeds import Feed
from trinity_mq.models.engines.requests import FinishReason, GenerationRequest, Token
from trinity_mq.models.engines.stopping import TAIL_SLACK, Decode


@dataclass(slots=True)
class _Row:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None
    versions: tuple[tuple[int, int, int], ...] = ()


class Choices:
    """Takes the events of one request in; what is sampled beyond a stop string is left out."""

    def __init__(self, request: GenerationRequest, decode: Decode, feed: Feed | None) -> None:
        self._stops, self._decode, self._feed = request.stop, decode, feed
        self._tail = max(map(len, request.stop), default=0) + TAIL_SLACK
        self._rows = [_Row() for _ in range(request.n)]

    @property
    def all_ended(self) -> bool:
        """No choice wants more tokens."""
        return all(row.ended for row in self._rows)

    def take(self, event: Mapping[str, Any]) -> None:
        """Add the tokens of one event, and pass them on to who listens."""
        news: list[Token] = []
        for part in event["choices"]:
            row = self._rows[part["index"]]
            row.versions = api.read_versions(part) or row.versions
            if row.ended:
                continue
            tokens = list(zip(part["token_ids"] or (), api.read_logprobs(part), strict=True))
            for place, (token, logprob) in enumerate(tokens, 1):
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                if self._stops and self._complete(row):
                    row.ended = "stop"
                elif place == len(tokens):
                    row.ended = part["finish_reason"]
                news.append(Token(0, part["index"], token, logprob, _reason(row.ended)))
                if row.ended:
                    break
            if not tokens:
                row.ended = part["finish_reason"]
        if news and self._feed is not None:
            self._feed.put(news)

    def result(self) -> list[api.Choice]:
        """Return what has come."""
        return [
            api.Choice(
                row.token_ids,
                row.logprobs,
                stopped=row.ended == "stop",
                aborted=row.ended == "abort",
                versions=tuple(span for span in row.versions if span[0] < len(row.token_ids)),
            )
            for row in self._rows
        ]

    def _complete(self, row: _Row) -> bool:
        [text] = self._decode([row.token_ids[-self._tail :]])
        return any(stop in text for stop in self._stops)


def _reason(ended: str | None) -> FinishReason | None:
    if ended is None:
        return None
    return "stop" if ended == "stop" else "length"
