"""Client of an OpenTelemetry collector that accepts spans by OTLP over HTTP.

The protocol messages are filled in directly. The OpenTelemetry SDK traces the current process, but these spans come
from other processes and from the past, and their ids are already fixed.
"""

from __future__ import annotations

import gzip
import importlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import httpx

from trinity_mq.config import Config, OtlpConfig
from trinity_mq.errors import CommandError
from trinity_mq.observability.spans.tree import Attribute, TreeSpan
from trinity_mq.observability.trackers.base import TrackerError
from trinity_mq.telemetry.trace_ids import LINK, read_traceparent

PATH = "/v1/traces"
REFUSED = frozenset({400, 413, 415, 422})
"""HTTP status codes after which the same spans are never retried. All other failures may be temporary."""
SHOWN = 200
"""Maximum characters of an HTTP response shown in a message."""


class SpansRejected(TrackerError):
    """The collector permanently refuses some spans.

    Args:
        message: The reason.
        count: Number of refused spans.
    """

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


class OtlpClient:
    """Client of one OpenTelemetry collector.

    Args:
        endpoint: Base URL of the collector, or URL of its route for traces.
        headers_env: Environment variable with headers, as ``name=value,name=value``, percent-encoded.
        timeout: Timeout of a request in seconds.

    Raises:
        TrackerError: The library of the protocol is not installed, or the headers are not valid.
    """

    def __init__(self, endpoint: str, headers_env: str, timeout: float) -> None:
        base = endpoint.rstrip("/")
        self.url = base if base.endswith(PATH) else base + PATH
        try:
            self._messages: Any = importlib.import_module("opentelemetry.proto.trace.v1.trace_pb2")
            self._requests: Any = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        except ImportError as error:
            raise TrackerError(f"opentelemetry is not installed ({error}): pip install 'trinity-mq[otel]'") from error
        headers = {
            **parse_headers(os.environ.get(headers_env, ""), headers_env),
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "gzip",
        }
        self._client = httpx.Client(headers=headers, timeout=timeout)

    def send(self, spans: Sequence[TreeSpan]) -> None:
        """Send spans.

        Raises:
            SpansRejected: The collector permanently refuses some of the spans.
            TrackerError: The collector did not accept the spans, but may accept them later.
        """
        body = gzip.compress(self.encoded(spans), compresslevel=1)
        try:
            response = self._client.post(self.url, content=body)
        except httpx.HTTPError as error:
            raise TrackerError(
                f"{self.url} does not answer ({error or type(error).__name__}): is monitor.otlp.endpoint right, and a "
                "collector there that takes OTLP over HTTP?"
            ) from error
        reason = " ".join(response.text[:SHOWN].split()) if response.is_error else ""
        if response.status_code in REFUSED:
            raise SpansRejected(
                f"{self.url} refuses {len(spans)} spans with {response.status_code}: {reason}", len(spans)
            )
        if not response.is_success:
            raise TrackerError(
                f"{self.url} answers {response.status_code}, wanted 200: {reason or 'nothing more'}; 401 and 403 want "
                "other headers (monitor.otlp.headers_env), 404 another endpoint"
            )
        self._note_partial(response.content)

    def _note_partial(self, content: bytes) -> None:
        answer = self._requests.ExportTraceServiceResponse()
        try:
            answer.ParseFromString(content)
        # the exception type depends on the protobuf implementation; a collector may also answer with JSON
        except Exception:
            return
        if rejected := answer.partial_success.rejected_spans:
            reason = answer.partial_success.error_message[:SHOWN]
            raise SpansRejected(f"{self.url} rejects {rejected} spans: {reason}", int(rejected))

    def encoded(self, spans: Sequence[TreeSpan]) -> bytes:
        """Return the body of a request with ``spans``."""
        request = self._requests.ExportTraceServiceRequest()
        by_agent: dict[tuple[str, str], list[TreeSpan]] = defaultdict(list)
        for span in spans:
            by_agent[span.role, span.agent].append(span)
        for (role, agent), agent_spans in by_agent.items():
            resource_spans = request.resource_spans.add()
            resource = {"service.name": f"trinity_mq.{role}", "service.instance.id": agent}
            _fill(resource_spans.resource.attributes, resource)
            scope = resource_spans.scope_spans.add()
            scope.scope.name = "trinity_mq"
            for span in agent_spans:
                self._add(scope.spans.add(), span)
        body: bytes = request.SerializeToString()
        return body

    def _add(self, message: Any, span: TreeSpan) -> None:
        message.trace_id, message.span_id = bytes.fromhex(span.trace), bytes.fromhex(span.id)
        message.parent_span_id = bytes.fromhex(span.parent)
        message.name, message.flags = span.name, 1
        calls = "gen_ai.operation.name" in span.attributes
        kinds = self._messages.Span
        message.kind = kinds.SPAN_KIND_CLIENT if calls else kinds.SPAN_KIND_INTERNAL
        message.start_time_unix_nano, message.end_time_unix_nano = _nanoseconds(span.start), _nanoseconds(span.end)
        _fill(message.attributes, span.attributes)
        if outside := read_traceparent(str(span.attributes.get(LINK, ""))):
            link = message.links.add()
            link.trace_id, link.span_id = map(bytes.fromhex, outside)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def open_collector(config: Config, endpoint: str | None = None) -> OtlpClient:
    """Return a client of the collector that the configuration names, or of the collector at ``endpoint``.

    Raises:
        CommandError: No collector is configured, the endpoint is not a URL, or a requirement of the collector is
            missing.
    """
    settings = config.monitor.otlp
    if endpoint is not None:
        configured = {} if settings is None else settings.model_dump()
        try:
            settings = OtlpConfig.model_validate({**configured, "endpoint": endpoint})
        except ValueError as error:
            raise CommandError(f"--endpoint is {endpoint!r}, wanted a URL such as http://localhost:4318") from error
    if settings is None:
        raise CommandError("the run has no monitor.otlp: name a collector with --endpoint http://localhost:4318")
    try:
        return OtlpClient(settings.endpoint, settings.headers_env, settings.timeout)
    except TrackerError as error:
        raise CommandError(str(error)) from error


def parse_headers(text: str, name: str) -> dict[str, str]:
    """Return the headers in an environment variable.

    Raises:
        TrackerError: The text is not a list of headers. The message does not show the text, which may be secret.
    """
    headers = {}
    for number, entry in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        key, equals, value = entry.partition("=")
        if not equals or not key.strip():
            raise TrackerError(
                f"entry {number} of the environment variable {name} is not of the form name=value, wanted for "
                "example a=b,c=d"
            )
        headers[key.strip()] = unquote(value.strip())
    return headers


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6)) * 1000


def _fill(messages: Any, attributes: Mapping[str, Attribute]) -> None:
    for name, value in attributes.items():
        message = messages.add()
        message.key = name
        if isinstance(value, bool):
            message.value.bool_value = value
        elif isinstance(value, int) and abs(value) < 2**63:
            message.value.int_value = value
        elif isinstance(value, float) and math.isfinite(value):
            message.value.double_value = value
        else:
            message.value.string_value = str(value)
