"""Sinks: where processed experiences are written, a batch at a time, each once however often it is written."""

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
"""End of a file's name, and what makes its content, by ``storage_type``."""


def open_sink(config: ExplorerOutputConfig, run_folder: Path) -> ExperienceSink:
    """Return the sink that ``config`` describes, ready to be written to.

    Raises:
        SinkError: It cannot be used, or a package for it is not installed.
    """
    if config.storage_type == "sql":
        from trinity_mq.data.sinks.sql import SqlSink

        return SqlSink(config.path, config.table)
    suffix, encode = ENCODERS[config.storage_type]
    return FileSink(Path(config.path).expanduser() if config.path else run_folder / "experiences", suffix, encode)
