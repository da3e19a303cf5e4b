"""Logs, metrics and traces of a run. From the rest of the library, this package imports only ``file_lock`` and
``terminal``.
"""

from trinity_mq.telemetry.aggregate import (
    aggregate_eval_runs,
    aggregate_eval_tasks,
    aggregate_metrics,
    aggregate_runs,
    aggregate_tasks,
)
from trinity_mq.telemetry.log import LOGS_FOLDER, get_logger, mask_passwords, setup_logging, work_for
from trinity_mq.telemetry.metrics import LINE_FIELDS, METRICS_FILE, MetricsWriter, read_metrics
from trinity_mq.telemetry.sparkline import sparkline
from trinity_mq.telemetry.trace import flush_trace, start_trace
from trinity_mq.telemetry.trace_files import read_trace

__all__ = [
    "LINE_FIELDS",
    "LOGS_FOLDER",
    "METRICS_FILE",
    "MetricsWriter",
    "aggregate_eval_runs",
    "aggregate_eval_tasks",
    "aggregate_metrics",
    "aggregate_runs",
    "aggregate_tasks",
    "flush_trace",
    "get_logger",
    "mask_passwords",
    "read_metrics",
    "read_trace",
    "setup_logging",
    "sparkline",
    "start_trace",
    "work_for",
]
