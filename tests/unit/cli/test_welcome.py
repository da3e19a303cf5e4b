"""The first minutes of a user: the list of commands, wrong words, the shipped examples, and an agent of one's own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_mq.cli import main as cli
from trinity_mq.cli.next_steps import NEXT, next_step
from trinity_mq.config import load_config, load_stages
from trinity_mq.config.loading.examples import EXAMPLES, example_names
from trinity_mq.experience import Experience


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
        (["status", "x", "--brokr=amqp://u:p@h"], "arguments: --brokr=amqp://u:***@h; did you mean '--broker'?"),
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
    for name in ("TRINITY_MQ_MODEL", "TRINITY_MQ_GSM8K", "TRINITY_MQ_VERIFIERS_PYTHON", "TRINITY_MQ_HARNESSES"):
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

    @pytest.mark.parametrize(
        "name", ["json", "class", "none", "yaml", "trinity-mq", "9lives", "My_Agent", "a" * 41, "-x"]
    )
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

    @pytest.mark.parametrize(
        ("folder", "why"), [("file", "File exists"), ("dangling", "File exists"), ("file/agent", "Not a directory")]
    )
    def test_a_folder_that_cannot_be_made_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, why: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("file").touch()
        Path("dangling").symlink_to("nowhere")
        assert run("init", folder) == 2
        assert capsys.readouterr().err == (f"trinity-mq init: {folder} cannot be written: {why}; name a new folder\n")

    def test_an_empty_folder_is_filled_and_its_name_is_quoted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("my projects/shop").mkdir(parents=True)
        assert run("init", "my projects/shop/") == 0
        assert "  cd 'my projects/shop'\n" in capsys.readouterr().out
        assert Path("my projects/shop/shop.py").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["validate", "a b.yaml", "name=x y"], "trinity-mq run 'a b.yaml' 'name=x y'"),
        (["inspect", "x", "--json"], None),
        (["inspect", "x"], "trinity-mq audit x: which experiences made a checkpoint"),
        (
            ["status", "x", "--broker", "amqp://u:p@h"],
            "trinity-mq why x --broker URL: what does the run wait for? After its end: report, inspect, audit",
        ),
        (["doctor", "--broker", "amqp://u:p@h"], "trinity-mq run example:arithmetic broker.url=URL"),
        (["migrate", "x", "-o", "y"], None),  # prints it itself
        (["review", "show", "x", "a=1", "id"], "trinity-mq review keep|drop|reward x a=1 ID"),
        (["debug", "algorithm", "x"], "trinity-mq run x"),
        (["tap", "x"], None),
        (["logs", "x", "--follow"], None),  # then the run is over
    ],
)
def test_the_next_step_is_a_command_that_works(words: list[str], line: str | None) -> None:
    assert next_step(cli.argument_parser().parse_args(words)) == (line and f"next: {line}")


@pytest.mark.parametrize("name", ["seen.tmqx", "seen"])
def test_no_other_command_takes_a_file_of_experiences(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(Experience.serialize_many([Experience(tokens=[1, 2], prompt_length=1)]))
    assert cli.main(["inspect", str(tmp_path / name)]) == 0
    assert "next:" not in capsys.readouterr().err


def test_every_next_step_begins_with_a_command_and_an_action_that_exist() -> None:
    for text in NEXT.values():
        for command, action in re.findall(r"trinity-mq (\w+)(?: (list|show|replay|keep))?", text):
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
                cli.argument_parser().parse_args([command, *filter(None, [action]), "--help"])
            for option in re.findall(r"--\w+|\{broker\}", text.split(f"trinity-mq {command}")[1]):
                assert option.replace("{broker}", "--broker") in shown.getvalue(), (text, option)


def test_the_next_step_shows_no_password_and_its_loss_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("model: {tiny: {}}\nmode: serve\n")
    assert run("validate", str(path), "broker.url=amqp://u:secret@h") == 0
    captured = capsys.readouterr()
    assert "broker.url=amqp://u:***@h" in captured.err
    assert "secret" not in captured.err + captured.out
    command = f"{sys.executable} -m trinity_mq.cli.main settings monitor"
    for redirection in ("2>&-", "2>/dev/full", "2> >(true)"):
        done = subprocess.run(
            ["bash", "-c", f"{command} {redirection}"], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, "next:" in done.stdout, done.stdout[:8]) == (0, False, "monitor."), redirection


def test_a_narrow_terminal_shows_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    assert run() == 0
    assert "first steps:" in capsys.readouterr().out


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
        "terminal.open_console()  # imports rich before the clock starts\n"
        "with terminal.guarded_output():\n"
        "    with terminal.announced('loading', 1):\n"
        "        terminal.open_console().print('done')\n"
        "        time.sleep(1.2)\n"
    )
    leader, follower = os.openpty()
    try:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stderr=follower, stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout == "done\ndone\n"
        assert os.read(leader, 1000) == b"loading\r\n"
    finally:
        os.close(follower)
        os.close(leader)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\ndone\n", "")
