"""Assembles a streamed answer of vLLM choice by choice, and detects stop strings as tokens arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_mq.engines.generation.request import Completion, FinishReason, GenerationRequest, Token
from trinity_mq.engines.generation.stopping import TAIL_SLACK, Decode
from trinity_mq.engines.generation.token_stream import TokenStream
from trinity_mq.engines.vllm import api
from trinity_mq.messages import Version

SEED_MASK = (1 << 63) - 1


@dataclass(slots=True)
class _Row:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None
    versions: tuple[tuple[int, int, int], ...] = ()
    by: Version | None = None
    """Weight version of the last token, if the version may change during sampling."""


class Choices:
    """Collects the events of one request; tokens beyond a stop string are left out.

    A request that is cut off can continue: :meth:`rest` returns the requests for its remaining tokens.
    """

    def __init__(self, request: GenerationRequest, decode: Decode, stream: TokenStream | None) -> None:
        self._stops, self._decode, self._stream = request.stop, decode, stream
        self._tail = max(map(len, request.stop), default=0) + TAIL_SLACK
        self._request = request
        self._rows = [_Row() for _ in range(request.n)]
        self._by: Version | None = None
        self.strayed = False
        """True if a token has another version than the version of the last :meth:`begin`."""

    @property
    def all_ended(self) -> bool:
        """Whether no choice wants more tokens."""
        return all(row.ended for row in self._rows)

    @property
    def aborted(self) -> bool:
        """Whether vLLM aborted a choice."""
        return any(row.ended == "abort" for row in self._rows)

    @property
    def streamed(self) -> bool:
        """Whether the answer is streamed to a listener."""
        return self._stream is not None

    @property
    def tokens(self) -> int:
        """Number of tokens sampled so far."""
        return sum(len(row.token_ids) for row in self._rows)

    def begin(self, version: Version) -> None:
        """Stamp all further tokens with ``version``; listeners receive it before the next token."""
        for row in self._rows:
            row.by = row.by or version
            row.versions = ()
        if self._by is None and self._stream is not None:
            self._stream.put(version)
        self._by = version

    def ended(self, index: int | None) -> bool:
        """Return whether choice ``index`` is complete; None: whether all choices are."""
        return self.all_ended if index is None else self._rows[index].ended is not None

    def rest(self) -> list[tuple[int | None, GenerationRequest]]:
        """Return the remaining requests: the whole request while no token has come, then one request per unfinished
        choice from its current end.
        """
        if not self.tokens and not any(row.ended for row in self._rows):
            return [(None, self._request)]
        return [(index, self._continued(index, row)) for index, row in enumerate(self._rows) if not row.ended]

    def _continued(self, index: int, row: _Row) -> GenerationRequest:
        original, length = self._request, len(row.token_ids)
        # the same seed would draw the same numbers again
        seed = None if original.seed is None else (original.seed + (length << 24) + (index << 48)) & SEED_MASK
        prompt = [*original.prompt, *row.token_ids]
        return replace(original, prompt=prompt, max_tokens=original.max_tokens - length, n=1, seed=seed)

    def take(self, event: Mapping[str, Any], only: int | None = None) -> None:
        """Add the tokens of one event, and pass them on to the listener. ``only`` is the index of the choice if it was
        requested alone.
        """
        news: list[Token] = []
        for part in event["choices"]:
            index = part["index"] if only is None else only
            row = self._rows[index]
            row.versions = api.read_versions(part) or row.versions
            self.strayed |= self._by is not None and any(run[1:] != self._by for run in row.versions)
            if row.ended:
                continue
            tokens = list(zip(part["token_ids"] or (), api.read_logprobs(part), strict=True))
            for position, (token, logprob) in enumerate(tokens, 1):
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                if self._stops and self._complete(row):
                    row.ended = "stop"
                elif position == len(tokens):
                    row.ended = part["finish_reason"]
                news.append(Token(0, index, token, logprob, _reason(row.ended), self._change(row)))
                if row.ended:
                    break
            if not tokens:
                row.ended = part["finish_reason"]
        if news and self._stream is not None:
            self._stream.put(news)

    def result(self) -> list[api.VllmCompletion]:
        """Return the choices collected so far."""
        return [
            api.VllmCompletion(
                row.token_ids,
                row.logprobs,
                stopped=row.ended == "stop",
                aborted=row.ended == "abort",
                versions=tuple(span for span in row.versions if span[0] < len(row.token_ids)),
            )
            for row in self._rows
        ]

    def _change(self, row: _Row) -> Version | None:
        """Return the version of the newest token if it differs from the version of the token before it."""
        if row.by == self._by:
            return None
        row.by = self._by
        return self._by

    def _complete(self, row: _Row) -> bool:
        [text] = self._decode([row.token_ids[-self._tail :]])
        return any(stop in text for stop in self._stops)


def _reason(ended: str | None) -> FinishReason | None:
    if ended is None:
        return None
    return "stop" if ended == "stop" else "length"


def stream_tokens(completions: Sequence[Completion], announced: Version) -> list[Token]:
    """Return the tokens that one stream would have delivered. ``announced`` is the version announced at its start."""
    tokens = []
    for number, completion in enumerate(completions):
        changes = {first: (generation, step) for first, generation, step in completion.versions}
        last = len(completion.token_ids) - 1
        for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            version = changes.get(position)
            if position == 0 and version == announced:
                version = None
            ended = completion.finish_reason if position == last else None
            tokens.append(Token(0, number, token, logprob, ended, version))
    return tokens
