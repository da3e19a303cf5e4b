"""Tasks, training data and output in PostgreSQL: a real server, where one is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from tests.postgresql import server
from trinity_mq.config import ExperienceBufferConfig, ExplorerOutputConfig, TasksetConfig
from trinity_mq.data import TasksetError, open_taskset
from trinity_mq.data.records import read_records
from trinity_mq.data.storage import SinkError, open_output
from trinity_mq.experience import EID, Experience

TABLE = "CREATE TABLE tasks (id integer PRIMARY KEY, question text, answer text, level numeric(4, 1), more jsonb)"
ROWS = """
INSERT INTO tasks VALUES (3, 'c', '3', 1.5, NULL), (1, 'a', '1', 2, '{"hint": ["x"]}'), (2, 'é', '2', NULL, NULL)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as found:
        do(found, TABLE, ROWS)
        yield found


def do(url: str, *statements: str) -> list[Any]:
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            results = [connection.execute(text(one)) for one in statements]
            return list(results[-1]) if results[-1].returns_rows else []
    finally:
        engine.dispose()


def test_rows_are_tasks_in_the_order_of_their_key(url: str) -> None:
    whole = open_taskset(TasksetConfig(storage_type="sql", path=url, query="tasks", selector="sequential"))
    tasks = [task.raw_task for task in whole.all_tasks()]
    assert [task["question"] for task in tasks] == ["a", "é", "c"]
    assert tasks[0] == {"id": 1, "question": "a", "answer": "1", "level": 2.0, "more": {"hint": ["x"]}}
    assert tasks[2]["level"] == 1.5
    chosen = "SELECT question, answer FROM tasks WHERE id > 1 ORDER BY id DESC"
    found = open_taskset(TasksetConfig(storage_type="sql", path=url, query=chosen, selector="sequential"))
    assert [task.raw_task["question"] for task in found.all_tasks()] == ["c", "é"]


def test_rows_are_records_to_imitate(url: str) -> None:
    data = ExperienceBufferConfig(storage_type="sql", schema_type="sft", path=url, query="tasks")
    rows, identity = read_records(data)
    assert [(row["question"], row["answer"]) for row in rows] == [("a", "1"), ("é", "2"), ("c", "3")]
    assert identity == read_records(data)[1]


@pytest.mark.parametrize(("query", "said"), [("nothing", "nothing"), ("SELECT FROM WHERE", "syntax error")])
def test_what_cannot_be_read_says_why(url: str, query: str, said: str) -> None:
    with pytest.raises(TasksetError, match=f"cannot be read: .*{said}"):
        open_taskset(TasksetConfig(storage_type="sql", path=url, query=query))


def test_a_batch_that_is_written_again_is_there_once(url: str, tmp_path: Path) -> None:
    config = ExplorerOutputConfig(storage_type="sql", path=url, table="sampled")

    def experiences(batch: int, count: int, reward: float) -> list[Experience]:
        return [
            Experience(eid=EID(batch, 0, run=run), tokens=[1, 2, 3], prompt_length=1, reward=reward)
            for run in range(count)
        ]

    sink = open_output(config, tmp_path)
    sink.write(1, experiences(1, 2, 1.0))
    sink.write(2, experiences(2, 1, 0.0))
    sink.close()
    again = open_output(config, tmp_path)  # of a process that was killed before its checkpoint
    again.write(2, experiences(2, 2, 0.5))
    again.close()
    found = do(url, "SELECT batch, reward FROM sampled ORDER BY batch, id")
    assert [(str(batch), reward) for batch, reward in found] == [("1", 1.0), ("1", 1.0), ("2", 0.5), ("2", 0.5)]


def test_a_server_that_is_away_is_named_without_its_password(tmp_path: Path) -> None:
    away = f"postgresql+psycopg://me:secret@/postgres?host={tmp_path}"
    for failing in (
        lambda: open_taskset(TasksetConfig(storage_type="sql", path=away, query="tasks")),
        lambda: open_output(ExplorerOutputConfig(storage_type="sql", path=away), tmp_path),
    ):
        with pytest.raises((TasksetError, SinkError)) as caught:
            failing()
        assert "secret" not in str(caught.value)
        assert "postgresql" in str(caught.value)
