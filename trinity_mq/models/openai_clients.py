"""OpenAI clients of a wrapped model: they wait out an engine without weights, raise our typed errors, are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import openai
from tenacity import AsyncRetrying, Retrying

from trinity_mq.models.clients import engine_error
from trinity_mq.models.errors import EngineError, EngineLost

if TYPE_CHECKING:
    from trinity_mq.models.wrapper import ModelWrapper

API_KEY = "none"  # engines ask for none, the client insists on one


def recorded_client(wrapper: ModelWrapper) -> openai.OpenAI:
    """Return a synchronous client of the wrapper's model."""
    client = openai.OpenAI(http_client=openai.DefaultHttpxClient(**_connection(wrapper)), **_settings(wrapper))
    create = client.chat.completions.create

    def ask(arguments: dict[str, Any]) -> Any:
        try:
            return create(**arguments)
        except openai.APIError as error:
            raise _typed(error) from error

    def recorded(**given: Any) -> Any:
        arguments = _arguments(wrapper, given)
        completion = Retrying(**wrapper.not_ready_policy())(ask, arguments)
        wrapper.record(completion.model_dump(), arguments["temperature"])
        return completion

    # replaced on this one instance: whatever is built on create (parse, raw responses) goes through it too
    vars(client.chat.completions)["create"] = recorded
    return client


def recorded_async_client(wrapper: ModelWrapper) -> openai.AsyncOpenAI:
    """Return an asynchronous client of the wrapper's model."""
    http_client = openai.DefaultAsyncHttpxClient(**_connection(wrapper))
    client = openai.AsyncOpenAI(http_client=http_client, **_settings(wrapper))
    create = client.chat.completions.create

    async def ask(arguments: dict[str, Any]) -> Any:
        try:
            return await create(**arguments)
        except openai.APIError as error:
            raise _typed(error) from error

    async def recorded(**given: Any) -> Any:
        arguments = _arguments(wrapper, given)
        completion: Any = await AsyncRetrying(**wrapper.not_ready_policy())(ask, arguments)
        wrapper.record(completion.model_dump(), arguments["temperature"])
        return completion

    vars(client.chat.completions)["create"] = recorded
    return client


def _settings(wrapper: ModelWrapper) -> dict[str, Any]:
    return {
        "base_url": f"{wrapper.model.url}/v1",
        "api_key": API_KEY,
        "default_headers": wrapper.headers,
        "timeout": wrapper.request_timeout,
        "max_retries": 0,  # ours: a 503 is waited out, a lost engine is not
    }


def _connection(wrapper: ModelWrapper) -> dict[str, Any]:
    """Return how to connect."""
    # an engine is near: no proxy leads to it, and loading certificates that plain HTTP has no use for takes 30 ms
    return {"trust_env": False, "verify": False} if wrapper.model.url.startswith("http://") else {}


def _arguments(wrapper: ModelWrapper, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to call ``create`` with: the caller's arguments over the wrapper's sampling parameters."""
    arguments = {"model": wrapper.model.name, **wrapper.sampling_defaults()}
    if given.get("max_completion_tokens") is not None:
        arguments.pop("max_tokens", None)
    arguments |= {name: value for name, value in given.items() if not isinstance(value, openai.Omit | openai.NotGiven)}
    if arguments.get("seed") is None:
        arguments["seed"] = wrapper.next_seed()
    arguments["extra_body"] = {**(given.get("extra_body") or {}), "return_token_ids": True}
    return {name: value for name, value in arguments.items() if value is not None}


def _typed(error: openai.APIError) -> EngineError | openai.APIError:
    """Return our error for what an engine says or for its silence; what is the caller's own mistake stays OpenAI's."""
    if isinstance(error, openai.APIConnectionError):  # a timeout is one too
        return EngineLost(f"{error.request.url}: {error}")
    if isinstance(error, openai.APIStatusError) and error.status_code in {409, 503}:
        return engine_error(
            error.status_code, error.response.headers.get("Retry-After"), error.body, str(error.request.url)
        )
    return error
