"""``trinity-mq exporter``: serves the state of a run as Prometheus metrics."""
