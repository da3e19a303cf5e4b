"""The model as a workflow sees it: ask and get experiences, or use an OpenAI client whose answers are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tenacity import AsyncRetrying, Retrying

from trinity_mq.experience import Experience
from trinity_mq.messages import Version
from trinity_mq.models.clients import VERSION_HEADER, EngineClients
from trinity_mq.models.errors import EngineLost, PromptTooLong
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.calls import Call, RecordedModel
from trinity_mq.models.recording.history import History
from trinity_mq.models.recording.merging import merge_turns as merged
from trinity_mq.models.recording.responses import conversation_experience
from trinity_mq.models.retried import retried
from trinity_mq.telemetry.trace import span

if TYPE_CHECKING:
    import openai

Message = Mapping[str, Any]


class ModelWrapper(RecordedModel):
    """One workflow run's view of a model.

    Sampling parameters, weakest first: those given here, ``rollout_args``, those of a call. With a ``seed`` every call
    gets one of its own, derived from it and the number of the call, so that a run repeats itself as a whole.

    While the engine waits for weights (503), calls wait with it for up to ``not_ready_timeout`` seconds, then raise
    :class:`~trinity_mq.models.EngineNotReady`. No answer at all raises :class:`EngineLost` at once: another engine may
    serve.
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
        max_response_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        clients: EngineClients | None = None,
        not_ready_timeout: float = 300.0,
        request_timeout: float = 1800.0,
    ) -> None:
        """Wrap ``model``.

        Args:
            model: Where it is served.
            rollout_args: Sampling parameters as in the OpenAI API.
            seed: Makes the run repeat itself.
            pinned: Only this version of the weights may answer; another raises VersionMismatch.
            enable_history: Keep every answer until :meth:`extract_experience_from_history`.
            max_prompt_tokens: A longer prompt of :meth:`chat` or :meth:`generate` gives masked experiences. None: as
                long as fits the model, as with OpenAI clients, whose prompts are conversations that grow.
            max_response_tokens: None: the engine's own limit.
            temperature: Of sampling.
            top_p: Of sampling.
            clients: Connections shared with others; None: own ones, to be closed with :meth:`aclose` or :meth:`close`.
            not_ready_timeout: Seconds to wait for an engine without weights.
            request_timeout: Seconds for one answer.
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
        self._clients = clients or EngineClients()
        self._owns_clients = clients is None
        self._openai: list[openai.OpenAI | openai.AsyncOpenAI] = []

    @property
    def clients(self) -> EngineClients:
        """Its connections to engines."""
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
        """Version that gave the latest answer, else that of the handle."""
        return self.answered_by or self.model.version

    # -- asking

    def chat(self, messages: Sequence[Message], **sampling: Any) -> list[Experience]:
        """Return ``n`` answers to a conversation. Blocks: for workflows in a thread.

        Raises:
            EngineNotReady: No weights within ``not_ready_timeout`` seconds.
            EngineLost: No answer.
            EngineRefused: The request cannot be served as it is.
        """
        return self._asked("/v1/chat/completions", self._call({"messages": list(messages)}, sampling))

    async def chat_async(self, messages: Sequence[Message], **sampling: Any) -> list[Experience]:
        """Return ``n`` answers to a conversation; errors as :meth:`chat`."""
        return await self._asked_async("/v1/chat/completions", self._call({"messages": list(messages)}, sampling))

    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Experience]:
        """Return ``n`` continuations of each prompt, all of the first one first; errors as :meth:`chat`."""
        return [
            experience
            for prompt in prompts
            for experience in self._asked("/v1/completions", self._call({"prompt": prompt}, sampling))
        ]

    async def generate_async(self, prompts: Sequence[str], **sampling: Any) -> list[Experience]:
        """Return ``n`` continuations of each prompt, all of the first one first; errors as :meth:`chat`."""
        calls = [self._call({"prompt": prompt}, sampling) for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._asked_async("/v1/completions", call)) for call in calls]
        return [experience for task in tasks for experience in task.result()]

    def logprobs(self, tokens: Sequence[int], temperature: float | None = None) -> torch.Tensor:
        """Return the logprob of every token after the first, float32 ``[len(tokens) - 1]``; errors as :meth:`chat`."""
        return torch.tensor(self._scored(self._post("/v1/logprobs", self._score_body(tokens, temperature))))

    async def logprobs_async(self, tokens: Sequence[int], temperature: float | None = None) -> torch.Tensor:
        """Return the logprob of every token after the first, float32 ``[len(tokens) - 1]``; errors as :meth:`chat`."""
        answer = await self._post_async("/v1/logprobs", self._score_body(tokens, temperature))
        return torch.tensor(self._scored(answer))

    def convert_messages_to_experience(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Return a whole conversation as one experience with the present policy's logprobs.

        The action mask covers what the assistant wrote. A conversation over the model's length is cut and marked
        ``response_truncated``. Errors as :meth:`chat`.
        """
        asked = {"messages": list(messages), **({"tools": list(tools)} if tools else {})}
        cut = self._post("/v1/tokenize", asked)
        scored = self._post("/v1/logprobs", self._score_body(cut["tokens"][: cut["max_model_len"]], temperature))
        return self._converted(cut, scored, messages, tools, temperature)

    async def convert_messages_to_experience_async(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Return a whole conversation as one experience; see :meth:`convert_messages_to_experience`."""
        asked = {"messages": list(messages), **({"tools": list(tools)} if tools else {})}
        cut = await self._post_async("/v1/tokenize", asked)
        body = self._score_body(cut["tokens"][: cut["max_model_len"]], temperature)
        return self._converted(cut, await self._post_async("/v1/logprobs", body), messages, tools, temperature)

    # -- OpenAI clients

    def get_openai_client(self) -> openai.OpenAI:
        """Return a client of this model, with this wrapper's sampling parameters where a call gives none.

        When history is enabled, every answer to ``chat.completions`` and ``completions`` is recorded: streamed or not,
        with ``n``, tools, ``with_options``, ``with_raw_response``. A stream is recorded when it has ended; closed or
        dropped early, the engine stops sampling and what had come is recorded as ``response_truncated``. A prompt that
        does not fit the model raises ``openai.BadRequestError``, and its masked experiences are recorded.
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
        """Return what was answered since the last call that cleared, one experience for each answer.

        Args:
            clear_history: Forget it. Streams still open are taken as far as they have come.
            merge_turns: Make turns one experience where a prompt begins with exactly the tokens of an earlier answer
                and its prompt; see :func:`trinity_mq.models.recording.merging.merge_turns`.

        Raises:
            ValueError: History is off.
        """
        if not self.enable_history:
            raise ValueError("history is off; set explorer.rollout_model.enable_history=true in the configuration")
        taken = self.history.take(clear=clear_history)
        return merged(taken) if merge_turns else taken

    def clone_with_isolated_history(self) -> ModelWrapper:
        """Return a wrapper of the same model with a history, and seeds, of its own."""
        clone = copy.copy(self)
        vars(clone).update(history=History(), seeds=self.seeds.clone(), _owns_clients=False, _openai=[])
        return clone

    def become(self, other: ModelWrapper) -> None:
        """Be as ``other``, a new wrapper of the same model, for another run of who holds this one and its OpenAI
        clients.
        """
        vars(self).update({**vars(other), "_openai": self._openai})

    async def aclose(self) -> None:
        """Close the OpenAI clients handed out, and the connections unless they are shared."""
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

    def _call(self, what: dict[str, Any], sampling: Mapping[str, Any]) -> Call:
        if sampling.get("stream"):
            raise ValueError(
                "stream=True: chat and generate return whole answers; stream with get_openai_client() or "
                "get_openai_async_client(), whose calls are recorded too"
            )
        given = {name: value for name, value in sampling.items() if name != "logprobs"}  # there anyway
        limit = {} if self.max_prompt_tokens is None else {"max_prompt_tokens": self.max_prompt_tokens}
        with span("make request"):
            return Call(self, {**limit, **what, **given}, tokens=True)

    def _asked(self, path: str, call: Call) -> list[Experience]:
        try:
            answer = self._post(path, call.body, call.headers)
        except PromptTooLong as error:
            return call.too_long(error)
        return call.experiences(answer)

    async def _asked_async(self, path: str, call: Call) -> list[Experience]:
        try:
            answer = await self._post_async(path, call.body, call.headers)
        except PromptTooLong as error:
            return call.too_long(error)
        return call.experiences(answer)

    def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        retrying = Retrying(**self.not_ready_policy())
        url, sent = self.model.url + path, self.headers if headers is None else headers
        with self._named():
            return retrying(self._clients.post, url, body, sent, self.request_timeout)

    async def _post_async(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        url, sent = self.model.url + path, self.headers if headers is None else headers
        with self._named():
            return await retried(
                lambda: AsyncRetrying(**self.not_ready_policy()),
                self._clients.post_async,
                url,
                body,
                sent,
                self.request_timeout,
            )

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say in an EngineLost which engine it was."""
        try:
            yield
        except EngineLost as error:
            error.engine = self.model
            raise

    def _score_body(self, tokens: Sequence[int], temperature: float | None) -> dict[str, Any]:
        return {"tokens": [int(token) for token in tokens], "temperature": self._heat(temperature)}

    def _scored(self, answer: Mapping[str, Any]) -> list[float]:
        self.answered_by = (answer["weight_version"][0], answer["weight_version"][1])
        logprobs: list[float] = answer["logprobs"]
        return logprobs

    def _converted(
        self,
        cut: Mapping[str, Any],
        scored: Mapping[str, Any],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        temperature: float | None,
    ) -> Experience:
        return conversation_experience(
            cut["tokens"][: cut["max_model_len"]],
            cut["assistant_mask"],
            self._scored(scored),
            max_length=cut["max_model_len"],
            messages=[dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            version=scored["weight_version"],
            temperature=self._heat(temperature) or 1.0,
        )

    def _heat(self, temperature: float | None) -> float:
        return float(self.sampling["temperature"] if temperature is None else temperature)
