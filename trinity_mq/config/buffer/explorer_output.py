"""The output of mode ``explore``: experiences that the operators have processed."""

from __future__ import annotations

from pydantic import Field, model_validator

from trinity_mq.config.base import Section
from trinity_mq.config.buffer.storages import OutputStorage, storage_row


class ExplorerOutputConfig(Section):
    """Output of mode ``explore``: one file for each batch in a folder, or rows of a table.

    ``body``: ``.tmqx`` files with the exact experiences. Mode ``train`` reads the folder, ``trinity-mq inspect`` a
    single file. ``jsonl`` and ``parquet`` (extra ``parquet``): one row for each experience, with ids, texts, tokens,
    logprobs, rewards and advantages as plain columns. ``sql`` (extra ``sql``): the same rows in a table.
    """

    storage_type: OutputStorage = "body"
    """Kind of the output. A dotted path names your own class, a subclass of ``trinity_mq.data.Storage``."""
    path: str = ""
    """Folder, created if missing, or URL of a database, such as ``sqlite:///experiences.db``. Empty: ``experiences`` in
    the run's folder; ``sql`` needs a URL."""
    table: str = Field(default="experiences", pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")
    """sql: name of the table, created if missing."""

    @model_validator(mode="after")
    def _url(self) -> ExplorerOutputConfig:
        if storage_row(self.storage_type).is_database and "://" not in self.path:
            raise ValueError(
                f"path is {self.path!r} with storage_type {self.storage_type}, wanted the URL of a database, such as "
                "sqlite:///experiences.db or postgresql+psycopg://user@host/name"
            )
        return self
