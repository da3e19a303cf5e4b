"""Long-lived OpenAI clients of auxiliary models, for operators. Each request is routed to a current engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trinity_mq.models.inference import InferenceModel

if TYPE_CHECKING:
    import openai

TIMEOUT = 600.0
"""Seconds for one answer."""
RETRIES = 5
"""Retries of a request if no engine is alive or the engine serves nothing at present."""


def auxiliary_clients(
    names: Iterable[str], choose: Callable[[str], InferenceModel]
) -> dict[str | int, list[openai.AsyncOpenAI]]:
    """Return a client of each auxiliary model by name; the caller closes them.

    Each request is sent to the engine that serves the model at that moment, because an engine gets another address when
    it restarts. If no engine is alive, the request is retried and then fails like a request to an unreachable server:
    ``openai.APIConnectionError``.

    Args:
        names: Names of models from ``explorer.auxiliary_models``.
        choose: Returns an engine of a model, such as :meth:`EngineSelector.auxiliary`; raises EngineLost.
    """
    model_names = list(names)
    if not model_names:
        return {}
    import openai  # the import takes seconds, which a run without auxiliary models need not spend

    return {
        name: [
            openai.AsyncOpenAI(
                base_url=f"http://{name}/v1",
                api_key="none",  # engines need no key, but the client requires one
                timeout=TIMEOUT,
                max_retries=RETRIES,
                http_client=openai.DefaultAsyncHttpxClient(
                    event_hooks={"request": [_to_engine_of(name, choose)]},
                    trust_env=False,  # a proxy does not reach an engine
                ),
            )
        ]
        for name in model_names
    }


def _to_engine_of(name: str, choose: Callable[[str], InferenceModel]) -> Callable[[Any], Awaitable[None]]:
    async def redirect(request: Any) -> None:
        engine = urlsplit(choose(name).url)
        request.url = request.url.copy_with(scheme=engine.scheme, host=engine.hostname, port=engine.port)
        request.headers["Host"] = engine.netloc

    return redirect
