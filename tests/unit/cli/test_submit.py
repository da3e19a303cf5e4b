from __future__ import annotations

import io
from pathlib import Path

import pytest

from trinity_mq.cli.commands.submit import read_task
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.main import main

TASK = '{"raw_task": {"question": "+372="}, "repeat_times": 2}'


def test_a_task_from_each_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_text(TASK)
    monkeypatch.setattr("sys.stdin", io.StringIO(TASK))
    tasks = [read_task(text) for text in (TASK, f"@{tmp_path}/t.json", "-")]
    assert tasks[0] == tasks[1] == tasks[2]
    assert (tasks[0].raw_task, tasks[0].repeat_times) == ({"question": "+372="}, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "is a list, wanted an object"),
        ('{"raw_taks": {}}', "unknown key 'raw_taks'; did you mean 'raw_task'?"),
        ('{"repeat_times": 0}', "repeat_times: Input should be greater than or equal to 1, got 0"),
        ("@/no/such", "cannot be read"),
    ],
)
def test_what_is_no_task_is_explained(text: str, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        read_task(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["r"], "no broker is known for run 'r'"),
        (["R!", "--broker", "amqp://127.0.0.1:1/"], "R!: cannot be read: No such file"),
    ],
)
def test_a_run_must_be_known(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRINITY_MQ_BROKER_URL", raising=False)
    assert main(["submit", *words, "--task", TASK]) == 2
    assert error in capsys.readouterr().err
