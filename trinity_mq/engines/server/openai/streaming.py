"""Completions as a stream of server-sent events. A chunk holds the new tokens of one choice: one token, or several that
were sampled since the last chunk.

Server-sent events: WHATWG HTML, section 9.2. Chunks: OpenAI API reference, "chat completion chunk".
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.request import FinishReason, GenerationRequest, Token
from trinity_mq.engines.generation.stopping import Decode, cut, stop_in, without_stop_token
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.generation.token_stream import TokenStream
from trinity_mq.engines.server.openai.requests import ChatBody, CompletionBody
from trinity_mq.engines.server.openai.responses import (
    answer_fields,
    chat_logprobs,
    chat_message,
    text_logprobs,
    usage,
)
from trinity_mq.families.division import AnswerFlow, Delta, Marks
from trinity_mq.families.messages import THOUGHTS, Tools
from trinity_mq.messages import Version

UNFINISHED = "\ufffd"
"""Decoded form of the first bytes of a character whose other bytes are missing."""


_WINDOW, _LAST = 16, 4
"""A run of more than ``_WINDOW`` tokens whose text ends with an incomplete character is invalid; all but its last
``_LAST`` tokens are then final.
"""


class TextFlow:
    """Emits the thoughts and the content of an answer as far as they are final: no half characters, nothing that may
    become part of a tag, of a stop string or of a tool call.
    """

    def __init__(
        self,
        decode: Decode,
        marks: Marks | None = None,
        *,
        prompt_end: str | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        """Create the flow; without ``marks`` everything is content. Other arguments as for :class:`AnswerFlow`."""
        self._decode = decode
        self._flow = AnswerFlow(marks or Marks(), prompt_end, stops)
        self._ids: list[int] = []
        self._start = self._read = 0
        self._sent = [0, 0]
        """Characters of the thoughts and of the content that were emitted."""

    def add(self, token_ids: Sequence[int]) -> Delta:
        """Add tokens and return the text that has become final."""
        self._ids += token_ids
        before, now = self._decode([self._ids[self._start : self._read], self._ids[self._start :]])
        end = len(self._ids)
        if now.endswith(UNFINISHED) and end - self._start > _WINDOW:
            end -= _LAST
            [beginning] = self._decode([self._ids[self._start : end]])
            now = beginning if now.startswith(beginning) and end > self._read else before
        elif now.endswith(UNFINISHED):
            now = before
        if len(now) <= len(before):
            return Delta()
        # earlier tokens are decoded together with the new tokens, because some tokenizers join neighbours
        self._start, self._read = self._read, end
        delta = self._flow.add(now[len(before) :])
        self._sent = [sent + len(text) for sent, text in zip(self._sent, delta, strict=True)]
        return delta

    def finish(self, thoughts: str | None, content: str) -> Delta:
        """Return the rest of the whole ``thoughts`` and of the whole ``content``, which was not emitted yet."""
        return Delta(*(text[sent:] for text, sent in zip((thoughts or "", content), self._sent, strict=True)))


DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class _Choice:
    """Accumulates the sampled tokens of one choice."""

    flow: TextFlow
    token_ids: list[int] = field(default_factory=list)
    characters: int = 0
    """Length of the text decoded token by token, for text offsets."""


class Chunks:
    """Builds the chunks of one streamed request."""

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        request: GenerationRequest,
        codec: TextCodec,
        *,
        model: str,
        prompt_text: str,
        tools: Tools = None,
        on_malformed: Callable[[int], None] = lambda calls: None,
    ) -> None:
        """Prepare the chunks. If tools were offered, calls are moved from the text to ``tool_calls``; ``on_malformed``
        is called with the number of unreadable calls of each whole answer.
        """
        self._body, self._request, self._codec = body, request, codec
        self._prompt_text, self._tools, self._on_malformed = prompt_text, tools, on_malformed
        self._chat = isinstance(body, ChatBody)
        kind, prefix = ("chat.completion.chunk", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._frame = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        marks = codec.family.marks_of(tools) if self._chat else Marks()
        self._choices = [
            _Choice(TextFlow(codec.decode, marks, prompt_end=prompt_text, stops=request.stop)) for _ in range(request.n)
        ]

    def opening(self, version: Version) -> Iterator[dict[str, Any]]:
        """Yield the first chunk of every choice, with the role and the weight version."""
        for index in range(self._request.n):
            choice = self._choice(index, {"role": "assistant", "content": ""} if self._chat else "")
            prompt = {}
            if self._body.return_token_ids:
                # if the version changes during sampling, a later chunk names the first token of the new version
                choice |= {"token_ids": [], "token_logprobs": [], "weight_versions": [[0, *version]]}
                prompt = {"prompt_token_ids": list(self._request.prompt), "prompt_text": self._prompt_text}
                if not self._chat:
                    choice |= prompt
            yield self._frame | {"choices": [choice]} | (prompt if self._chat and index == 0 else {})

    def of(self, tokens: Sequence[Token]) -> Iterator[dict[str, Any]]:
        """Yield a chunk for each choice that ``tokens`` belong to."""
        by_choice: dict[int, list[Token]] = {}
        for token in tokens:
            by_choice.setdefault(token.choice, []).append(token)
        for index, news in by_choice.items():
            yield self._frame | {"choices": [self._choice_chunk(index, news)]}

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield a last chunk with the token usage, if the client requested the usage."""
        if self._body.stream_options.include_usage:
            sampled = sum(len(choice.token_ids) for choice in self._choices)
            yield self._frame | {"choices": [], "usage": usage(len(self._request.prompt), sampled)}

    def _choice_chunk(self, index: int, news: list[Token]) -> dict[str, Any]:
        state = self._choices[index]
        ids, logprobs = [token.token_id for token in news], [token.logprob for token in news]
        positions = enumerate(news, len(state.token_ids))
        changed = [[position, *token.version] for position, token in positions if token.version is not None]
        tops = [token.top_logprobs for token in news] if self._request.top_logprobs else []
        state.token_ids += ids
        if (ended := news[-1].finish_reason) is not None:
            choice = self._last_choice(index, ended)
        else:
            text = state.flow.add(ids)
            choice = self._choice(index, _chat_delta(text) if self._chat else text.content)
        if self._chat and self._body.logprobs:
            choice["logprobs"] = chat_logprobs(ids, logprobs, self._codec, tops)
        elif not self._chat and self._body.logprobs is not None:
            choice["logprobs"] = text_logprobs(ids, logprobs, self._codec, state.characters, tops)
            state.characters += sum(map(len, choice["logprobs"]["tokens"]))
        if self._body.return_token_ids:
            numbers = [None if token.is_constrained else token.logprob for token in news]
            choice |= {"token_ids": ids, "token_logprobs": numbers}
            choice |= {"weight_versions": changed} if changed else {}
        return choice

    def _last_choice(self, index: int, ended: FinishReason) -> dict[str, Any]:
        """Return the last chunk of a choice, with the text that was not emitted yet. Its tokens and their logprobs are
        not filled in.
        """
        state, stops = self._choices[index], self._request.stop
        [text] = self._codec.decode([without_stop_token(state.token_ids, self._request.stop_ids)])
        stop, text = stop_in(text, stops), cut(text, stops)
        fields: dict[str, Any] = {} if stop is None else {"stop_reason": stop}
        if not self._chat:
            return self._choice(index, state.flow.finish(None, text).content, ended) | fields
        answer = self._codec.read_answer(text, self._prompt_text, self._tools)
        self._on_malformed(answer.malformed)
        _, finish_reason = chat_message(answer, ended)
        delta = _chat_delta(state.flow.finish(answer.thoughts, answer.content))
        if answer.calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(answer.calls)]
        if self._body.return_token_ids:
            fields |= answer_fields(answer, text)
        return self._choice(index, delta, finish_reason) | fields

    def _choice(self, index: int, delta: Any, finish_reason: str | None = None) -> dict[str, Any]:
        content = {"delta": delta} if self._chat else {"text": delta}
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def _chat_delta(text: Delta) -> dict[str, Any]:
    return {"content": text.content, **({THOUGHTS: text.thoughts} if text.thoughts else {})}


async def send(
    request: web.Request, stream: TokenStream, chunks: Chunks, version: Version, headers: dict[str, str]
) -> web.StreamResponse:
    """Send the tokens of ``stream``. An error after the first byte becomes an event, because the HTTP status is already
    sent.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    await response.prepare(request)
    await response.write(_events(chunks.opening(version)))
    try:
        async for tokens in stream:
            await response.write(_events(chunks.of(tokens)))
    except ApiError as error:
        await response.write(_events([{"error": error.body()}]))
    else:
        await response.write(_events(chunks.closing()) + DONE)
    await response.write_eof()
    return response


def _events(chunks: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
