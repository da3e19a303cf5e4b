from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_mq import __version__
from trinity_mq.bus import BusRefused, BusUnavailable
from trinity_mq.cli import main as cli
from trinity_mq.config import ConfigError
from trinity_mq.data import TasksetError
from trinity_mq.runtime.errors import FatalError, RestartRequested


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Make every command raise what the test puts here."""

    class HolderError(Exception):
        error: BaseException

    def command(_arguments: object) -> int:
        raise HolderError.error

    for target in ("validate.validate", "agents.run_agent"):
        monkeypatch.setattr(f"trinity_mq.cli.{target}", command)
    return HolderError


@pytest.mark.parametrize(
    ("error", "of_command", "of_agent"),
    [
        (ConfigError("c.yaml: seed: no"), 2, 78),
        (BusRefused("wrong password for amqp://u:secret@h/"), 2, 78),
        (BusUnavailable("nobody there"), 2, 75),
        (TasksetError("no such file"), 2, 78),
        (FatalError("port 5 is in use"), 2, 78),
        (RestartRequested("lost the lock"), 2, 75),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [FatalError("inner")])]), 2, 78),
    ],
)
def test_expected_errors_are_one_line_and_a_code(
    failing: type[Exception], capsys: pytest.CaptureFixture[str], error: Exception, of_command: int, of_agent: int
) -> None:
    failing.error = error  # type: ignore[attr-defined]
    assert cli.main(["validate", "x.yaml"]) == of_command
    assert cli.main(["trainer", "x.yaml"]) == of_agent
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("trinity-mq validate: ")
    assert second.startswith("trinity-mq trainer: ")
    assert "secret" not in err


def test_bugs_are_not_hidden(failing: type[Exception]) -> None:
    failing.error = ValueError("a bug")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["validate", "x.yaml"])
    failing.error = ExceptionGroup("tasks", [FatalError("expected"), ValueError("a bug")])  # type: ignore[attr-defined]
    with pytest.raises(ExceptionGroup):
        cli.main(["validate", "x.yaml"])


def test_ctrl_c_is_no_traceback(failing: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    failing.error = KeyboardInterrupt()  # type: ignore[attr-defined]
    assert cli.main(["validate", "x.yaml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("name", [*(name for name, _, _ in cli.COMMANDS), "--version"])
def test_every_command_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name] if name == "--version" else [name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(__version__ if name == "--version" else f"usage: trinity-mq {name}")


def test_settings_may_stand_behind_an_option() -> None:
    """argparse by itself refuses them there."""
    for words in (["run", "x", "--plain", "a.b=c"], ["dead", "list", "x", "--limit", "3", "a.b=c"]):
        assert cli.argument_parser().parse_args(words).overrides == ["a.b=c"]
    with pytest.raises(SystemExit):
        cli.argument_parser().parse_args(["run", "x", "--plain", "word"])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("trinity-mq sta", ["status"]),
        ("trinity-mq dead re", ["replay"]),
        ("trinity-mq dead list mi", ["mine.yaml", "mine"]),
        ("trinity-mq validate m", ["mine.yaml", "mine"]),
        ("trinity-mq run mine.yaml buffer.total_", ["buffer.total_steps=", "buffer.total_epochs="]),
        ("trinity-mq run mine.yaml buffer.eval_tasksets.0.li", []),
        ("trinity-mq broker permissions mine --role s", ["submitter"]),
    ],
)
def test_a_shell_is_told_what_may_come_next(tmp_path: Path, line: str, found: list[str]) -> None:
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    answer = {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    argv = [sys.executable, "-m", "trinity_mq.cli.main"]
    root = str(Path(__file__).parents[3])
    environ = {**os.environ, **asked, **answer, "PYTHONPATH": f"{root}:{root}/agents"}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [word.strip() for word in (tmp_path / "answer").read_text().split("\n") if word] == found


def test_only_the_module_of_the_given_command_is_imported() -> None:
    program = (
        "import sys\n"
        "from trinity_mq.cli.main import argument_parser\n"
        "try:\n"
        "    argument_parser().parse_args(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(*sorted(name for name in sys.modules if name.startswith('trinity_mq.')), file=sys.stderr)\n"
        "print(*sorted({'torch', 'aiohttp', 'pydantic'} & set(sys.modules)), file=sys.stderr)\n"
    )

    def imported(*words: str) -> tuple[list[str], str]:
        argv = [sys.executable, "-c", program, *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        modules, heavy = done.stderr.splitlines()
        return modules.split(), heavy

    light = [
        "trinity_mq.cli",
        "trinity_mq.cli.main",
        "trinity_mq.release",
        "trinity_mq.renamed",
        "trinity_mq.roles",
        "trinity_mq.targets",
        "trinity_mq.targets.setting_words",
    ]
    assert imported("--help") == (light, "")
    modules, heavy = imported("health", "--max-age", "3")
    assert set(modules) == {*light, "trinity_mq.cli.health"}
    assert heavy == ""


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["run"], ["dead"], ["broker", "start"]])
def test_wrong_words_are_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: trinity-mq" in capsys.readouterr().err


def test_a_terminal_that_knows_ascii_alone_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "größe.yaml").write_text("model: {tiny: {}, strange: 1}")
    done = subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", "validate", str(tmp_path / "größe.yaml")],
        capture_output=True,
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
        check=False,
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", "status", str(metrics_of_a_run(tmp_path))],
        capture_output=True,
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
        check=False,
    )
    assert b"Traceback" not in done.stderr
    assert b"reward      0.000 -> 0.667  ???" in done.stdout


def metrics_of_a_run(folder: Path) -> Path:
    run_dir = folder / "runs" / "r"
    run_dir.mkdir(parents=True)
    (run_dir / "broker").mkdir()
    (run_dir / "finished").write_text("{}")
    lines = [{"time": 1.0, "role": "explorer", "step": n, "rollout/reward/mean": n / 3} for n in range(3)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (run_dir / "config.yaml").write_text(f"name: r\nmodel: {{tiny: {{}}}}\nrun_dir: {run_dir}\n")
    return run_dir


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {tiny: {}}")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trinity_mq.cli.main", "validate", str(tmp_path / "c.yaml")],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # else the first line, not the end, meets it
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
