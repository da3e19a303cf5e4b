"""A collector of OpenTelemetry for tests: takes OTLP over HTTP, and decodes it with the protocol's own messages."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Receiver:
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        """Status codes of the next answers; then 200."""
        self.headers: list[dict[str, str]] = []
        self.spans: dict[str, dict[str, tuple[str, Any]]] = defaultdict(dict)
        """By trace and span id: the service, and the span."""
        self.repeated = 0
        self.url = ""

    def take(self, body: bytes) -> None:
        """Keep the spans of a request."""
        for of_agent in ExportTraceServiceRequest.FromString(gzip.decompress(body)).resource_spans:
            resource = values(of_agent.resource)
            for scope in of_agent.scope_spans:
                for span in scope.spans:
                    known = self.spans[span.trace_id.hex()]
                    self.repeated += span.span_id.hex() in known
                    known[span.span_id.hex()] = str(resource["service.name"]), span

    def batches(self) -> dict[str, dict[str, tuple[str, Any]]]:
        """Return by name of a root span the spans of its trace."""
        return {
            span.name: spans for spans in self.spans.values() for _, span in spans.values() if not span.parent_span_id
        }


def values(of: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


@contextmanager
def receiving(receiver: Receiver, port: int = 0) -> Iterator[Receiver]:
    """Have a receiver listen meanwhile."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
            status = receiver.answers.pop(0) if receiver.answers else 200
            if status == 200:
                receiver.take(body)
            answer = ExportTraceServiceResponse().SerializeToString() if status == 200 else b"not now"
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
