"""The first minutes of a user: the list of commands, wrong words, the shipped examples, and an agent of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_mq.cli import main as cli
from trinity_mq.config import load_config, load_stages
from trinity_mq.config.loading.examples import EXAMPLES, example_names


def run(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_without_a_command_the_help_lists_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    for title, rows in cli.COMMAND_GROUPS:
        block = text.split(f"\n{title}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in block.splitlines() if line[2:3].strip()] == [name for name, _, _ in rows]
    assert all(len(line) < 120 for line in text.splitlines())
    for line in text.split("first steps:\n")[1].splitlines():
        command = line.split()[1]
        assert command in {name for name, _, _ in cli.COMMANDS}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["rum", "x"], "no 'rum'; did you mean 'run'?"),
        (["dead", "lst", "x"], "no 'lst'; did you mean 'list'?"),
        (["run", "x", "--plan"], "unrecognized arguments: --plan; did you mean '--plain'?"),
        (["validate", "example:arithmetics"], "did you mean 'arithmetic'?"),
        (["run"], "the following arguments are required: TARGET\n"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_right_one(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert hint in capsys.readouterr().err


def test_every_example_is_listed_and_valid_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRINITY_MQ_MODEL", "TRINITY_MQ_GSM8K", "TRINITY_MQ_VERIFIERS_PYTHON"):
        monkeypatch.setenv(name, str(tmp_path))
    assert run("examples") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert listed == example_names() == sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    for name in listed:
        target = f"example:{name}"
        configs = [stage.config for stage in load_stages(target)] or [load_config(target)]
        for config in configs:
            folders = [Path(folder) for folder in config.plugin_dirs]
            files = [Path(taskset.path) for taskset in config.buffer.training_tasksets if "examples" in taskset.path]
            assert all(path.exists() for path in (*folders, *files)), name


def test_the_examples_are_copied_whole_and_never_over_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("examples", "--copy") == 0
    assert (tmp_path / "examples/frozen_lake/train.jsonl").read_bytes() == (
        EXAMPLES / "frozen_lake/train.jsonl"
    ).read_bytes()
    assert run("validate", "examples/frozen-lake.yaml") == 0
    assert run("examples", "--copy") == 2
    assert "call this in a folder without examples" in capsys.readouterr().err


class TestAnAgentOfOnesOwn:
    def test_its_files_are_valid_and_its_test_passes_unchanged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert run("init", "shop-agent") == 0
        folder = tmp_path / "shop-agent"
        assert {path.name for path in folder.iterdir()} == {
            "shop_agent.yaml", "shop_agent.py", "test_shop_agent.py", "records.jsonl", "README.md",
        }  # fmt: skip
        assert len((folder / "records.jsonl").read_text().splitlines()) == 20
        text = "".join(path.read_text() for path in folder.iterdir())
        assert "my_agent" not in text
        assert "MyAgent" not in text
        out = capsys.readouterr().out
        assert "cd shop-agent" in out
        test, check = ["unittest", "-b"], ["trinity_mq.cli.main", "validate", "shop_agent.yaml"]
        for words in (test, check):
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        assert "workflow ShopAgent from" in done.stdout

    @pytest.mark.parametrize("name", ["json", "class", "9lives", "My_Agent", "a" * 41, "-x"])
    def test_a_name_that_cannot_be_a_module_and_a_run_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert run("init", "--", name) == 2
        assert "cannot name an agent" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_with_files_is_never_written_to(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "mine.py").write_text("x")
        assert run("init", str(tmp_path / "mine")) == 2
        assert "is not empty" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "mine").iterdir()] == ["mine.py"]


def test_a_silent_command_says_on_a_terminal_that_it_loads_and_nowhere_else() -> None:
    program = (
        "import sys, time\n"
        "from trinity_mq import terminal\n"
        "with terminal.guarded_output():\n"
        "    with terminal.announced('loading', 0.01):\n"
        "        time.sleep(0.5)\n"
        "        print('done')\n"
        "    with terminal.announced('again', 0.01):\n"
        "        time.sleep(0.1)\n"
    )
    leader, follower = os.openpty()
    try:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stderr=follower, stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout == "done\n"
        assert os.read(leader, 1000) == b"loading\r\n"
    finally:
        os.close(follower)
        os.close(leader)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
