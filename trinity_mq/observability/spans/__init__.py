"""Export of batch spans as OpenTelemetry traces."""

from trinity_mq.observability.spans.collector import OtlpClient
from trinity_mq.observability.spans.forward import SpanForwarder

__all__ = ["OtlpClient", "SpanForwarder"]
