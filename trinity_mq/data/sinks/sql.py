"""A database table with a row for each experience."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_mq.data.storage import NO_SQLALCHEMY, SinkError
from trinity_mq.experience import EncodeError, Experience
from trinity_mq.experience.hf import ENCODED, to_record
from trinity_mq.telemetry import mask_passwords

try:
    import sqlalchemy
    from sqlalchemy import JSON, Column, Float, Integer, LargeBinary, MetaData, String, Table
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as missing:
    raise SinkError(NO_SQLALCHEMY) from missing

BATCH = "batch_number"
"""Column with the batch number. A repeated write of a batch replaces the rows with its number."""
_KINDS = {
    "uid": String,
    "batch": String,
    "task": String,
    "run": Integer,
    "step": Integer,
    "experience_type": String,
    "prompt_length": Integer,
    "reward": Float,
    "temperature": Float,
    "truncate_status": String,
    "prompt_text": String,
    "response_text": String,
    "taskset": String,
    "index": Integer,
    ENCODED: LargeBinary,
}
"""Types of the columns. All other columns, such as lists of tokens, have the type JSON."""


class SqlSink:
    """Writes the rows of :func:`trinity_mq.experience.to_hf_datasets`, with the experience's uid and the batch number,
    into a table, in one transaction for each batch.

    Args:
        url: URL of the database, as SQLAlchemy takes it.
        table: Name of the table, created if missing.
    """

    def __init__(self, url: str, table: str) -> None:
        self.title = f"table {table} of {mask_passwords(url)}"
        names = ["uid", *to_record(Experience(tokens=[0, 0], prompt_length=1))]
        columns = [Column(name, _KINDS.get(name, JSON)()) for name in names]
        self._table = Table(
            table, MetaData(), Column("id", Integer, primary_key=True), Column(BATCH, Integer, index=True), *columns
        )
        try:
            self._engine = sqlalchemy.create_engine(url)
            self._table.metadata.create_all(self._engine)
            self._columns = {column["name"] for column in sqlalchemy.inspect(self._engine).get_columns(table)}
        except (SQLAlchemyError, ImportError) as error:
            raise SinkError(f"{self.title} cannot be used: {_masked_error(error)}") from error

    def write(self, batch: int, experiences: Sequence[Experience]) -> None:
        """Write a batch's rows, replacing existing rows of this batch.

        Raises:
            SinkError: The rows cannot be written. The table is then unchanged.
        """
        try:
            rows = [{BATCH: batch, "uid": experience.eid.uid, **to_record(experience)} for experience in experiences]
            # a table of release 0.2.0 has no columns for info, metrics and messages
            rows = [{name: value for name, value in row.items() if name in self._columns} for row in rows]
            with self._engine.begin() as transaction:
                transaction.execute(self._table.delete().where(self._table.c[BATCH] == batch))
                transaction.execute(self._table.insert(), rows)
        except (SQLAlchemyError, EncodeError) as error:
            raise SinkError(f"batch {batch} cannot be written to {self.title}: {_masked_error(error)}") from error

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


def _masked_error(error: Exception) -> str:
    return mask_passwords(" ".join(str(error).split())[:300])
