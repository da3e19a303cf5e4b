"""A scripted model behind the real engine server: HTTP, chat template, tools, streams, history."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from trinity_mq.engines.generation.request import (
    Completion,
    FinishReason,
    GenerationListener,
    GenerationRequest,
    ScoreRequest,
    Token,
)
from trinity_mq.engines.generation.stopping import cut, stop_in, without_stop_token
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.server.server import EngineServer, ServerSettings
from trinity_mq.families.forms import AnswerForm
from trinity_mq.families.messages import read_messages
from trinity_mq.messages import Version
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.wrapper import ModelWrapper

Answer = str | Mapping[str, Any]
"""Answer of the model: its text, or an assistant's message in the form of the OpenAI API (``content``,
``reasoning_content``, ``tool_calls``), which is converted to text by the chat template.
"""
Script = Sequence[Answer] | Callable[[str], Answer]
"""The answers: a list in order, or a function from prompt to answer."""

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
PAD = "<pad>"
TOKEN = "scripted"
"""Token of the admin routes, which tests do not use."""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_SPECIAL = re.compile(
    r"<\|[^\s<>{}'|]{1,40}\|>|<\uff5c[^\s<>{}'\uff5c]{1,40}\uff5c>"  # most families; DeepSeek, in full-width characters
    r"|<\|[a-z_]{1,30}>|<[a-z_]{1,30}\|>|<(?:start|end)_of_[a-z]{1,30}>"  # Gemma
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|s)>|\[/?[A-Z_]{2,30}\]"  # Qwen, GLM, Mistral
)
"""Matches the special tokens in the text of a chat template."""
_QUESTION, _NEXT = {"role": "user", "content": "question"}, "next"


class ScriptEnded(Exception):
    """The script has no further answer for a request."""


class ScriptedGenerator:
    """Returns the next answer of a script for each completion, byte by byte.

    Tokens are the bytes of the text, the special tokens in it and an end of sequence, so that any text can be returned.
    The logprob of the token at ``position`` is ``logprob(position)``.

    Args:
        script: The answers.
        codec: Tokenizer and chat template, as :func:`byte_codec` makes them. None: the default chat template.
        max_model_len: Maximum tokens of prompt and answer.
    """

    device = "cpu"

    def __init__(self, script: Script, *, codec: TextCodec | None = None, max_model_len: int = 1 << 16) -> None:
        self.codec = codec or byte_codec()
        self.max_model_len = max_model_len
        self.vocabulary = self.codec.size
        self.prompts: list[str] = []
        """The prompts, one for each request."""
        self.sampled: list[list[int]] = []
        """The tokens of each answer."""
        self.forms: list[AnswerForm] = []
        """The answer forms that requests demanded. They are recorded, but not enforced on the script's answers."""
        self.requests: list[GenerationRequest] = []
        """The requests."""
        self._script = script if callable(script) else None
        self._answers = iter(() if callable(script) else script)

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        """Return ``n`` answers of the script for each request.

        Raises:
            ScriptEnded: The script has too few answers.
        """
        answers = []
        for number, request in enumerate(requests):
            [prompt] = self.codec.decode([request.prompt])
            self.prompts.append(prompt)
            self.requests.append(request)
            answers.append([self._completion(request, self._next_tokens(prompt)) for _ in range(request.n)])
            self.sampled += [completion.token_ids for completion in answers[-1]]
            if listener is not None and listener.listens(number):
                _stream_tokens(listener, number, answers[-1])
        return answers

    def grammar_of(self, form: AnswerForm, prompt_end: str) -> str:
        """Record the demanded form in ``forms``. Return an empty grammar: the script decides the form of answers."""
        self.forms.append(form)
        return ""

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Return the logprobs of given tokens, which depend only on their positions."""
        return [[logprob(position) for position in range(len(request.token_ids) - 1)] for request in requests]

    def cancel(self) -> None:
        """Do nothing: requests are answered at once."""

    def _next_tokens(self, prompt: str) -> list[int]:
        answer = self._script(prompt) if self._script is not None else next(self._answers, None)
        if answer is None:
            raise ScriptEnded(f"the script has nothing left to say to {prompt[-80:]!r}; give it more texts")
        text = answer if isinstance(answer, str) else written_answer(self.codec, answer, prompt)
        tokens = self.codec.encode(text)
        return tokens if tokens and tokens[-1] in self.codec.stop_ids else [*tokens, self.codec.end_id]

    def _completion(self, request: GenerationRequest, tokens: list[int]) -> Completion:
        ids = tokens[: request.max_tokens]
        shown = self.codec.decode([without_stop_token(ids, self.codec.stop_ids)])[0]
        logprobs = [logprob(position) for position in range(len(ids))]
        reason: FinishReason = "stop" if ids == tokens else "length"
        return Completion(ids, logprobs, cut(shown, request.stop), reason, stopped_by=stop_in(shown, request.stop))


def written_answer(codec: TextCodec, message: Mapping[str, Any], prompt: str) -> str:
    """Return the text that a model samples for an assistant's message, as its chat template writes the message, with
    the end of the turn.

    The template writes the message after a short question. The beginning of the turn is left out as far as the prompt
    already ends with it, for example with the opening of thoughts.

    Args:
        codec: Chat template and ends of sequence.
        message: Assistant's message in the form of the OpenAI API; ``role`` may be missing.
        prompt: The prompt before the answer.

    Raises:
        ValueError: The template does not write this message as a continuation of the prompt.
        TextError: The template refuses the message, or leaves a part of it out.
    """

    def rendered(*messages: Mapping[str, Any], opens: bool = False) -> str:
        form = codec.messages_for_template(read_messages(messages))
        return codec.render(form, add_generation_prompt=opens)

    spoken = {"content": "", **message, "role": "assistant"}
    before, whole = rendered(_QUESTION), rendered(_QUESTION, spoken)
    opening = rendered(_QUESTION, opens=True).removeprefix(before)
    turn = whole.removeprefix(before)
    opened = next((size for size in range(len(turn), 0, -1) if prompt.endswith(turn[:size])), None)
    if opened is None:  # some templates open no turn after the result of a tool
        if not turn.startswith(opening):
            raise ValueError(
                f"the chat template opens the turn with {opening[-80:]!r}, but writes the message as {turn[:80]!r}; "
                "give the message thoughts (reasoning_content) if the prompt opens them"
            )
        opened = len(opening)
    text, ends = turn[opened:], codec.decode([[stop] for stop in codec.stop_ids])
    cuts = [text.index(end) + len(end) for end in ends if end in text]
    if cuts:
        return text[: min(cuts)]
    calls = spoken.get("tool_calls")
    answered = {"role": "tool", "content": _NEXT, "tool_call_id": calls[0].get("id", "")} if calls else None
    # some families end a turn with the token that opens the next role; many remove the thoughts of earlier turns
    plain = {name: part for name, part in spoken.items() if name != "reasoning_content"}
    following = rendered(_QUESTION, plain, answered or {"role": "user", "content": _NEXT})
    following = following.removeprefix(rendered(_QUESTION, plain))
    return text + next((end for end in ends if following.startswith(end)), "")


def logprob(position: int) -> float:
    """Return the logprob that a scripted model gives to a response's token at ``position``."""
    return -(1 + position % 8) / 8


@contextlib.asynccontextmanager
async def scripted_server(
    script: Script, *, codec: TextCodec | None = None, version: Version = (1, 0), max_model_len: int = 1 << 16
) -> AsyncIterator[tuple[InferenceModel, ScriptedGenerator]]:
    """Serve a script on loopback; yield the handle of the engine, and the generator, which records the prompts.

    Args:
        script: The answers.
        codec: Tokenizer and chat template of the model's family, as :func:`byte_codec` makes them.
        version: Version of the weights.
        max_model_len: Maximum tokens of prompt and answer.
    """
    generator = ScriptedGenerator(script, codec=codec, max_model_len=max_model_len)
    settings = ServerSettings(engine_id="scripted", model_name="scripted", model_path="", token=TOKEN)
    server = EngineServer(generator, settings, _no_weights)
    ready = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.run(lambda url: ready.set()))
            await ready.wait()
            server.state.phase, server.state.version = "current", version
            try:
                yield InferenceModel("scripted", server.url, "scripted", version=version), generator
            finally:
                server.stop("the script is over")
    except BaseExceptionGroup as errors:
        failed, *others = errors.exceptions
        if others:
            raise
    else:
        return
    raise failed  # the error of the test itself


@contextlib.asynccontextmanager
async def scripted_model(
    script: Script, *, codec: TextCodec | None = None, version: Version = (1, 0), **options: Any
) -> AsyncIterator[ModelWrapper]:
    """Yield the model wrapper that a workflow receives, for a model that returns ``script``; ``codec`` as for
    :func:`scripted_server`.

    History is on; ``options`` are options of :class:`trinity_mq.models.ModelWrapper`. Call synchronous workflows in a
    thread, because the server runs on the same loop.
    """
    async with scripted_server(script, codec=codec, version=version) as (handle, _):
        model = ModelWrapper(handle, **{"enable_history": True, **options})
        try:
            yield model
        finally:
            await model.aclose()


@functools.cache
def byte_codec(
    chat_template: str = CHAT_TEMPLATE, *, ends: tuple[str, ...] = (END,), specials: tuple[str, ...] = ()
) -> TextCodec:
    """Return a tokenizer whose tokens are bytes and the special tokens of a family. The default chat template supports
    tools.

    Args:
        chat_template: Chat template of the family.
        ends: Tokens that end a response; the first is the tokenizer's end of sequence.
        specials: Further special tokens. The special tokens in the template's text are always included.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    written = _SPECIAL.findall(_COMMENT.sub("", chat_template))
    tokens = dict.fromkeys((*written, *ends, *specials, PAD))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ends[0], pad_token=PAD)
    tokenizer.chat_template = chat_template
    return TextCodec(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, ends)))


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
