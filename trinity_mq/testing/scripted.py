"""A scripted model behind the real engine server: HTTP, chat template, tools, streams, history."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from trinity_mq.engines.generation.request import (
    Completion,
    FinishReason,
    GenerationListener,
    GenerationRequest,
    ScoreRequest,
    Token,
)
from trinity_mq.engines.generation.stopping import cut, stop_in
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.server.server import EngineServer, ServerSettings
from trinity_mq.families.forms import AnswerForm
from trinity_mq.messages import Version
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.wrapper import ModelWrapper

Script = Sequence[str] | Callable[[str], str]
"""The answers: a list of texts in order, or a function from prompt to text."""

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
END = "<|im_end|>"
SPECIALS = ("<|im_start|>", END, "<pad>")
TOKEN = "scripted"
"""Token of the admin routes, which tests do not use."""


class ScriptEnded(Exception):
    """The number of requests exceeds the number of texts in the script."""


class ScriptedGenerator:
    """Returns the next text of a script for each completion, byte by byte.

    Tokens are the bytes of the text and an end of sequence, so that any text can be returned. The logprob of the token
    at ``position`` is ``logprob(position)``.
    """

    device = "cpu"

    def __init__(self, script: Script, *, max_model_len: int = 1 << 16) -> None:
        self.codec = byte_codec()
        self.max_model_len = max_model_len
        self.vocabulary = 256 + len(SPECIALS)
        self.prompts: list[str] = []
        """The prompts, one for each request."""
        self.forms: list[AnswerForm] = []
        """The forms that requests demanded, which the script alone can keep."""
        self.requests: list[GenerationRequest] = []
        """The requests."""
        self._script = script if callable(script) else None
        self._texts = iter(() if callable(script) else script)

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        """Return ``n`` texts of the script for each request."""
        answers = []
        for number, request in enumerate(requests):
            [prompt] = self.codec.decode([request.prompt])
            self.prompts.append(prompt)
            self.requests.append(request)
            answers.append([self._completion(request, self._next_text(prompt)) for _ in range(request.n)])
            if listener is not None and listener.listens(number):
                _stream_tokens(listener, number, answers[-1])
        return answers

    def grammar_of(self, form: AnswerForm, prompt_end: str) -> str:
        """Return no grammar: the script decides the form of the answers. ``forms`` records what requests demand."""
        self.forms.append(form)
        return ""

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Return the logprobs of given tokens, which depend only on their positions."""
        return [[logprob(position) for position in range(len(request.token_ids) - 1)] for request in requests]

    def cancel(self) -> None:
        """Do nothing: requests are answered at once."""

    def _next_text(self, prompt: str) -> str:
        if self._script is not None:
            return self._script(prompt)
        text = next(self._texts, None)
        if text is None:
            raise ScriptEnded(f"the script has nothing left to say to {prompt[-80:]!r}; give it more texts")
        return text

    def _completion(self, request: GenerationRequest, text: str) -> Completion:
        tokens = self.codec.encode(text)
        whole = [*tokens, *self.codec.stop_ids]
        ids = whole[: request.max_tokens]
        shown = self.codec.decode([tokens[: len(ids)]])[0]
        logprobs = [logprob(position) for position in range(len(ids))]
        reason: FinishReason = "stop" if ids == whole else "length"
        return Completion(ids, logprobs, cut(shown, request.stop), reason, stopped_by=stop_in(shown, request.stop))


def logprob(position: int) -> float:
    """Return the logprob that a scripted model gives to a response's token at ``position``."""
    return -(1 + position % 8) / 8


@contextlib.asynccontextmanager
async def scripted_server(
    script: Script, *, version: Version = (1, 0), max_model_len: int = 1 << 16
) -> AsyncIterator[tuple[InferenceModel, ScriptedGenerator]]:
    """Serve a script on loopback; yield the handle of the engine, and the generator, which records the prompts."""
    generator = ScriptedGenerator(script, max_model_len=max_model_len)
    settings = ServerSettings(engine_id="scripted", model_name="scripted", model_path="", token=TOKEN)
    server = EngineServer(generator, settings, _no_weights)
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(lambda url: ready.set()))
        await ready.wait()
        server.state.phase, server.state.version = "current", version
        try:
            yield InferenceModel("scripted", server.url, "scripted", version=version), generator
        finally:
            server.stop("the script is over")


@contextlib.asynccontextmanager
async def scripted_model(script: Script, *, version: Version = (1, 0), **options: Any) -> AsyncIterator[ModelWrapper]:
    """Yield the model wrapper that a workflow receives, for a model that returns ``script``.

    History is on; ``options`` are options of :class:`trinity_mq.models.ModelWrapper`. Call synchronous workflows in a
    thread, because the server runs on the same loop.
    """
    async with scripted_server(script, version=version) as (handle, _):
        model = ModelWrapper(handle, **{"enable_history": True, **options})
        try:
            yield model
        finally:
            await model.aclose()


@functools.cache
def byte_codec(chat_template: str = CHAT_TEMPLATE) -> TextCodec:
    """Return a tokenizer whose tokens are bytes. The default chat template supports tools."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token="<pad>")
    tokenizer.chat_template = chat_template
    return TextCodec(tokenizer, frozenset({tokenizer.convert_tokens_to_ids(END)}))


def _stream_tokens(listener: GenerationListener, number: int, completions: Sequence[Completion]) -> None:
    """Pass the tokens to a listener position by position, for all choices in parallel."""
    for position in range(max(len(completion.token_ids) for completion in completions)):
        step = [
            Token(
                number,
                choice,
                completion.token_ids[position],
                completion.logprobs[position],
                completion.finish_reason if position == len(completion.token_ids) - 1 else None,
            )
            for choice, completion in enumerate(completions)
            if position < len(completion.token_ids)
        ]
        listener.sampled(step)


async def _no_weights(*_: Any) -> Any:
    raise RuntimeError("a scripted model takes no weights")
