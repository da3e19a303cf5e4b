"""OpenAI-compatible routes for chat, completions and models, and our own routes: tokenize, logprobs, and groups of
requests (:mod:`trinity_mq.models.group_format`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog
from aiohttp import web
from multidict import CIMultiDict

from trinity_mq.config.switches import SWITCH_FIELDS, SwitchError
from trinity_mq.engines.api_errors import ApiError, bad_request
from trinity_mq.engines.generation.batch_step import StaticBatcher
from trinity_mq.engines.generation.request import Completion, GenerationRequest, ScoreRequest
from trinity_mq.engines.generation.text import Prompt, TextCodec, TextError
from trinity_mq.engines.server.http_server import json_object
from trinity_mq.engines.server.openai.requests import (
    ChatBody,
    CompletionBody,
    SamplingBody,
    ScoreBody,
    TokenizeBody,
    checked,
    parse,
    request_of,
)
from trinity_mq.engines.server.openai.responses import chat_choice, envelope, text_choice
from trinity_mq.engines.server.openai.streaming import Chunks, send
from trinity_mq.engines.state import EngineState
from trinity_mq.families.messages import Tools, read_messages, read_tools
from trinity_mq.messages import Version
from trinity_mq.models.group_format import (
    CONTENT_TYPE,
    GROUP_PATH,
    GROUPS_HEADER,
    GroupedAnswer,
    GroupedRequest,
    pack_answer,
    pack_body,
    unpack_requests,
)
from trinity_mq.runtime.http import BodyReader, ReaderBusy, read_body
from trinity_mq.telemetry.trace import span, works_for

T = TypeVar("T")
PIN_HEADER = "X-TMQ-Version"
LOGPROBS_HEADER, LOGPROBS_AS_NUMBERS = "X-TMQ-Logprobs", "numbers"
"""Request header with which our own clients drop ``logprobs`` and its token texts, because ``token_logprobs`` holds the
same numbers.
"""
LONGEST_NUMBER = 18
"""Maximum digits of a number in :data:`PIN_HEADER`."""
SMALL_BODY = 4096
"""Size in bytes up to which the template and the tokenizer process a request in a few milliseconds at most."""
SEED_MASK = (1 << 63) - 1
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


log = structlog.get_logger(__name__)
Answering = Callable[[str, Mapping[str, str], Mapping[str, Any]], Awaitable[tuple[bytes, Version]]]
"""Answers one request from its path, headers and body. Returns a packed body and its version; raises ApiError."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """A parsed request to :data:`CHAT`."""

    body: ChatBody
    text: str
    """Text of the prompt."""
    tools: Sequence[dict[str, Any]]
    wanted: GenerationRequest


@dataclass(frozen=True, slots=True)
class _Completion:
    """A parsed request to :data:`COMPLETIONS`."""

    body: CompletionBody
    prompts: Sequence[tuple[str, list[int]]]
    """Text and token ids of each prompt."""
    wanted: Sequence[GenerationRequest]


class OpenAIApi:
    """The routes under ``/v1``."""

    def __init__(
        self,
        batcher: StaticBatcher,
        state: EngineState,
        generator: Any,
        *,
        name: str,
        model_path: str,
        max_response_tokens: int,
        groups: bool = False,
    ) -> None:
        """Create the routes, which answer with samples of ``batcher``.

        Args:
            batcher: Gathers requests and samples their answers.
            state: State of the engine; decides whether a request can be served.
            generator: The model; its tokenizer and limits are used here.
            name: Name of the model in requests.
            model_path: Folder of the model.
            max_response_tokens: Maximum tokens of a response to a request without ``max_tokens``.
            groups: Whether to offer the route for groups of requests; for batchers that sample the requests of a group
                together anyway.
        """
        self._groups = groups
        self._reader = BodyReader(SMALL_BODY)
        self._batcher, self._state, self._generator = batcher, state, generator
        self._codec: TextCodec = generator.codec
        self._max_model_len: int = generator.max_model_len
        self._vocabulary: int = generator.vocabulary
        self._name, self._model_path, self._max_response_tokens = name, model_path, max_response_tokens
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post(CHAT, self.chat),
            web.post(COMPLETIONS, self.completions),
            web.post("/v1/tokenize", self.tokenize),
            web.post("/v1/logprobs", self.logprobs),
            web.get("/v1/models", self.models),
            *([web.post(GROUP_PATH, self.group)] if self._groups else []),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        pin = self._check_admission(request.headers)
        received = await read_body(request)
        works_for(request.headers)
        chat = await self._read(
            len(received), lambda: self._chat(json_object(received), request.headers, len(received))
        )
        if chat.body.stream:
            return await self._streamed(request, chat.body, chat.wanted, pin, chat.text, tools=chat.tools)
        [(completions, version)] = await self._batcher.generate([chat.wanted], pin)
        with span("encode answer") as traced:
            response = self._json(self._chat_answer(chat, completions, version), version)
            traced.size = len(response.text or "")
        return response

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer a request to continue prompts."""
        pin = self._check_admission(request.headers)
        received = await read_body(request)
        works_for(request.headers)
        completion = await self._read(len(received), lambda: self._completion(json_object(received), request.headers))
        if completion.body.stream:
            if len(completion.prompts) > 1:
                raise bad_request(
                    f"stream=true with {len(completion.prompts)} prompts; stream one prompt a request", "prompt"
                )
            text, _ = completion.prompts[0]
            return await self._streamed(request, completion.body, completion.wanted[0], pin, text, tools=None)
        return self._json(*await self._completion_answer(completion, pin))

    async def group(self, request: web.Request) -> web.StreamResponse:
        """Answer a group of requests."""
        return await answer_group(request, self.answer, version_header)

    async def answer(self, path: str, headers: Mapping[str, str], fields: Mapping[str, Any]) -> tuple[bytes, Version]:
        """Answer one request of a group without streaming; return the packed body and the version that sampled it.

        Args:
            path: Route of the request.
            headers: Headers of the request.
            fields: Body of the request.

        Raises:
            ApiError: The request cannot be served, with the same errors as outside a group.
        """
        pin = self._check_admission(headers)
        if fields.get("stream"):
            raise bad_request("stream=true in a group; stream with a request of its own", "stream")
        works_for(headers)
        size = len(pack_body(fields))
        if path == COMPLETIONS:
            completion = await self._read(size, lambda: self._completion(fields, headers))
            answer, version = await self._completion_answer(completion, pin)
            return pack_body(answer), version
        if path != CHAT:
            raise ApiError(404, f"no {path} in a group, wanted {CHAT} or {COMPLETIONS}", code="http_error")
        chat = await self._read(size, lambda: self._chat(fields, headers, size))
        [(completions, version)] = await self._batcher.generate([chat.wanted], pin)
        with span("encode answer") as traced:
            packed = pack_body(self._chat_answer(chat, completions, version))
            traced.size = len(packed)
        return packed, version

    def _chat(self, fields: Mapping[str, Any], headers: Mapping[str, str], size: int) -> _Chat:
        with span("parse request", size=size):
            return self._parse_chat(request_of(fields, ChatBody), headers)

    def _parse_chat(self, body: ChatBody, headers: Mapping[str, str]) -> _Chat:
        if headers.get(LOGPROBS_HEADER) == LOGPROBS_AS_NUMBERS and body.return_token_ids:
            body.logprobs = False
        tools = body.offered_tools()
        messages, beginning = body.split_continued(checked(read_messages, body.messages))
        switches = None if body.model_fields_set.isdisjoint(SWITCH_FIELDS) else self._switches(body, tools)
        limit, before = self._allowed(body), self._past(body, len(messages))

        def rendered(messages: list[dict[str, Any]], beginning: str = "") -> Prompt:
            return self._codec.prompt(
                messages,
                tools,
                switches,
                before=before,
                messages_before=body.continue_messages,
                beginning=beginning,
                limit=limit,
            )

        # a message has at least one token, so a prefix already shows that the prompt is too long, in less time
        if len(messages) > limit:
            self._check_prompt(self._text(lambda: rendered(messages[: limit + 1])).token_ids, limit, "prompt")
        prompt = self._text(lambda: rendered(messages, beginning))
        request = self._request(body, prompt.token_ids, body.max_completion_tokens or body.max_tokens, body.seed)
        request = replace(request, top_logprobs=body.top_logprobs if body.logprobs else 0)
        # most requests have none of these options
        is_plain = body.tool_choice in ("auto", "none") and body.parallel_tool_calls and not body.response_format
        if not is_plain and (form := body.answer_form(tools)) is not None:
            grammar = self._generator.grammar_of(form, prompt.text)
            request = replace(request, grammar=grammar, marks_constrained=body.return_token_ids)
        return _Chat(body, prompt.text, tools, request)

    def _past(self, body: ChatBody, messages: int) -> list[int]:
        """Return the tokens that the prompt should begin with; none if they leave no room for later messages."""
        if body.continue_messages and not body.continue_tokens:
            raise bad_request(
                "continue_messages needs continue_tokens, the tokens of these messages", "continue_messages"
            )
        if body.continue_messages >= messages:
            raise bad_request(
                f"continue_messages={body.continue_messages} leaves no later message: the request has {messages}",
                "continue_messages",
            )
        if len(body.continue_tokens) >= self._max_model_len:
            return []
        if body.continue_tokens:
            self._check_prompt(body.continue_tokens, self._max_model_len, "continue_tokens")
        return body.continue_tokens

    def _chat_answer(self, chat: _Chat, completions: Sequence[Completion], version: Version) -> dict[str, Any]:
        answers = [self._codec.read_answer(completion.text, chat.text, chat.tools) for completion in completions]
        choices = [
            chat_choice(number, completion, answer, chat.body, version, self._codec)
            for number, (completion, answer) in enumerate(zip(completions, answers, strict=True))
        ]
        self._count_malformed(sum(answer.malformed for answer in answers))
        prompt = chat.wanted.prompt
        answer = envelope("chat.completion", "chatcmpl", self._name, choices, [prompt], completions)
        if chat.body.return_token_ids:
            answer |= {"prompt_token_ids": prompt, "prompt_text": chat.text}
        return answer

    def _count_malformed(self, calls: int) -> None:
        self._batcher.counters.malformed_calls += calls

    def _completion(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> _Completion:
        body = request_of(fields, CompletionBody)
        if headers.get(LOGPROBS_HEADER) == LOGPROBS_AS_NUMBERS and body.return_token_ids:
            body.logprobs = None
        prompts = [self._prompt(prompt, self._allowed(body)) for prompt in body.prompts()]
        if not prompts:
            raise bad_request("prompt is an empty list, wanted at least one prompt", "prompt")
        requests = [
            replace(
                self._request(body, ids, body.max_tokens, None if body.seed is None else body.seed + number),
                top_logprobs=body.logprobs or 0,
            )
            for number, (_, ids) in enumerate(prompts)
        ]
        return _Completion(body, prompts, requests)

    async def _completion_answer(self, parsed: _Completion, pin: Version | None) -> tuple[dict[str, Any], Version]:
        answers = await self._batcher.generate(parsed.wanted, pin)
        body = parsed.body
        choices: list[dict[str, Any]] = []
        for (text, ids), (completions, version) in zip(parsed.prompts, answers, strict=True):
            prompt_fields = {"prompt_token_ids": ids, "prompt_text": text} if body.return_token_ids else {}
            choices += [
                text_choice(len(choices) + number, completion, body, version, self._codec) | prompt_fields
                for number, completion in enumerate(completions)
            ]
        flat = [completion for completions, _ in answers for completion in completions]
        answer = envelope("text_completion", "cmpl", self._name, choices, [ids for _, ids in parsed.prompts], flat)
        return answer, min(version for _, version in answers)

    async def _streamed(
        self,
        request: web.Request,
        body: ChatBody | CompletionBody,
        generation: GenerationRequest,
        pin: Version | None,
        text: str,
        *,
        tools: Tools,
    ) -> web.StreamResponse:
        """Answer token by token; a client that closes the connection ends the sampling."""
        chunks = Chunks(
            body,
            generation,
            self._codec,
            model=self._name,
            prompt_text=text,
            tools=tools,
            on_malformed=self._count_malformed,
        )
        async with self._batcher.stream(generation, pin) as stream:
            version = await stream.begun()  # up to this line an error still gets its own HTTP status
            return await send(request, stream, chunks, version, version_header(version))

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return a text as tokens, or a conversation as tokens with a mask of the assistant's tokens."""
        received = await read_body(request)
        return web.json_response(await self._read(len(received), lambda: self._tokenized(received)))

    def _tokenized(self, received: bytes) -> dict[str, Any]:
        body = parse(received, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages")
        answer: dict[str, Any] = {"max_model_len": self._max_model_len}
        if body.messages is None:
            prompt = body.prompt or ""
            answer["tokens"] = self._text(lambda: self._codec.encode(prompt, special=True))
        else:
            messages = checked(read_messages, body.messages)
            tools = checked(read_tools, body.tools or [])
            switches = self._switches(body, tools)
            masked = self._text(lambda: self._codec.conversation(messages, tools, switches))
            answer |= {"tokens": masked.token_ids, "assistant_mask": masked.assistant_mask}
        return answer

    async def logprobs(self, request: web.Request) -> web.Response:
        """Return the logprob of every given token after the first."""
        pin = self._check_admission(request.headers)
        received = await read_body(request)
        body = await self._read(len(received), lambda: parse(received, ScoreBody))
        self._check_prompt(body.tokens, self._max_model_len, "tokens")
        [(logprobs, version)] = await self._batcher.score([ScoreRequest(body.tokens, body.temperature)], pin)
        return self._json({"logprobs": logprobs, "weight_version": list(version)}, version)

    async def models(self, request: web.Request) -> web.Response:
        """Return the only model of this engine."""
        model = {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "trinity-mq",
            "root": self._model_path,
            "max_model_len": self._max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    def _json(self, answer: dict[str, Any], version: Version) -> web.Response:
        headers = version_header(version)
        if self._groups:
            headers[GROUPS_HEADER] = "yes"
        return web.json_response(answer, headers=headers)

    # -- request parsing

    def _check_admission(self, headers: Mapping[str, str]) -> Version | None:
        """Return the version to which a request with these headers is pinned; reject early a request that cannot be
        served.
        """
        pin = parse_pin(headers.get(PIN_HEADER))
        if problem := self._state.problem(pin):
            raise problem
        return pin

    async def _read(self, size: int, read: Callable[[], T]) -> T:
        """Return the result of ``read`` for a request of ``size`` bytes.

        Raises:
            ApiError: 503, too many large requests are being read; or an error of ``read``.
        """
        try:
            return await self._reader.run(size, read)
        except ReaderBusy as error:
            raise ApiError(503, str(error), code="engine_busy", retry_after=1.0) from None

    def _text(self, work: Any) -> Any:
        try:
            return work()
        except TextError as error:
            raise bad_request(str(error), code="invalid_text") from error

    def _switches(self, body: ChatBody | TokenizeBody, tools: Tools) -> dict[str, Any]:
        try:
            return self._codec.switches({name: getattr(body, name) for name in SWITCH_FIELDS}, tools)
        except SwitchError as error:
            raise bad_request(str(error), error.where, "unsupported_option") from error

    def _allowed(self, body: SamplingBody) -> int:
        """Return the maximum number of prompt tokens."""
        return min(self._max_model_len - 1, body.max_prompt_tokens or self._max_model_len)

    def _prompt(self, prompt: str | list[int], limit: int) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._text(lambda: self._codec.encode_within(prompt, limit, special=True))
        if len(prompt) > limit:
            self._check_prompt(prompt, limit, "prompt")
        unknown_id = next((token for token in prompt if not 0 <= token < self._vocabulary), None)
        if unknown_id is not None:
            raise bad_request(
                f"prompt holds token id {unknown_id}, the vocabulary has 0 to {self._vocabulary - 1}", "prompt"
            )
        return self._codec.decode([prompt])[0], prompt

    def _request(self, body: SamplingBody, prompt: list[int], limit: int | None, seed: int | None) -> GenerationRequest:
        if body.model not in {"", self._name, self._model_path}:
            raise ApiError(
                404,
                f"no model {body.model!r} here; this engine serves {self._name!r}",
                code="model_not_found",
                param="model",
            )
        if body.n > self._batcher.max_sequences:
            raise bad_request(
                f"n={body.n} is over explorer.rollout_model.max_batch_sequences={self._batcher.max_sequences}", "n"
            )
        room = self._max_model_len - len(prompt)
        self._check_prompt(prompt, self._allowed(body), "prompt")
        # more tokens do not fit: the response ends with "length"
        max_tokens = min(allowed := limit or self._max_response_tokens, room)
        if body.min_tokens > allowed:
            raise bad_request(
                f"min_tokens={body.min_tokens} is more than the {allowed} tokens that the answer may have; lower it",
                "min_tokens",
            )
        if (unknown_id := max(body.logit_bias, default=0)) >= self._vocabulary:
            raise bad_request(
                f"logit_bias holds token id {unknown_id}, the vocabulary has 0 to {self._vocabulary - 1}", "logit_bias"
            )
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            n=body.n,
            temperature=body.temperature,
            top_p=body.top_p,
            stop_ids=frozenset() if body.ignore_eos else self._codec.stop_ids,
            stop=body.stop,
            logit_bias=body.logit_bias,
            min_tokens=min(body.min_tokens, max_tokens),
            seed=None if seed is None else seed & SEED_MASK,
        )

    def _check_prompt(self, tokens: Sequence[int], limit: int, param: str) -> None:
        if not tokens:
            raise bad_request(f"{param} is empty, wanted at least one token", param)
        if len(tokens) > limit:
            raise bad_request(
                f"the prompt has at least {len(tokens)} tokens, {limit} are allowed (model.max_model_len is "
                f"{self._max_model_len}; max_prompt_tokens of the request); shorten it or raise the limit",
                param,
                "context_length_exceeded",
                limit=limit,
                prompt_token_ids=list(tokens[: limit + 1]),
            )
        if max(tokens) >= self._vocabulary:
            raise bad_request(
                f"{param} holds token id {max(tokens)}, the vocabulary has 0 to {self._vocabulary - 1}", param
            )


def version_header(version: Version) -> dict[str, str]:
    """Return the header with the weight version of an answer."""
    return {PIN_HEADER: f"{version[0]}.{version[1]}"}


def parse_pin(text: str | None) -> Version | None:
    """Return the version in the header ``X-TMQ-Version: generation.step``, None without the header.

    Raises:
        ApiError: 400; the header is not a pair of numbers.
    """
    if text is None:
        return None
    generation, _, step = text.partition(".")
    if not all(part.isdecimal() and len(part) <= LONGEST_NUMBER for part in (generation, step)):
        raise bad_request(f"{PIN_HEADER} is {text!r}, wanted generation.step such as 1.25", PIN_HEADER)
    return int(generation), int(step)


async def answer_group(
    request: web.Request, answering: Answering, headers: Callable[[Version], dict[str, str]]
) -> web.StreamResponse:
    """Answer each request of a group as soon as its answer is ready.

    A client that closes the connection cancels the unanswered requests.

    Args:
        request: The group.
        answering: Answers one request of the group.
        headers: Returns the headers of an answer from its weight version.

    Raises:
        ApiError: 400; the body is not a group.
    """
    try:
        requests = unpack_requests(await read_body(request))
    except ValueError as error:
        raise bad_request(str(error)) from None
    response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
    await response.prepare(request)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_answered(number, single, answering, headers)) for number, single in enumerate(requests)
        ]
        await _send(response, tasks)
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, tasks: Sequence[asyncio.Task[bytes]]) -> None:
    """Write the answers as they become ready; answers that are ready at the same time are written together."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        await response.write(b"".join(task.result() for task in done))


async def _answered(
    number: int, request: GroupedRequest, answering: Answering, headers: Callable[[Version], dict[str, str]]
) -> bytes:
    try:
        body, version = await answering(request.path, CIMultiDict(request.headers), request.body)
        answer = GroupedAnswer(number, 200, headers(version), body)
    except ApiError as error:
        answer = GroupedAnswer(number, error.status, error.headers(), pack_body({"error": error.body()}))
    except Exception as error:
        log.exception("request_failed", path=request.path)
        failure = ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")
        answer = GroupedAnswer(number, failure.status, {}, pack_body({"error": failure.body()}))
    return pack_answer(answer)
