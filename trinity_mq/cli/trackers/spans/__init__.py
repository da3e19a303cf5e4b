"""Exports the spans of batches as traces of OpenTelemetry."""

from trinity_mq.cli.trackers.spans.collector import Collector
from trinity_mq.cli.trackers.spans.forward import SpanForwarder

__all__ = ["Collector", "SpanForwarder"]
