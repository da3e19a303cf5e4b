"""The route ``/metrics``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from trinity_mq.observability.prometheus.families import RunCollector


def metrics_handler(collector: RunCollector) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers a scrape in the text format, or in the OpenMetrics format if the client
    accepts it.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return metrics
