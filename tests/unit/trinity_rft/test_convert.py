from __future__ import annotations

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import legacy_bodies as old
from tests.trinity_configs import DPO, GSM8K
from trinity_mq.cli.convert import SHOWN
from trinity_mq.cli.main import main
from trinity_mq.config import load_config
from trinity_mq.experience import EID, Experience, decode, encode
from trinity_mq.trinity_rft.convert import SkippedError, convert_database

Capture = pytest.CaptureFixture[str]

GOOD = {"tokens": torch.tensor([1, 2, 3], dtype=torch.int32), "reward": 1.0}
BAD = GOOD | {"prompt_length": 0, "action_mask": torch.ones(2, dtype=torch.bool)}
NOT_FOR_A_BODY = GOOD | {"info": {1: "a key that is no text"}}


def write(path: Path, body: bytes) -> str:
    path.write_bytes(body)
    return str(path)


def test_files_of_each_kind_into_a_folder(tmp_path: Path, capsys: Capture) -> None:
    bodies = {
        "a.bin": old.trxp(GOOD, GOOD),
        "b.pkl": old.bare(old.Experience([1, 2, 3])),
        "c.tmqx": encode([Experience(tokens=[1, 2])]),
        "d.bin": old.trxp(),
    }
    inputs = [write(tmp_path / name, body) for name, body in bodies.items()]
    out = tmp_path / "deep" / "new"
    assert main(["convert-experiences", *inputs, "--out", str(out)]) == 0
    assert {path.name: len(decode(path.read_bytes())) for path in out.iterdir()} == {
        "a.tmqx": 2,
        "b.tmqx": 1,
        "c.tmqx": 1,
        "d.tmqx": 0,
    }
    assert {name: (tmp_path / name).read_bytes() for name in bodies} == bodies
    assert f"{inputs[0]} -> {out}/a.tmqx: 2 read, 2 written, 0 skipped" in capsys.readouterr().out


def test_one_file_compressed(tmp_path: Path) -> None:
    many = [GOOD | {"prompt_text": "the same text " * 20}] * 50
    source = write(tmp_path / "a.bin", old.trxp(*many))
    for compression, path in (("none", tmp_path / "plain.tmqx"), ("zstd", tmp_path / "small.tmqx")):
        assert main(["convert-experiences", source, "--out", str(path), "--compression", compression]) == 0
    plain, small = tmp_path / "plain.tmqx", tmp_path / "small.tmqx"
    assert decode(small.read_bytes()) == decode(plain.read_bytes())
    assert small.stat().st_size < plain.stat().st_size
    assert small.stat().st_mode == plain.stat().st_mode == Path(source).stat().st_mode


def test_what_cannot_be_converted_is_skipped_and_told(tmp_path: Path, capsys: Capture) -> None:
    inputs = [
        write(tmp_path / "a.bin", old.trxp(GOOD, BAD, GOOD, NOT_FOR_A_BODY)),
        write(tmp_path / "b.bin", b"nothing known"),
        write(tmp_path / "c.bin", old.trxp(*[BAD] * (SHOWN + 3))),
        str(tmp_path / "missing.bin"),
        str(tmp_path),
        write(tmp_path / "d.bin", old.trxp(GOOD)),
    ]
    out = tmp_path / "new"
    assert main(["convert-experiences", *inputs, "--out", str(out)]) == 1
    assert {path.name: len(decode(path.read_bytes())) for path in out.iterdir()} == {"a.tmqx": 2, "d.tmqx": 1}
    said = capsys.readouterr().out
    assert "a.tmqx: 4 read, 2 written, 2 skipped\n  skipped experience 1: prompt_length is 0, wanted" in said
    assert "  skipped experience 3: info has the key 1, wanted text" in said
    assert "b.bin: skipped: 13 bytes, wanted an experience body" in said
    assert f"c.bin -> nothing written: {SHOWN + 3} read, 0 written, {SHOWN + 3} skipped" in said
    assert "  and 3 more\n" in said
    assert "missing.bin: skipped: cannot be read: No such file or directory" in said
    assert f"{tmp_path}: skipped: cannot be read: Is a directory" in said


@pytest.mark.parametrize("first", [old.trxp(GOOD, BAD), old.trxp(GOOD, NOT_FOR_A_BODY), b"nothing known"])
def test_strict_stops(first: bytes, tmp_path: Path, capsys: Capture) -> None:
    inputs = [write(tmp_path / "a.bin", first), write(tmp_path / "b.bin", old.trxp(GOOD))]
    assert main(["convert-experiences", *inputs, "--out", str(tmp_path / "new"), "--strict"]) == 1
    assert not (tmp_path / "new").exists()
    assert "stopped at the first problem" in capsys.readouterr().out


def test_a_malicious_file_runs_nothing(tmp_path: Path, capsys: Capture) -> None:
    flag = tmp_path / "flag"
    payload = b"\x80\x02cposix\nsystem\n(X" + len(f"touch {flag}").to_bytes(4, "little") + f"touch {flag}".encode()
    inputs = [write(tmp_path / "a.pkl", payload + b"tR."), write(tmp_path / "b.bin", old.sealed(payload + b"tR."))]
    assert main(["convert-experiences", *inputs, "--out", str(tmp_path / "new")]) == 1
    assert capsys.readouterr().out.count("refers to 'posix' 'system'") == 2
    assert not flag.exists()


@pytest.mark.parametrize(
    ("inputs", "out", "words"),
    [
        (["a.tmqx"], ".", "a.tmqx is an input and is never overwritten"),
        (["b.bin", "a.tmqx"], "linked", "a.tmqx is an input"),
        (["b.bin"], "link.tmqx", "link.tmqx is an input"),
        (["b.bin"], "hard.tmqx", "hard.tmqx is an input"),
        (["b.bin", "a.tmqx"], "one.tmqx", "is one file for 2 inputs, wanted a folder"),
        (["b.bin", "b.pkl"], "new", "would both become"),
    ],
)
def test_no_input_is_written_over(inputs: list[str], out: str, words: str, tmp_path: Path, capsys: Capture) -> None:
    for name in ("a.tmqx", "b.bin", "b.pkl"):
        write(tmp_path / name, old.trxp(GOOD))
    (tmp_path / "linked").symlink_to(tmp_path)
    (tmp_path / "link.tmqx").symlink_to(tmp_path / "b.bin")
    os.link(tmp_path / "b.bin", tmp_path / "hard.tmqx")
    before = sorted(tmp_path.iterdir())
    assert main(["convert-experiences", *(str(tmp_path / name) for name in inputs), "--out", str(tmp_path / out)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_an_earlier_result_is_replaced_or_kept_whole(
    tmp_path: Path, on_sync: Callable[[Callable[[int], object]], None]
) -> None:
    source, target = write(tmp_path / "a.bin", old.trxp(GOOD)), tmp_path / "new" / "a.tmqx"
    words = ["convert-experiences", source, "--out", str(target.parent) + os.sep]
    assert main(words) == 0
    first = target.read_bytes()
    write(tmp_path / "a.bin", old.trxp(GOOD, GOOD))

    failures = [OSError(28, "No space left on device")]

    def full_once(_: int) -> None:
        if failures:
            raise failures.pop()

    on_sync(full_once)
    assert main(words) == 1
    assert target.read_bytes() == first
    assert list(target.parent.iterdir()) == [target]
    assert main(words) == 0
    assert len(decode(target.read_bytes())) == 2


# -- trinity-mq migrate: what it writes, what it says, and what it does not overwrite


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k.yaml"
    path.write_text(yaml.safe_dump(GSM8K))
    return path


def test_a_file_is_written_that_says_what_it_changed_and_lacks(source: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "ours.yaml"
    source.write_text(source.read_text().replace("dtype: bfloat16", "dtype: float16"))
    line = 1 + source.read_text().splitlines().index("    dtype: float16")
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    text = out.read_text()
    assert text.startswith("# Written by trinity-mq migrate from gsm8k.yaml, a configuration of Trinity-RFT.\n")
    assert "# Trinity-RFT's default; here it is 360 s\n  max_timeout: 1800\n" in text
    assert "# Has no counterpart here:\n#   explorer.rollout_model.dtype: float16 - " in text
    assert "# Is not needed here:\n" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert load_config(out).buffer.taskset.workflow == "math_workflow"
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"no counterpart: explorer.rollout_model.dtype ({source.name} line {line}): float16 - engines sample in "
        "`model.dtype`, float32 or bfloat16, in which the trainer computes too",
        f"{out} is valid; next: trinity-mq validate {out}",
    ]
    assert main(["migrate", str(source), "-o", str(out)]) == 2
    assert f"{out} already exists; give another name, or --force to overwrite it" in capsys.readouterr().err
    assert out.read_text() == text
    assert main(["migrate", str(source), "-o", str(out), "--force"]) == 0
    capsys.readouterr()
    assert main(["migrate", str(source)]) == 0
    said = capsys.readouterr()
    assert said.out == text
    assert "the result is valid; next: write it with -o FILE" in said.err
    for words, reason in (
        ([str(source), "-o", str(tmp_path / "none" / "x.yaml")], "x.yaml cannot be written: No such file"),
        ([str(tmp_path / "none.yaml")], "none.yaml: cannot be read"),
    ):
        assert main(["migrate", *words]) == 2
        assert reason in capsys.readouterr().err


def test_what_is_not_valid_as_it_stands_is_said(source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_TASKSET_PATH", raising=False)
    source.write_text(yaml.safe_dump(DPO))
    out = source.with_name("ours.yaml")
    assert main(["migrate", str(source), "-o", str(out)]) == 1
    said = capsys.readouterr().err
    assert f"{out} needs an edit: buffer.trainer_input.experience_buffer.path: environment variable" in said
    monkeypatch.setenv("TRINITY_TASKSET_PATH", "pairs.jsonl")
    assert load_config(out).algorithm.algorithm_type == "dpo"


def database(path: Path, *, split: bool = True, rows: int = 3, name: str = "explorer_output") -> str:
    """Write a buffer as Trinity-RFT does: with the encoded experiences in a table next to it (0.6), or in it (0.5)."""
    blob, other = ("", f"CREATE TABLE {name}_blob (id INTEGER PRIMARY KEY, experience_bytes BLOB NOT NULL)")
    if not split:
        blob, other = "experience_bytes BLOB,", "SELECT 1"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, timestamp DATETIME, task_id VARCHAR(64), run_id INTEGER, "
            f"msg_id VARCHAR(64), model_version INTEGER, {blob} reward FLOAT, consumed INTEGER)"
        )
        connection.execute(other)
        for number in range(1, rows + 1):
            eid = {"batch": number, "task": 7, "run": 0, "step": 2, "suffix": "ab12cd"}
            body = old.trxp(GOOD | {"eid": eid, "info": {"model_version": 1}})
            values: dict[str, object] = {
                "id": number, "task_id": "7", "run_id": 4, "msg_id": f"m{number}", "model_version": 9, "reward": 0.5,
            }  # fmt: skip
            if not split:
                values["experience_bytes"] = body
            marks = ", ".join("?" * len(values))
            connection.execute(f"INSERT INTO {name} ({', '.join(values)}) VALUES ({marks})", list(values.values()))
            if split:
                connection.execute(f"INSERT INTO {name}_blob VALUES (?, ?)", (number, body))
    return str(path)


@pytest.mark.parametrize("split", [True, False])
def test_a_database_of_experiences(tmp_path: Path, capsys: Capture, split: bool) -> None:
    source = Path(database(tmp_path / "buffer.db", split=split))
    before = source.read_bytes()
    out = tmp_path / "new"

    assert main(["convert-experiences", f"sqlite:///{source}", "--out", str(out)]) == 0

    assert f"{out}/buffer-explorer_output-00001.tmqx: 3 read, 3 written, 0 skipped" in capsys.readouterr().out
    (path,) = out.iterdir()
    experiences = decode(path.read_bytes())
    assert [one.eid for one in experiences] == [EID(number, 7, 4, 2, f"m{number}") for number in (1, 2, 3)]
    last = experiences[2]
    assert (last.reward, last.info, last.tokens.tolist()) == (0.5, {"model_version": 9}, [1, 2, 3]), "the columns count"
    assert source.read_bytes() == before

    divided = list(convert_database(source, tmp_path / "two", "none", strict=True, per_file=2))
    assert [(path.name[-10:], outcome.written) for path, outcome in divided] == [("00001.tmqx", 2), ("00002.tmqx", 1)]
    assert [one for path, _ in divided for one in decode(path.read_bytes())] == experiences


def test_a_database_of_tasks_and_messages_becomes_records(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "é"}]
    with closing(sqlite3.connect(tmp_path / "data.db")) as connection, connection:
        connection.execute("CREATE TABLE tasks (id INTEGER PRIMARY KEY, raw_task JSON NOT NULL)")
        connection.execute("CREATE TABLE 'odd \"name/' (id INTEGER PRIMARY KEY, message_list JSON)")
        connection.execute("CREATE TABLE 'odd \"name/_blob' (id INTEGER PRIMARY KEY, experience_bytes BLOB)")
        for number in (1, 2):
            connection.execute("INSERT INTO tasks VALUES (?, ?)", (number, json.dumps({"question": number})))
        connection.execute("INSERT INTO 'odd \"name/' VALUES (1, ?)", (json.dumps(messages),))
        connection.execute("INSERT INTO 'odd \"name/_blob' VALUES (1, ?)", (old.trxp(GOOD),))

    assert main(["convert-experiences", str(tmp_path / "data.db"), "--out", str(tmp_path / "new")]) == 0

    written = {path.name: path for path in (tmp_path / "new").iterdir()}
    assert sorted(written) == ["data-odd__name_-00001.tmqx", "data-odd__name_.jsonl", "data-tasks.jsonl"]
    records = {
        name: [json.loads(line) for line in written[name].read_text().splitlines()] for name in sorted(written)[1:]
    }
    assert records == {
        "data-odd__name_.jsonl": [{"messages": messages}],
        "data-tasks.jsonl": [{"question": 1}, {"question": 2}],
    }


def test_a_database_executes_nothing_and_tells_what_it_skips(tmp_path: Path, capsys: Capture) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    source = database(tmp_path / "buffer.db")
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.execute(
            "UPDATE explorer_output_blob SET experience_bytes = ? WHERE id = 2", (pickle.dumps(Hostile()),)
        )
        connection.execute("DELETE FROM explorer_output_blob WHERE id = 3")
    cut = tmp_path / "cut.db"
    cut.write_bytes(Path(source).read_bytes()[:5000])
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection, connection:
        connection.execute("CREATE TABLE people (id INTEGER)")
    inputs = [source, str(cut), str(tmp_path / "other.db"), write(tmp_path / "a.bin", old.trxp(GOOD))]

    assert main(["convert-experiences", *inputs, "--out", str(tmp_path / "new")]) == 1

    said = capsys.readouterr().out
    assert "3 read, 1 written, 2 skipped" in said
    assert "skipped row 1: the pickle refers to" in said
    assert "skipped row 2: it has no encoded experience" in said
    assert f"{cut}: skipped: the database cannot be read" in said
    assert "other.db: skipped: a database without a buffer of Trinity-RFT (tables: people)" in said
    assert (tmp_path / "new" / "a.tmqx").is_file()
    assert not (tmp_path / "executed").exists()
    assert main(["convert-experiences", source, "--out", str(tmp_path / "one.tmqx")]) == 2
    assert "a database becomes several; give a folder" in capsys.readouterr().err


def test_a_hostile_database_is_skipped_row_by_row(tmp_path: Path) -> None:
    source = tmp_path / "buffer.db"
    blob = old.sealed(old.bare(old.Experience([1, 2, 3])))
    with closing(sqlite3.connect(source)) as database:
        database.execute("CREATE TABLE e (id INTEGER PRIMARY KEY, run_id, task_id, reward, experience_bytes)")
        ids = [("x", "t"), (1e999, "t"), (b"\xff", "t"), (-(2**63), "t"), (1, b"\xff"), (1, "t")]
        database.executemany(
            "INSERT INTO e (run_id, task_id, reward, experience_bytes) VALUES (?, ?, 1.0, ?)",
            [(*pair, blob) for pair in ids],
        )
        for name in ("a b", "../b"):
            database.execute(f'CREATE TABLE "{name}" (id INTEGER PRIMARY KEY, raw_task)')
            texts = [(r'{"q": "\ud800"}',), ("[" * 100_000,), (3,), ('{"q": 1}',)]
            database.executemany(f'INSERT INTO "{name}" (raw_task) VALUES (?)', texts)
        database.commit()

    results = dict(convert_database(source, tmp_path / "out", "none", strict=False))

    outcomes = {path.name: (outcome.read, outcome.written) for path, outcome in results.items()}
    assert outcomes.pop("buffer-e-00001.tmqx")[0] == len(ids)
    assert outcomes == {f"buffer-{name}.jsonl": (4, 1) for name in ("a_b", ".._b")}
    assert {path.parent for path in results} == {tmp_path / "out"}
    with closing(sqlite3.connect(source)) as database:
        database.execute('CREATE TABLE "a/b" (id INTEGER PRIMARY KEY, raw_task)')
    with pytest.raises(SkippedError, match="'a b' and 'a/b' would both become a_b"):
        list(convert_database(source, tmp_path / "again", "none", strict=False))
    assert not (tmp_path / "again").exists()
