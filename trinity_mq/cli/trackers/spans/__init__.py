"""Export of batch spans as OpenTelemetry traces."""

from trinity_mq.cli.trackers.spans.collector import Collector
from trinity_mq.cli.trackers.spans.forward import SpanForwarder

__all__ = ["Collector", "SpanForwarder"]
