"""The model as a workflow sees it: calls return experiences, and the answers to an OpenAI client are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tenacity import AsyncRetrying, Retrying

from trinity_mq.experience import Experience
from trinity_mq.families.switches import merge_switch_fields
from trinity_mq.messages import Version
from trinity_mq.models.clients import VERSION_HEADER, EngineClients
from trinity_mq.models.errors import EngineLost, PromptTooLong
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.calls import ExperienceHistory, RecordedCall, RecordedModel
from trinity_mq.models.recording.merging import merge_turns as merged
from trinity_mq.models.recording.responses import conversation_experience, masked_experiences
from trinity_mq.models.retried import call_with_retries, engine_retries
from trinity_mq.telemetry.trace import span

if TYPE_CHECKING:
    import openai

Message = Mapping[str, Any]


class ModelWrapper(RecordedModel):
    """The model as one workflow run uses it.

    Sampling parameters come from three places, weakest first: the arguments ``temperature``, ``top_p`` and
    ``max_response_tokens``, then ``rollout_args``, then the parameters of a call. With a ``seed`` every call gets its
    own seed, derived from ``seed`` and the number of the call, so that the whole workflow run is reproducible.

    While the engine waits for weights (503), calls wait for up to ``not_ready_timeout`` seconds and then raise
    :class:`~trinity_mq.models.EngineNotReady`. A call without any answer raises :class:`EngineLost` without a retry,
    because another engine may serve it.
    """

    def __init__(
        self,
        model: InferenceModel,
        *,
        rollout_args: Mapping[str, Any] | None = None,
        seed: int | None = None,
        pinned: Version | None = None,
        enable_history: bool = False,
        max_prompt_tokens: int | None = None,
        enable_prompt_truncation: bool = False,
        max_response_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        clients: EngineClients | None = None,
        not_ready_timeout: float = 300.0,
        request_timeout: float = 1800.0,
    ) -> None:
        """Wrap ``model``.

        Args:
            model: Address and identity of the served model.
            rollout_args: Sampling parameters as in the OpenAI API; ``chat_template_kwargs``, ``enable_thinking`` and
                ``reasoning_effort``, which apply to chats.
            seed: Makes the workflow run reproducible.
            pinned: The only weight version that may answer; calls to an engine with another version raise
                VersionMismatch.
            enable_history: Keep every answer until :meth:`extract_experience_from_history`.
            max_prompt_tokens: For a longer prompt, :meth:`chat` and :meth:`generate` return masked experiences. None:
                the limit is the context length of the model, as for OpenAI clients, whose conversations grow.
            enable_prompt_truncation: Whether masked experiences are accepted for prompts that are too long: workflows
                return them, and :meth:`convert_messages_to_experience` makes them too. False: such a prompt is a
                failure of the task.
            max_response_tokens: Maximum tokens of a response. None: the engine's limit.
            temperature: Sampling temperature.
            top_p: Probability mass for nucleus sampling.
            clients: Connections shared with other wrappers. None: the wrapper opens its own connections, which
                :meth:`aclose` or :meth:`close` closes.
            not_ready_timeout: Seconds to wait for an engine without weights.
            request_timeout: Maximum seconds for one answer.
        """
        limits = {} if max_response_tokens is None else {"max_tokens": max_response_tokens}
        super().__init__(
            model,
            sampling={"temperature": temperature, "top_p": top_p, **limits, **(rollout_args or {})},
            seed=seed,
            headers={} if pinned is None else {VERSION_HEADER: f"{pinned[0]}.{pinned[1]}"},
            enable_history=enable_history,
            not_ready_timeout=not_ready_timeout,
            request_timeout=request_timeout,
        )
        self.max_prompt_tokens = max_prompt_tokens
        self.enable_prompt_truncation = enable_prompt_truncation
        self._clients = clients or EngineClients()
        self._owns_clients = clients is None
        self._openai: list[openai.OpenAI | openai.AsyncOpenAI] = []

    @property
    def clients(self) -> EngineClients:
        """Connections to engines."""
        return self._clients

    @property
    def model_name(self) -> str:
        """Name of the model in requests."""
        return self.model.name

    @property
    def model_path(self) -> str:
        """Folder with tokenizer and configuration."""
        return self.model.model_path

    @property
    def model_version(self) -> Version | None:
        """Weight version that gave the latest answer; before the first answer, the version of the handle."""
        return self.note_version or self.model.version

    @property
    async def model_version_async(self) -> Version | None:
        """The same version as :attr:`model_version`, for callers that await it."""
        return self.model_version

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """Default sampling parameters of calls, in the form of the OpenAI API."""
        return dict(self.sampling)

    # -- requests

    def chat(self, messages: Sequence[Message], **sampling: Any) -> list[Experience]:
        """Return ``n`` answers to a conversation. The call blocks: it is for workflows in a thread.

        If the last message is the assistant's, with text and without tool calls, the answers continue its text, which
        is a part of their prompt.

        ``sampling`` takes the parameters of the OpenAI API, and ``chat_template_kwargs`` for the chat template, such as
        ``{"enable_thinking": False}``.

        Raises:
            EngineNotReady: The engine had no weights within ``not_ready_timeout`` seconds.
            EngineLost: The engine did not answer.
            EngineRefused: The engine refused the request.
            ValueError: ``stream`` is set.
        """
        return self._complete("/v1/chat/completions", self._call(_chat_prompt(messages), sampling))

    async def chat_async(self, messages: Sequence[Message], **sampling: Any) -> list[Experience]:
        """Return ``n`` answers to a conversation; errors as :meth:`chat`."""
        return await self._complete_async("/v1/chat/completions", self._call(_chat_prompt(messages), sampling))

    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Experience]:
        """Return ``n`` continuations of each prompt, in the order of the prompts; errors as :meth:`chat`."""
        return [
            experience
            for prompt in prompts
            for experience in self._complete("/v1/completions", self._call({"prompt": prompt}, sampling))
        ]

    async def generate_async(self, prompts: Sequence[str], **sampling: Any) -> list[Experience]:
        """Return ``n`` continuations of each prompt, in the order of the prompts. The prompts are sent concurrently;
        errors as :meth:`chat`, but in an ExceptionGroup.
        """
        calls = [self._call({"prompt": prompt}, sampling) for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._complete_async("/v1/completions", call)) for call in calls]
        return [experience for task in tasks for experience in task.result()]

    def logprobs(self, tokens: Sequence[int], temperature: float | None = None) -> torch.Tensor:
        """Return the logprob of every token after the first, float32 ``[len(tokens) - 1]``; errors as :meth:`chat`."""
        return torch.tensor(self._read_scores(self._post("/v1/logprobs", self._score_body(tokens, temperature))))

    async def logprobs_async(self, tokens: Sequence[int], temperature: float | None = None) -> torch.Tensor:
        """Return the logprob of every token after the first, float32 ``[len(tokens) - 1]``; errors as :meth:`chat`."""
        answer = await self._post_async("/v1/logprobs", self._score_body(tokens, temperature))
        return torch.tensor(self._read_scores(answer))

    def convert_messages_to_experience(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Return a whole conversation as one experience with logprobs of the current policy.

        The action mask covers the assistant's turns. A conversation longer than the model's limit is cut and marked
        ``response_truncated``. With ``enable_prompt_truncation``, a conversation whose first answer begins behind
        ``max_prompt_tokens`` becomes a masked experience. Errors as :meth:`chat`; ValueError if the kept tokens hold no
        token of the assistant after a prompt.
        """
        body = self._conversation_body(messages, tools)
        tokenized = self._post("/v1/tokenize", body)
        if (masked := self._masked_conversation(tokenized, messages, tools, temperature)) is not None:
            return masked
        scored = self._post(
            "/v1/logprobs", self._score_body(tokenized["tokens"][: tokenized["max_model_len"]], temperature)
        )
        return self._conversation(tokenized, scored, messages, tools, temperature)

    async def convert_messages_to_experience_async(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Return a whole conversation as one experience; see :meth:`convert_messages_to_experience`."""
        body = self._conversation_body(messages, tools)
        tokenized = await self._post_async("/v1/tokenize", body)
        if (masked := self._masked_conversation(tokenized, messages, tools, temperature)) is not None:
            return masked
        score_body = self._score_body(tokenized["tokens"][: tokenized["max_model_len"]], temperature)
        return self._conversation(
            tokenized, await self._post_async("/v1/logprobs", score_body), messages, tools, temperature
        )

    async def get_message_token_len(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of a conversation, as its chat template writes it, without the beginning of an
        answer; errors as :meth:`chat`.
        """
        tokenized = await self._post_async("/v1/tokenize", self._conversation_body(messages, None))
        return len(tokenized["tokens"])

    # -- OpenAI clients

    def get_openai_client(self) -> openai.OpenAI:
        """Return an OpenAI client of this model. Calls use this wrapper's sampling parameters unless they set their
        own.

        When history is enabled, every answer to ``chat.completions`` and ``completions`` is recorded: streamed or not,
        with ``n``, tools, ``with_options``, ``with_raw_response``. A stream is recorded when it ends. If the stream is
        closed or dropped early, the engine stops sampling and the tokens received so far are recorded as
        ``response_truncated``. A prompt that does not fit the model raises ``openai.BadRequestError``, and its masked
        experiences are recorded.
        """
        from trinity_mq.models.recording.openai_clients import recorded_client

        client = recorded_client(self)
        self._openai.append(client)
        return client

    def get_openai_async_client(self) -> openai.AsyncOpenAI:
        """Return an asynchronous client; see :meth:`get_openai_client`."""
        from trinity_mq.models.recording.openai_clients import recorded_async_client

        client = recorded_async_client(self)
        self._openai.append(client)
        return client

    # -- history

    def extract_experience_from_history(
        self, clear_history: bool = True, *, merge_turns: bool = False
    ) -> list[Experience]:
        """Return the answers since the last call that cleared the history, one experience for each answer.

        Args:
            clear_history: Clear the history. Open streams are returned with the tokens received so far.
            merge_turns: Merge turns into one experience where a prompt begins with exactly the tokens of an earlier
                prompt and its answer; see :func:`trinity_mq.models.recording.merging.merge_turns`.

        Raises:
            ValueError: History is off.
        """
        if not self.enable_history:
            raise ValueError("history is off; set explorer.rollout_model.enable_history=true in the configuration")
        taken = self.history.take(clear=clear_history)
        return merged(taken) if merge_turns else taken

    def clone_with_isolated_history(self) -> ModelWrapper:
        """Return a wrapper of the same model with its own history and seeds."""
        clone = copy.copy(self)
        vars(clone).update(history=ExperienceHistory(), seeds=self.seeds.clone(), _owns_clients=False, _openai=[])
        return clone

    def adopt_settings(self, source: ModelWrapper) -> None:
        """Take over the state of ``source``, a new wrapper of the same model, and keep the OpenAI clients of this
        wrapper.

        A caller that holds this wrapper and its OpenAI clients can then use them for another run.
        """
        vars(self).update({**vars(source), "_openai": self._openai})

    async def aclose(self) -> None:
        """Close the OpenAI clients that this wrapper returned, and its connections unless they are shared."""
        handed_out, self._openai = self._openai, []
        for client in handed_out:
            closing = await asyncio.to_thread(client.close)
            if closing is not None:
                await closing
        if self._owns_clients:
            await self._clients.aclose()

    def close(self) -> None:
        """Close the connections of synchronous calls, unless they are shared."""
        if self._owns_clients:
            self._clients.close()

    def _call(self, prompt: dict[str, Any], sampling: Mapping[str, Any]) -> RecordedCall:
        if sampling.get("stream"):
            raise ValueError(
                "stream=True: chat and generate return whole answers; stream with get_openai_client() or "
                "get_openai_async_client(), whose calls are recorded too"
            )
        parameters = {name: value for name, value in sampling.items() if name != "logprobs"}  # always requested
        limit = {} if self.max_prompt_tokens is None else {"max_prompt_tokens": self.max_prompt_tokens}
        with span("make request"):
            return RecordedCall(self, {**limit, **prompt, **parameters}, tokens=True)

    def _complete(self, path: str, call: RecordedCall) -> list[Experience]:
        try:
            answer = self._post(path, call.body, call.headers)
        except PromptTooLong as error:
            return call.too_long(error)
        return call.experiences(answer)

    async def _complete_async(self, path: str, call: RecordedCall) -> list[Experience]:
        try:
            answer = await self._post_async(path, call.body, call.headers)
        except PromptTooLong as error:
            return call.too_long(error)
        return call.experiences(answer)

    def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        retrying = Retrying(**engine_retries(self.not_ready_timeout))
        url, all_headers = self.model.url + path, self.headers if headers is None else headers
        with self._engine_in_errors():
            return retrying(self._clients.post, url, body, all_headers, self.request_timeout)

    async def _post_async(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        url, all_headers = self.model.url + path, self.headers if headers is None else headers
        with self._engine_in_errors():
            return await call_with_retries(
                lambda: AsyncRetrying(**engine_retries(self.not_ready_timeout)),
                self._clients.post_async,
                url,
                body,
                all_headers,
                self.request_timeout,
            )

    @contextlib.contextmanager
    def _engine_in_errors(self) -> Iterator[None]:
        """Set the engine of an EngineLost that the block raises."""
        try:
            yield
        except EngineLost as error:
            error.engine = self.model
            raise

    def _conversation_body(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        offered = {"tools": list(tools)} if tools else {}
        return {"messages": list(messages), **offered, **merge_switch_fields(self.sampling, {})}

    def _score_body(self, tokens: Sequence[int], temperature: float | None) -> dict[str, Any]:
        return {"tokens": [int(token) for token in tokens], "temperature": self._temperature(temperature)}

    def _read_scores(self, answer: Mapping[str, Any]) -> list[float]:
        self.note_version = (answer["weight_version"][0], answer["weight_version"][1])
        logprobs: list[float] = answer["logprobs"]
        return logprobs

    def _conversation(
        self,
        tokenized: Mapping[str, Any],
        scored: Mapping[str, Any],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        temperature: float | None,
    ) -> Experience:
        return conversation_experience(
            tokenized["tokens"][: tokenized["max_model_len"]],
            tokenized["assistant_mask"],
            self._read_scores(scored),
            max_length=tokenized["max_model_len"],
            messages=[dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            version=scored["weight_version"],
            temperature=self._temperature(temperature) or 1.0,
        )

    def _masked_conversation(
        self,
        tokenized: Mapping[str, Any],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        temperature: float | None,
    ) -> Experience | None:
        """Return the masked experience of a conversation whose prompt is too long; None for any other conversation."""
        limit = min(self.max_prompt_tokens or tokenized["max_model_len"], tokenized["max_model_len"] - 1)
        if not self.enable_prompt_truncation or len(tokenized["tokens"]) <= limit:
            return None
        if 1 in tokenized["assistant_mask"][: limit + 1]:
            return None
        error = PromptTooLong("the prompt of the conversation is too long", tokenized["tokens"], limit)
        [experience] = masked_experiences(error, 1, self._temperature(temperature))
        experience.messages = [dict(message) for message in messages]
        experience.tools = None if tools is None else [dict(tool) for tool in tools]
        return experience

    def _temperature(self, temperature: float | None) -> float:
        return float(self.sampling["temperature"] if temperature is None else temperature)


def _chat_prompt(messages: Sequence[Message]) -> dict[str, Any]:
    """Return the fields of a chat request for a conversation. A last message of the assistant with text and without
    tool calls is continued.
    """
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
    flags = {"continue_final_message": True, "add_generation_prompt": False} if continues else {}
    return {"messages": list(messages), **flags}
