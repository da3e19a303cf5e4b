"""Logs and metrics of a run. Imports nothing else of the library."""

from trinity_mq.telemetry.aggregate import aggregate_eval_runs, aggregate_eval_tasks, aggregate_runs, aggregate_tasks
from trinity_mq.telemetry.log import get_logger, mask_passwords, setup_logging
from trinity_mq.telemetry.metrics import METRICS_FILE, MetricsWriter, read_metrics
from trinity_mq.telemetry.sparkline import sparkline

__all__ = [
    "METRICS_FILE",
    "MetricsWriter",
    "aggregate_eval_runs",
    "aggregate_eval_tasks",
    "aggregate_runs",
    "aggregate_tasks",
    "get_logger",
    "mask_passwords",
    "read_metrics",
    "setup_logging",
    "sparkline",
]
