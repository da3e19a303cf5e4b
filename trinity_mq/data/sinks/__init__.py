"""Sinks: destinations for processed experiences, written batch by batch. A repeated write of a batch is idempotent."""

from __future__ import annotations

from pathlib import Path

from trinity_mq.config import ExplorerOutputConfig
from trinity_mq.data.sinks.base import ExperienceSink, SinkError
from trinity_mq.data.sinks.files import FileSink, encode_bodies, encode_json_lines, encode_parquet

__all__ = ["ExperienceSink", "SinkError", "open_sink"]

ENCODERS = {
    "body": (".tmqx", encode_bodies),
    "jsonl": (".jsonl", encode_json_lines),
    "parquet": (".parquet", encode_parquet),
}
"""File suffix and encoder by ``storage_type``."""


def open_sink(config: ExplorerOutputConfig, run_folder: Path) -> ExperienceSink:
    """Return the sink that ``config`` describes, ready for writing.

    Raises:
        SinkError: The sink cannot be used, or its package is not installed.
    """
    if config.storage_type == "sql":
        from trinity_mq.data.sinks.sql import SqlSink

        return SqlSink(config.path, config.table)
    suffix, encode = ENCODERS[config.storage_type]
    return FileSink(Path(config.path).expanduser() if config.path else run_folder / "experiences", suffix, encode)
