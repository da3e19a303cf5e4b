"""``trinity-mq exporter``: the state of a run as metrics for Prometheus."""
