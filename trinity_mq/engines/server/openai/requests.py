"""Request bodies of the OpenAI-compatible API: accepted fields, and errors for the others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from trinity_mq.engines.api_errors import bad_request
from trinity_mq.engines.server.http_server import EngineRequestBody, json_object, validated
from trinity_mq.families.forms import AnswerForm
from trinity_mq.families.messages import THOUGHTS, Message, MessageError, read_tools

MAX_STOPS = 16
LONGEST_STOP = 1024
"""Maximum characters of a stop string: each decode step decodes about this many tokens of a row with a stop string."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 100.0
MIN_TOP_P = 1e-30
"""Minimum ``top_p``. Smaller values approach the smallest float32, the precision in which engines compute."""
MAX_BIASES, MAX_BIAS = 300, 100.0
"""Maximum entries of ``logit_bias``, and maximum absolute value of an entry."""
MAX_TOP_LOGPROBS = 20
"""Maximum number of likeliest tokens returned for each token."""
MAX_SCHEMA, MAX_SCHEMA_LEVELS = 1 << 15, 32
"""Maximum characters and nesting levels of a JSON schema: a grammar is compiled from it."""
MAX_REPETITIONS = 1000
"""Maximum sum, over the regular expressions of a schema, of the product of their counted repetitions: a grammar spells
each repetition out.
"""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_REPETITION = re.compile(r"\{(\d{0,9}),?(\d{0,9})\}")

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "enable_thinking": (),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "prediction": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
}
"""API options, each with its values that have no effect. A request body without a field for the option accepts only
these values.
"""

_IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "return_prompt_text",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Options that are ignored, because they do not change sampling."""


def _stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)], ...],
    BeforeValidator(_stops),
    Field(max_length=MAX_STOPS),
]


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(
            f"wanted 0 (the likeliest token) or at least {MIN_TEMPERATURE}: logits divided by less overflow"
        )
    return value


Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False), AfterValidator(_temperature)]


class StreamOptions(BaseModel):
    """Options of a streamed answer. Unknown options are ignored, because these options do not change sampling."""

    include_usage: bool = False
    """End with a chunk that has no choices and reports the token usage."""


class SamplingBody(EngineRequestBody):
    """Fields that chat and completion requests share."""

    model: str = ""
    n: int = Field(default=1, ge=1)
    temperature: Temperature = 1.0
    top_p: float = Field(default=1.0, ge=MIN_TOP_P, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: Stops = ()
    logit_bias: dict[Annotated[int, Field(ge=0)], Bias] = Field(default_factory=dict, max_length=MAX_BIASES)
    min_tokens: int = Field(default=0, ge=0)
    """Minimum number of tokens: until it is reached, tokens that end an answer are not sampled."""
    ignore_eos: bool = False
    """Continue after the tokens that end an answer, up to the limit or a stop string."""
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """Our extension: add prompt_token_ids, prompt_text, and per choice token_ids, token_logprobs, weight_versions; also
    response_text, malformed_calls and routed_experts where they exist.
    """
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Our extension: maximum number of prompt tokens; a longer prompt is rejected."""


class ChatBody(SamplingBody):
    """Body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template over the defaults of the model, as in vLLM."""
    enable_thinking: bool | None = None
    """Short form of ``chat_template_kwargs.enable_thinking``. None: the default of the model or of its template."""
    reasoning_effort: str | None = None
    """Level of thinking (:data:`trinity_mq.config.switches.EFFORTS`)."""
    continue_tokens: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Our extension: tokens of the conversation up to and including an earlier answer. The prompt begins with these
    tokens if the family of the model allows it; ``prompt_token_ids`` of the answer shows it.
    """
    continue_messages: int = Field(default=0, ge=0)
    """Our extension: number of leading messages whose tokens ``continue_tokens`` holds. The last of them is the answer.
    Only the later messages are rendered. 0: unknown; then the text of the tokens must begin the prompt's text.
    """

    continue_final_message: bool = False
    """The answer continues the text of the last message, an assistant's, as in vLLM. That text is a part of the prompt.
    """
    add_generation_prompt: bool | None = None
    """Must be false with ``continue_final_message``, otherwise true, as in vLLM."""

    def split_continued(self, messages: list[Message]) -> tuple[list[Message], str]:
        """Return the messages before the answer, and the text with which the answer begins.

        Args:
            messages: The result of :func:`read_messages`.

        Raises:
            ApiError: 400; the last message cannot be continued, or the request contradicts itself.
        """
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise bad_request(
                    "add_generation_prompt=false without continue_final_message: the answer would have no turn; leave "
                    "it out",
                    "add_generation_prompt",
                )
            return messages, ""
        if self.add_generation_prompt or self.continue_tokens:
            name = "add_generation_prompt" if self.add_generation_prompt else "continue_tokens"
            raise bad_request(f"continue_final_message cannot be combined with {name}; leave one of them out", name)
        *before, last = messages
        if last["role"] != "assistant" or last.get("tool_calls") or THOUGHTS in last or not last["content"]:
            raise bad_request(
                "continue_final_message needs an assistant's last message with text, without calls and thoughts",
                "continue_final_message",
            )
        return before, last["content"]

    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call.

        Raises:
            ApiError: 400; a tool or ``tool_choice`` is malformed.
        """
        if self.tool_choice not in ("auto", "none", "required") and self._named_tool() is None:
            raise bad_request(
                f"tool_choice is {json.dumps(self.tool_choice)[:80]}, wanted auto, none, required, or "
                '{"type": "function", "function": {"name": ...}}',
                "tool_choice",
            )
        tools = checked(read_tools, self.tools)
        return [] if self.tool_choice == "none" else tools

    def _named_tool(self) -> str | None:
        """Return the name of the tool that has to be called; None if ``tool_choice`` names no tool."""
        function = self.tool_choice.get("function") if isinstance(self.tool_choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None

    def answer_form(self, tools: Sequence[Message]) -> AnswerForm | None:
        """Return the form that the answer must have; None if it may have any form.

        Args:
            tools: The result of :meth:`offered_tools`.

        Raises:
            ApiError: 400; the form is not supported, or the request also has an option that contradicts it.
        """
        form = self._form_of_calls(tools)
        if (schema := self._schema()) is not None:
            if form is not None:
                raise bad_request(
                    f"response_format cannot be combined with {form.option}; leave one of them out", "response_format"
                )
            form = AnswerForm("response_format", schema, parallel=False)
        if form is None:
            return None
        for name in ("logit_bias", "min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise bad_request(
                    f"{name} cannot be combined with {form.option}, which decides where an answer may end; "
                    "leave one of them out",
                    name,
                )
        return form

    def _form_of_calls(self, tools: Sequence[Message]) -> AnswerForm | None:
        name, must_call = self._named_tool(), self.tool_choice not in ("auto", "none")
        if must_call and not tools:
            raise bad_request("tool_choice asks for a call, and the request offers no tools", "tool_choice")
        if name is not None:
            tools = [tool for tool in tools if tool["function"]["name"] == name][:1]
            if not tools:
                raise bad_request(
                    f"tool_choice names {name[:80]!r}, which is not among the offered tools", "tool_choice"
                )
        if not must_call and (self.parallel_tool_calls or not tools):
            return None
        for number, tool in enumerate(tools):
            function, where = tool["function"], f"tools.{number}.function"
            if not _PLAIN_NAME.fullmatch(function["name"]):
                raise bad_request(
                    f"{where}.name is {function['name'][:80]!r}; a call can only be promised to a name of at most 128 "
                    "letters, digits and _ . : / -",
                    f"{where}.name",
                )
            _check_schema(function.get("parameters") or {}, f"{where}.parameters")
        option = "tool_choice" if must_call else "parallel_tool_calls"
        return AnswerForm(option, None, tools, must_call, parallel=self.parallel_tool_calls and name is None)

    def _schema(self) -> dict[str, Any] | None:
        kind = self.response_format.get("type", "text")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        described = self.response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if kind != "json_schema" or not isinstance(schema, dict):
            raise bad_request(
                f"response_format is {json.dumps(self.response_format)[:80]}, wanted the type text, json_object, or "
                'json_schema with {"json_schema": {"name": ..., "schema": {...}}}',
                "response_format",
            )
        _check_schema(schema, "response_format.json_schema.schema")
        return schema


class CompletionBody(SamplingBody):
    """Body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class ScoreBody(EngineRequestBody):
    """Body of ``/v1/logprobs``, our extension: logprobs of given tokens."""

    tokens: list[Annotated[int, Field(ge=0)]] = Field(min_length=2)
    temperature: Temperature = 1.0


class TokenizeBody(EngineRequestBody):
    """Body of ``/v1/tokenize``, our extension: a text or a conversation as tokens."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Check the size of a JSON schema, from which an engine compiles a grammar.

    Raises:
        ApiError: 400; the schema is too large, too deep, or repeats too much.
    """
    level: list[Any] = [schema]
    repetitions = 0
    for _ in range(MAX_SCHEMA_LEVELS):
        parts = [part for value in level for part in ([*value, *value.values()] if isinstance(value, dict) else value)]
        for text in (part for part in parts if isinstance(part, str)):
            counts = _REPETITION.findall(text)
            repetitions += bool(counts) * math.prod(max(int(least or 1), int(most or 1), 1) for least, most in counts)
            if repetitions > MAX_REPETITIONS:
                raise bad_request(
                    f"{where} holds {text[:80]!r}, and counted repetitions of more than {MAX_REPETITIONS} in all; "
                    "use * or smaller counts",
                    where,
                )
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            break
    else:
        raise bad_request(f"{where} is nested more than {MAX_SCHEMA_LEVELS} levels deep; flatten it", where)
    if (size := len(json.dumps(schema))) > MAX_SCHEMA:
        raise bad_request(f"{where} has {size} characters, wanted at most {MAX_SCHEMA}", where)


B = TypeVar("B", bound=BaseModel)


def parse(raw: bytes, body: type[B]) -> B:
    """Return the request in ``raw``; errors as :func:`request_of`."""
    return request_of(json_object(raw), body)


def request_of(fields: Mapping[str, Any], body: type[B]) -> B:
    """Return the request with these fields.

    Raises:
        ApiError: 400; the message names the option, the value that was sent and the values that are accepted.
    """
    accepted = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
    for name in _NEUTRAL.keys() & accepted.keys() - body.model_fields.keys():
        value = accepted.pop(name)
        if value not in _NEUTRAL[name]:
            allowed = " or ".join(json.dumps(neutral) for neutral in _NEUTRAL[name])
            raise bad_request(
                f"{name}={json.dumps(value)[:80]} is not supported by this engine; leave it out"
                + (f" (or send {allowed})" if allowed else ""),
                name,
                "unsupported_option",
            )
    return validated(accepted, body)


def checked(read: Callable[[Sequence[Any]], list[Message]], values: Sequence[Any]) -> list[Message]:
    """Return the messages or the tools of a request, converted by ``read``.

    Raises:
        ApiError: 400; a message or a tool is malformed.
    """
    try:
        return read(values)
    except MessageError as error:
        raise bad_request(str(error), error.where) from error
