"""The state of a run as Prometheus metrics, for ``trinity-mq exporter`` and the page."""
