"""Export of batch spans as OpenTelemetry traces."""

from trinity_mq.observability.spans.collector import Collector
from trinity_mq.observability.spans.forward import SpanForwarder

__all__ = ["Collector", "SpanForwarder"]
