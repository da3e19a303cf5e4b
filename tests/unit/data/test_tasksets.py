import contextlib
import datetime
import decimal
import json
import re
import sys
import uuid
from pathlib import Path
from types import ModuleType

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from trinity_mq.config import FormatConfig, TasksetConfig
from trinity_mq.data import TasksetError, open_taskset
from trinity_mq.data.synthetic import KINDS, problems
from trinity_mq.messages import TaskBody, TaskSubmission, decode, encode

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


def file_config(path, **keys):
    return TasksetConfig(name="mine", storage_type="file", path=str(path), **keys)


def questions(path, **keys):
    return [body.raw_task["question"] for body in open_taskset(file_config(path, **keys)).all_tasks()]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": str(i)}) + "\n" for i in range(10)) + "\n")
    return path


def test_a_body_has_all_that_a_workflow_needs_and_travels(jsonl):
    keys = {
        "workflow": "async_simple_workflow", "workflow_args": {"a": 1}, "reward_fn": "char_match",
        "reward_fn_args": {"b": 2}, "rollout_args": {"temperature": 0.5},
    }  # fmt: skip
    config = file_config(jsonl, selector="sequential", format=FormatConfig(system_prompt="Be brief."), **keys)
    (body,) = open_taskset(config, repeat_times=8).next_batch(1)
    assert body == TaskBody(
        raw_task={"question": "q0", "answer": "0"},
        repeat_times=8,
        format_args={"prompt_key": "question", "response_key": "answer", "system_prompt": "Be brief."},
        index={"taskset": "mine", "index": 0},
        **keys,
    )
    assert decode(encode(TaskSubmission(task=body)), TaskSubmission).task == body


@pytest.mark.parametrize(
    ("workflow", "refused"), [("math_workflow", True), ("gymnasium_workflow", False), ("my.Workflow", False)]
)
def test_records_of_environments_need_no_prompt(tmp_path, workflow, refused):
    path = tmp_path / "t.jsonl"
    path.write_text('{"seed": 1, "size": 4}\n')
    with pytest.raises(TasksetError, match="has nothing at 'question'") if refused else contextlib.nullcontext():
        (body,) = open_taskset(file_config(path, workflow=workflow)).all_tasks()
        assert body.raw_task == {"seed": 1, "size": 4}


CHOICES = {
    "workflow": "math_workflow", "reward_fn": "exact_match",
    "format": {"workflow_key": "wf", "reward_fn_key": "rf", "system_prompt_key": "sys", "enable_thinking": False},
    "allowed_workflows": ["simple_workflow"], "allowed_reward_fns": ["char_match"],
    "rollout_args": {"min_response_tokens": 1},
}  # fmt: skip


def test_records_choose_among_the_names_that_the_taskset_allows(tmp_path):
    records = [{}, {"wf": "", "rf": None}, {"wf": "math_workflow"}, {"wf": "simple_workflow", "rf": "char_match"}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"question": "q", "answer": "a", **record}) + "\n" for record in records))
    bodies = open_taskset(file_config(path, **CHOICES)).all_tasks()
    assert [(body.workflow, body.reward_fn) for body in bodies] == [
        *[("math_workflow", "exact_match")] * 3, ("simple_workflow", "char_match"),
    ]  # fmt: skip
    assert bodies[0].rollout_args == {"min_tokens": 1, "enable_thinking": False}
    assert bodies[0].format_args["system_prompt_key"] == "sys"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"wf": "simple_workflw"},
            "'wf' is 'simple_workflw', and records of this taskset may name math_workflow, simple",
        ),
        ({"wf": "program_workflow"}, "list the name in allowed_workflows of the taskset"),
        ({"wf": "os.system"}, "'os.system' is no registered name"),
        ({"wf": "trinity_mq.workflows.SimpleWorkflow"}, "is no registered name"),
        ({"wf": "/tmp/mine.py"}, "is no registered name"),
        ({"wf": "mine:Mine"}, "is no registered name"),
        ({"wf": ["math_workflow"]}, "is no registered name"),
        ({"rf": "math_reward"}, "list the name in allowed_reward_fns of the taskset"),
        ({"rf": "os.system"}, "is no registered name"),
        ({"sys": {"role": "system"}}, "'sys' holds a dict, wanted the text of the system prompt"),
    ],
)
def test_a_record_chooses_no_other_code(tmp_path, record, problem):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"question": "q", "answer": "a", **more}) + "\n" for more in ({}, record)))
    with pytest.raises(TasksetError, match=re.escape(problem)) as caught:
        open_taskset(file_config(path, **CHOICES))
    assert f"taskset 'mine': record 1 of {path}: " in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"allowed_workflows": ["my.Workflow"]}, "is no registered name"),
        ({"allowed_workflows": ["simple_workflow"], "format": {}}, "set format.workflow_key"),
        ({"allowed_reward_fns": ["char_match"], "format": {}}, "set format.reward_fn_key"),
        ({"rollout_args": {"chat_template_kwargs": {"enable_thinking": True}}}, "switches thinking in format"),
        ({"rollout_args": {"min_tokens": 1, "min_response_tokens": 2}}, "min_tokens is 1 and min_response_tokens"),
    ],
)
def test_settings_of_records_that_contradict_are_refused(keys, problem):
    with pytest.raises(ValueError, match=problem):
        file_config(
            "t.jsonl",
            **{
                **CHOICES,
                **({} if "format" not in keys else {"allowed_workflows": [], "allowed_reward_fns": []}),
                **keys,
            },
        )


def test_an_evaluation_set_gives_every_task_once_and_in_order(jsonl):
    taskset = open_taskset(file_config(jsonl, repeat_times=4), is_eval=True)
    bodies = taskset.all_tasks()
    assert [body.raw_task["question"] for body in bodies] == questions(jsonl) == [f"q{i}" for i in range(10)]
    assert {(body.is_eval, body.repeat_times) for body in bodies} == {(True, 4)}
    assert taskset.state()["cursor"] == 0
    assert questions(jsonl, limit=3) == ["q0", "q1", "q2"]


def test_a_position_of_other_data_or_order_is_refused(jsonl):
    state = open_taskset(file_config(jsonl), seed=1).state()
    with pytest.raises(TasksetError, match="belongs to seed 1, this one has 2"):
        open_taskset(file_config(jsonl), seed=2).restore(state)
    with pytest.raises(TasksetError, match="selector 'shuffle'"):
        open_taskset(file_config(jsonl, selector="sequential"), seed=1).restore(state)
    with pytest.raises(TasksetError, match=r"\(limit: 9\) have changed .*: there were 10, and 1 fewer are there now"):
        open_taskset(file_config(jsonl, limit=9), seed=1).restore(state)
    taskset = open_taskset(file_config(jsonl), seed=1)
    with pytest.raises(TasksetError, match="cursor 11"):
        taskset.restore(taskset.state() | {"cursor": 11})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda lines: [*lines, lines[0]], "1 were appended to the 10 earlier records, which are unchanged"),
        (lambda lines: [*lines[:5], lines[0], *lines[5:]], "there were 10 and are 11"),
        (lambda lines: lines[3:], "there were 10, and 3 fewer are there now"),
        (lambda lines: lines[::-1], "there are 10 as before, but some have other content or another position"),
        (lambda lines: [lines[0].replace("q0", "q7"), *lines[1:]], "there are 10 as before, but some have other"),
    ],
)
def test_what_has_changed_in_the_records_is_said_in_words(jsonl, edit, said):
    state = open_taskset(file_config(jsonl), seed=1).state()
    jsonl.write_text("".join(edit(jsonl.read_text().splitlines(keepends=True))))
    with pytest.raises(TasksetError) as caught:
        open_taskset(file_config(jsonl), seed=1).restore(state)
    words = str(caught.value)
    assert f"the records of {jsonl} have changed since the run began: {said}" in words
    assert "Put the old data back, or start over with `trinity-mq run CONFIG --fresh`" in words
    assert state["identity"].partition("-")[2] not in words, "no hash"


@pytest.mark.parametrize(("name", "separator"), [("tasks.csv", ","), ("TASKS.CSV", ","), ("tasks.tsv", "\t")])
def test_csv_is_read_with_the_names_of_its_first_line(tmp_path, name, separator):
    path = tmp_path / name
    lines = (["question", "answer", "note"], ['"a, ""b""\nc\td"', "1", ""], [], ["\u00e4\u2028", "2", "x"])
    path.write_text("\ufeff" + "\r\n".join(separator.join(line) for line in lines), encoding="utf-8", newline="")
    tasks = open_taskset(file_config(path)).all_tasks()
    assert [body.raw_task for body in tasks] == [
        {"question": 'a, "b"\nc\td', "answer": "1", "note": ""},
        {"question": "\u00e4\u2028", "answer": "2", "note": "x"},
    ]


DAY, MIDNIGHT = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2)


@pytest.mark.parametrize(
    ("values", "kind", "read"),
    [
        ([DAY], pyarrow.date32(), "2026-01-02"),
        ([DAY], pyarrow.date64(), "2026-01-02"),
        ([4_000_000], pyarrow.date32(), "12921-08-18"),
        ([MIDNIGHT], pyarrow.timestamp("s"), "2026-01-02T00:00:00"),
        ([MIDNIGHT], pyarrow.timestamp("us", "Europe/Berlin"), "2026-01-02T01:00:00+01:00"),
        ([0], pyarrow.timestamp("us", "Mars/Phobos"), "0"),
        ([0], pyarrow.timestamp("ns"), "1970-01-01T00:00:00"),
        ([1 << 61], pyarrow.timestamp("us"), "<value out of range: 2305843009213693952>"),
        ([datetime.time(1, 2)], pyarrow.time64("us"), "01:02:00"),
        ([90], pyarrow.duration("s"), 90.0),
        ([1 << 62], pyarrow.duration("s"), str(1 << 62)),
        ([decimal.Decimal("1.50")], None, 1.5),
        ([decimal.Decimal("3.00")], None, 3),
        ([decimal.Decimal("1" * 60)], pyarrow.decimal256(70, 2), "1" * 60),
        ([decimal.Decimal("123456789012345678901.00")], None, "123456789012345678901"),
        ([uuid.UUID(int=7).bytes], pyarrow.uuid(), "00000000-0000-0000-0000-000000000007"),
        ([b"\xff"], None, b"\xff"),
        ([{"a": [DAY], "b": {"c": decimal.Decimal("1.5")}}], None, {"a": ["2026-01-02"], "b": {"c": 1.5}}),
        ([[("a", DAY)]], pyarrow.map_(pyarrow.string(), pyarrow.date32()), [["a", "2026-01-02"]]),
        ([[{"a": 4_000_000}]], pyarrow.list_(pyarrow.struct({"a": pyarrow.date32()})), [{"a": "12921-08-18"}]),
    ],
)
def test_a_column_of_any_type_is_read_and_travels(tmp_path, values, kind, read):
    path = tmp_path / "tasks.parquet"
    parquet.write_table(pyarrow.table({"question": ["q"], "answer": ["a"], "made": pyarrow.array(values, kind)}), path)
    (body,) = open_taskset(file_config(path)).all_tasks()
    assert body.raw_task == {"question": "q", "answer": "a", "made": read}


def test_parquet_is_read_and_its_package_named(tmp_path, monkeypatch):
    path = tmp_path / "tasks.parquet"
    rows = [{"question": f"q{i}", "answer": i, "image": b"\x00", "tags": ["a", None]} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [body.raw_task for body in open_taskset(file_config(path)).all_tasks()] == rows
    rows[1]["answer"] = None
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(TasksetError, match=r"tasks\.parquet\[1\]: has nothing at 'answer'"):
        open_taskset(file_config(path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TasksetError, match=r"pip install 'trinity-mq\[parquet\]'"):
        open_taskset(file_config(path))


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("t.json", '[{"question": "q", "answer": "a"}]', ["q"]),
        ("t.jsonl", '\ufeff{"question": "a\u2028b\u0085c", "answer": "1"}\r\n', ["a\u2028b\u0085c"]),
        ("t.csv", f"question,answer\n{'1' * 200_000},2\n", ["1" * 200_000]),
    ],
    ids=["a list", "line separators and a byte order mark", "a cell of more than 128 KiB"],
)
def test_what_is_no_line_of_json_is_read_too(tmp_path, name, content, read):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert questions(tmp_path / name) == read


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.jsonl", b'{"question": "q", "answer": "a"}\n{"question"\n', r"t\.jsonl:2: not JSON"),
        ("t.jsonl", b'\n\n{"question": "q"}\n', r"t\.jsonl:3: has nothing at 'answer'.*format\.response_key"),
        ("t.jsonl", b'{"prompt": "q", "answer": "a"}\n', r":1: has nothing at 'question' \(its keys: prompt, answer"),
        ("t.jsonl", b'["q", "a"]\n', r"t\.jsonl:1: holds a list, wanted a record"),
        ("t.jsonl", b'{"question": "q", "answer": %d}' % 10**30, r"t\.jsonl:1: holds a value that a message cannot"),
        ("t.jsonl", b'{"question": "\\ud800", "answer": 1}', r"t\.jsonl:1: holds a value that a message cannot carry"),
        ("t.jsonl", b"[" * 100_000, r"t\.jsonl:1: not JSON"),
        ("t.jsonl", b"\xff\xfe\x00", r"t\.jsonl is not UTF-8"),
        ("t.jsonl", b"", "holds no records"),
        ("t.json", b'{"question": "q"}', r"t\.json holds a dict, wanted a list"),
        ("t.csv", b"question,answer\n1,2\n1,2,3\n", r"t\.csv:3: has 3 cells, wanted 2"),
        ("t.csv", b"question,answer\n1\n", r"t\.csv:2: has 1 cells, wanted 2"),
        ("t.csv", b"question,question\n1,2\n", r"t\.csv:1: the columns are question, question, wanted each name once"),
        ("t.csv", b'question,answer\n"1,2\n', r"t\.csv:2: cannot be read as CSV"),
        ("t.csv", b"prompt,answer\n1,2\n", r"t\.csv:2: has nothing at 'question' \(its keys: prompt, answer"),
        ("t.csv", b"question,answer\n", "holds no records"),
        ("t.csv", b"\xff\xfe\x00", r"t\.csv is not UTF-8"),
        ("t.parquet", b"PAR1", r"t\.parquet cannot be read as Parquet"),
        ("t.xlsx", b"PK", r"t\.xlsx ends in '\.xlsx', wanted one of \.jsonl, .*\.csv, \.tsv, \.parquet"),
        ("t", b"{}", r"t ends in '', wanted one of \.jsonl"),
        ("t.json", b'[{"question": "q"}]', r"t\.json\[0\]: has nothing at 'answer'"),
        ("none.jsonl", None, r"none\.jsonl cannot be read: No such file"),
        ("", None, "cannot be read: Is a directory"),
    ],
)
def test_bad_files_give_one_line_that_says_where(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TasksetError, match=said) as caught:
        open_taskset(file_config(path))
    assert "mine" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(20)
def test_hugging_face_rows_become_tasks_and_its_errors_one_line(monkeypatch):
    """The package itself is an extra: this pins what is asked of it and what becomes of the rows."""
    module, asked, rows = ModuleType("datasets"), [], [{"question": "q", "answer": "a"}]
    config = TasksetConfig(name="hf", storage_type="huggingface", path="org/set", subset_name="main", split="test")

    def load_dataset(*args, **keys):
        asked.append((args, keys))
        if rows is None:
            raise ConnectionError("no\n  network")
        return rows

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    rows[0]["made"] = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert open_taskset(config).all_tasks()[0].raw_task == {**rows[0], "made": "2026-01-02T00:00:00+00:00"}
    assert asked[0] == (("org/set", "main"), {"split": "test"})
    rows[0]["made"] = decimal.Decimal("1E+999999999")
    assert open_taskset(config).all_tasks()[0].raw_task["made"] == "1E+999999999", "not a billion digits"
    rows[0]["image"] = object()
    with pytest.raises(TasksetError, match="holds a value that a message cannot carry"):
        open_taskset(config)
    rows = None
    with pytest.raises(TasksetError, match="'org/set' split 'test' cannot be loaded: no network"):
        open_taskset(config)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TasksetError, match=r"pip install 'trinity-mq\[datasets\]'"):
        open_taskset(config)
    with pytest.raises(TasksetError, match="fed by submitted tasks"):
        open_taskset(TasksetConfig(storage_type="queue"))


@pytest.mark.parametrize(("saved", "split", "refusal"), [
    (None, "train", None), ("test", "train", None), ("test", "test", None),
    ("train", "test", "'hf': .* split 'test' cannot .* a single dataset of split 'train'. Remove split"),
    (None, "test", "'hf': .* split 'test' cannot .* a single dataset of no split. Remove split"),
])  # fmt: skip
def test_a_saved_dataset_of_another_split_is_refused(tmp_path, saved, split, refusal):
    datasets.Dataset.from_list([{"question": "q", "answer": "a"}], split=saved).save_to_disk(tmp_path / "saved")
    config = TasksetConfig(name="hf", storage_type="huggingface", path=str(tmp_path / "saved"), split=split)
    with pytest.raises(TasksetError, match=refusal) if refusal else contextlib.nullcontext():
        assert len(open_taskset(config)) == 1


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no GSM8K at {GSM8K}")
def test_gsm8k_reads_as_it_is():
    taskset = open_taskset(file_config(GSM8K / "test.jsonl", reward_fn="gsm8k"))
    assert len(taskset) == 1319
    assert taskset.all_tasks()[0].raw_task["answer"].endswith("#### 18")


def test_a_record_larger_than_a_message_is_refused_with_its_place_and_size(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"question": "1"}) + "\n" + json.dumps({"question": "2", "image": "x" * 1000}) + "\n")
    config = file_config(path, format=FormatConfig(response_key=""))
    assert len(open_taskset(config, max_bytes=1100)) == 2
    with pytest.raises(TasksetError, match=rf"{path}:2: the record takes 10\d\d bytes .* leaves 900 .* paths or URLs"):
        open_taskset(config, max_bytes=900)


def signed(match):
    return f"{match[1]} {'+' if match[2] else '-'} {match[3]}"


WANTED = {
    "ops3": (3000, r"[-+,]\d{3}=", lambda q: sorted(q[1:4])["-,+".index(q[0])]),
    "max3": (1000, r"\d,\d,\d=", lambda q: max(q[:-1].split(","))),
    "copy3": (1000, r"\d{3}=", lambda q: q[:-1]),
    "sort3": (1000, r"\d{3}=", lambda q: "".join(sorted(q[:-1]))),
    "sums": (2304, r"What is \d+ \+ \d+\?", lambda q: str(eval(q.removeprefix("What is ")[:-1]))),
    "word_problems": (
        1276,
        r"(\w+) has (\d+) (\w+) and (buys|finds|gives|loses) (\d+) (more|away|of them)\. "
        r"How many \3 does \1 have now\?",
        lambda q: str(eval(re.sub(r"\w+ has (\d+) .* (?:(buys|finds)|gives|loses) (\d+) .*", signed, q))),
    ),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_all_problems_are_there_once_and_right(kind):
    total, form, answer = WANTED[kind]
    train, test = problems(kind, "train"), problems(kind, "test")
    assert len(test) == min(256, total // 5)
    assert len({row["question"] for row in train + test}) == len(train) + len(test) == total
    for row in train + test:
        assert re.fullmatch(form, row["question"])
        assert row["answer"] == answer(row["question"])


def test_the_held_out_part_is_the_same_on_every_machine():
    # A change here makes accuracies of different releases incomparable, and resumed runs train on what was held out.
    assert problems("ops3", "test")[:2] == [{"question": "+360=", "answer": "6"}, {"question": "+355=", "answer": "5"}]


@pytest.mark.parametrize(
    ("kind", "split", "said"),
    [("ops", "train", "did you mean 'ops3'"), ("xyz", "train", "there are copy3"), ("ops3", "dev", "no split 'dev'")],
)
def test_unknown_names_are_refused(kind, split, said):
    with pytest.raises(TasksetError, match=said):
        problems(kind, split)
