"""Tasks, training data and output in databases: SQLite, and a real PostgreSQL server where one is installed."""

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
CHOSEN = "SELECT question, answer FROM tasks WHERE id > 1 ORDER BY id DESC"


def do(url: str, *statements: str) -> list[Any]:
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            results = [connection.execute(text(one)) for one in statements]
            return list(results[-1]) if results[-1].returns_rows else []
    finally:
        engine.dispose()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        address = f"sqlite:///{tmp_path_factory.mktemp('sql') / 'tasks.db'}"
        do(address, TABLE, ROWS)
        yield address
        return
    with server() as address:
        do(address, TABLE, ROWS)
        yield address


def tasks_of(url: str, query: str) -> list[Any]:
    taskset = open_taskset(TasksetConfig(storage_type="sql", path=url, query=query, selector="sequential"))
    return [task.raw_task for task in taskset.all_tasks()]


def test_rows_are_tasks_and_records_to_imitate_in_the_order_of_their_key(url: str) -> None:
    tasks = tasks_of(url, "tasks")
    assert tasks[0] == {"id": 1, "question": "a", "answer": "1", "level": 2.0, "more": {"hint": ["x"]}}
    assert [(task["question"], task.get("level")) for task in tasks] == [("a", 2.0), ("é", None), ("c", 1.5)]
    assert [task["question"] for task in tasks_of(url, CHOSEN)] == ["c", "é"]
    data = ExperienceBufferConfig(storage_type="sql", schema_type="sft", path=url, query="tasks")
    rows, identity = read_records(data)
    assert [(row["question"], row["answer"]) for row in rows] == [("a", "1"), ("é", "2"), ("c", "3")]
    assert identity == read_records(data)[1]


@pytest.mark.parametrize(("query", "said"), [("nothing", "nothing"), ("SELECT FROM WHERE", "syntax error")])
def test_what_cannot_be_read_says_why(url: str, query: str, said: str) -> None:
    with pytest.raises(TasksetError, match=f"'{query}' of .* cannot be read: .*{said}"):
        tasks_of(url, query)


def test_a_batch_that_is_written_again_is_there_once(url: str, tmp_path: Path) -> None:
    config = ExplorerOutputConfig(storage_type="sql", path=url, table="sampled")

    def experiences(batch: int, count: int, reward: float) -> list[Experience]:
        return [
            Experience(eid=EID(batch, 0, run), tokens=[1, 2], prompt_length=1, reward=reward) for run in range(count)
        ]

    sink = open_output(config, tmp_path)
    sink.write(1, experiences(1, 2, 1.0))
    sink.write(2, experiences(2, 1, 0.0))
    sink.close()
    again = open_output(config, tmp_path)  # of a process that was killed before its checkpoint
    again.write(2, experiences(2, 2, 0.5))
    rows = do(url, "SELECT batch, reward FROM sampled ORDER BY batch, id")
    assert [(str(batch), reward) for batch, reward in rows] == [("1", 1.0), ("1", 1.0), ("2", 0.5), ("2", 0.5)]
    do(url, "DROP TABLE sampled")
    with pytest.raises(SinkError, match="batch 3 cannot be written"):
        again.write(3, experiences(3, 1, 0.0))
    again.close()


@pytest.mark.parametrize(
    "away", ["postgresql+psycopg://me:secret@/postgres?host=/nowhere", "mysterious://me:secret@host/x"]
)
def test_a_server_that_is_away_is_named_without_its_password(tmp_path: Path, away: str) -> None:
    for failing in (
        lambda: tasks_of(away, "tasks"),
        lambda: open_output(ExplorerOutputConfig(storage_type="sql", path=away), tmp_path),
    ):
        with pytest.raises((TasksetError, SinkError), match=rf"{away.partition('+')[0].partition(':')[0]}.*me:\*\*\*@"):
            failing()


def test_a_query_belongs_to_a_database_and_a_database_has_a_url() -> None:
    for given, said in (
        ({"storage_type": "sql", "path": "sqlite:///x.db"}, "needs a query"),
        ({"storage_type": "file", "path": "x.jsonl", "query": "x"}, "reads no database: set storage_type to sql"),
    ):
        with pytest.raises(ValueError, match=said):
            TasksetConfig.model_validate(given)
    with pytest.raises(ValueError, match="wanted the URL of a database"):
        ExplorerOutputConfig(storage_type="sql", path="out.db")
