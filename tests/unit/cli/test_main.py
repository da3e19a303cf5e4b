from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import unicodedata
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trinity_mq import __version__
from trinity_mq.bus import BusRefused, BusUnavailable
from trinity_mq.bus.base import Incoming
from trinity_mq.cli import main as cli
from trinity_mq.cli.dead import paragraph
from trinity_mq.config import ConfigError
from trinity_mq.data import TasksetError
from trinity_mq.errors import CommandError
from trinity_mq.messages import FailureStatus, Heartbeat
from trinity_mq.messages.reviews import ReviewedCall, ReviewRequest
from trinity_mq.observability.display import LiveDisplay, PlainDisplay, render_table
from trinity_mq.observability.run_state import RunState
from trinity_mq.operations.dead_letters import row
from trinity_mq.operations.review import full_text, summary_lines
from trinity_mq.reviews.ledger import Review
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.terminal import (
    EscapingStream,
    escape_and_indent,
    escape_to_one_line,
    escape_unsafe,
    open_console,
    unguarded,
)


def stand_in(monkeypatch: pytest.MonkeyPatch, target: str, command: Callable[[Namespace], int]) -> None:
    """Let a row of the table of commands have this function; it takes any words."""
    name, _, function = target.partition(":")
    module = ModuleType(f"trinity_mq.cli.{name}")

    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("words", nargs="*")
        parser.set_defaults(function=command)

    vars(module).update({"add_arguments": add_arguments, function or "command": command})
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Make every command raise what the test puts here."""

    class HolderError(Exception):
        error: BaseException

    def command(_arguments: object) -> int:
        raise HolderError.error

    for target in ("validate:validate", "agents:run_agent"):
        stand_in(monkeypatch, target, command)
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


def test_bugs_are_not_hidden_and_ctrl_c_is_no_traceback(
    failing: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.error = ValueError("a bug")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["validate", "x.yaml"])
    failing.error = ExceptionGroup("tasks", [FatalError("expected"), ValueError("a bug")])  # type: ignore[attr-defined]
    with pytest.raises(ExceptionGroup):
        cli.main(["validate", "x.yaml"])
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
    program = """
import sys
from trinity_mq.cli.main import argument_parser
argument_parser().parse_args(sys.argv[1:])
print(*(name for name in sys.modules if name.startswith("trinity_mq.cli.") or name in {"torch", "aiohttp", "pydantic"}))
"""
    argv = [sys.executable, "-c", program, "health", "--max-age", "3"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "trinity_mq.cli.arguments",
        "trinity_mq.cli.health",
        "trinity_mq.cli.main",
        "trinity_mq.cli.next_steps",
    }


@pytest.mark.parametrize("words", [["no-such-command"], ["run"], ["dead"], ["broker", "start"]])
def test_wrong_words_are_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: trinity-mq" in capsys.readouterr().err


def test_a_terminal_that_knows_ascii_alone_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "größe.yaml").write_text("model: {tiny: {}, strange: 1}")
    environ = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}

    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        argv = [sys.executable, "-m", "trinity_mq.cli.main", *words]
        done = subprocess.run(argv, capture_output=True, env=environ, check=False)
        assert b"Traceback" not in done.stderr
        return done

    assert run("validate", str(tmp_path / "größe.yaml")).returncode == 2
    assert b"reward      0.000 -> 0.667  ???" in run("status", str(metrics_of_a_run(tmp_path))).stdout


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


HOSTILE = "a\x1b]52;c;cm0\x07\x1b[2J\x9b31m\r\u202e\u2066\u200b\ud800\U000e0041b"
"""Clipboard, clearing, colour by C1, a line written over, bidirectional overrides, invisible and lone characters."""
HARMLESS = "plain text, Größe 長さ\u3000\u00a0 π 👩"
LIBRARY = Path(cli.__file__).parents[1]


def is_harmless(text: str, allowed: str = "\n\t") -> bool:
    return not any(unicodedata.category(one) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for one in text if one not in allowed)


def test_every_character_that_a_terminal_obeys_is_spelled_out() -> None:
    everything = "".join(map(chr, [*range(0x11100), *range(0xE0000, 0xE0080), sys.maxunicode]))
    assert is_harmless(escape_unsafe(everything))
    assert is_harmless(escape_to_one_line(everything), allowed="")
    assert escape_unsafe(HARMLESS) == escape_to_one_line(HARMLESS) == HARMLESS
    assert escape_unsafe("a\n\tb") == "a\n\tb"
    assert escape_to_one_line("a\nb") == "a\\u000ab"
    assert escape_and_indent("a\nb\n  c\r\x1b") == "a\n  b\n  c\\u000d\\u001b"


def test_json_keeps_its_meaning() -> None:
    values = {HOSTILE: [HOSTILE, HARMLESS, "two\nlines"]}
    assert json.loads(escape_unsafe(json.dumps(values, ensure_ascii=False))) == values


def fails(error: Exception) -> Callable[[Namespace], int]:
    def command(arguments: Namespace) -> int:
        raise error

    return command


def says(arguments: Namespace) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{HOSTILE}\n")
    return 0


@pytest.mark.parametrize("command", [says, fails(CommandError(HOSTILE))], ids=["output", "error"])
@pytest.mark.parametrize(("name", "target"), [(name, target) for name, target, _ in cli.COMMANDS])
def test_what_any_command_prints_is_visible(
    name: str, target: str, command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, target, command)
    cli.main([name])
    printed = "".join(capsys.readouterr())
    assert "\\u001b]52;c;cm0\\u0007" in printed
    assert is_harmless(printed)


def test_a_traceback_is_visible_too() -> None:
    program = (
        "from argparse import Namespace\n"
        "from trinity_mq.cli import main as cli\n"
        "def command(arguments): raise RuntimeError('\\x1b[2J')\n"
        "class Parser:\n"
        "    def parse_args(self, argv): return Namespace(command='x', function=command)\n"
        "cli.argument_parser = Parser\n"
        "cli.main([])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: \\u001b[2J" in done.stderr
    assert is_harmless(done.stderr)


def test_a_wrong_word_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["status", "run", f"--{HOSTILE}"])
    assert is_harmless("".join(capsys.readouterr()))


def test_no_command_passes_the_guard_by() -> None:
    """Colours of their own have ``logs`` and what rich draws; whoever adds another looks at what is in its text."""
    passing = ("unguarded(", "Console(", "sys.__std")
    allowed = {"terminal.py", "cli/logs.py"}
    found = {
        str(file.relative_to(LIBRARY))
        for file in LIBRARY.rglob("*.py")
        if any(word in file.read_text(encoding="utf-8") for word in passing)
    }
    assert found == allowed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(text: str, out: io.StringIO) -> str:
    """Return what a console on ``out`` draws of ``text``, without colours of its own."""
    console = open_console(out, width=200)
    console.print(text)
    return out.getvalue()


def test_rich_reads_no_markup_and_draws_no_character_that_a_terminal_obeys() -> None:
    assert is_harmless(drawn(HOSTILE, io.StringIO()))
    links = "[link=http://x]click[/link] [bold]x[/bold] :smile:"
    assert links in drawn(links, io.StringIO())
    assert "\x1b]8" not in drawn(links, Terminal())
    assert drawn(HOSTILE, Terminal()).count("\x1b]") == 0


def hostile_view() -> RunState:
    view = RunState("r", None)
    fields: dict[str, Any] = {"state": HOSTILE, "waits_for": f"{HOSTILE}[bold]", "waits_seconds": 99.0}
    view.receive(Heartbeat(role="runner", id=HOSTILE, seq=1, incarnation="a", lease=60.0, **fields), 100.0)
    view.failures = [FailureStatus(text=HOSTILE, count=1, first=f"{HOSTILE}\n12:00 all is well")]
    return view


def test_the_display_of_a_run() -> None:
    view, plain = hostile_view(), io.StringIO()
    assert is_harmless(drawn(render_table(view, 100.0), io.StringIO()))  # type: ignore[arg-type]
    shown = PlainDisplay(plain, clock=lambda: "12:00")
    shown.show(view, [f"{HOSTILE}\nforged"], 100.0)
    assert is_harmless(plain.getvalue())
    assert [line[:6] for line in plain.getvalue().splitlines()] == ["12:00 ", "  forg", "12:00 "], (
        "others' are indented"
    )
    terminal = Terminal()
    live = LiveDisplay(terminal)
    live.show(view, [HOSTILE], 100.0)
    live.close()
    assert "\x1b]52" not in terminal.getvalue()
    assert "\x9b" not in terminal.getvalue()


def test_dead_letters() -> None:
    headers = {"dead-queue": HOSTILE, "dead-reason": f"{HOSTILE}\nforged", "kind": HOSTILE, "batch": HOSTILE}
    letter = Incoming(body=b"", exchange="", routing_key="", queue="q", message_id=HOSTILE, headers=headers)
    assert is_harmless("".join(row(letter)), allowed="")
    assert is_harmless("\n".join(paragraph(1, row(letter), 100)))


def test_reviews() -> None:
    call = ReviewedCall(prompt=HOSTILE, response=HOSTILE)
    fields: dict[str, Any] = {
        "request": "0123456789abcdef",
        "uid": HOSTILE,
        "reasons": [HOSTILE],
        "parts": {HOSTILE: 1.0},
    }
    request = ReviewRequest(batch=1, ticket="t", asked=0.0, deadline=1.0, calls=[call], **fields)
    assert is_harmless("\n".join(summary_lines(Review(request), 0.0)))
    assert is_harmless(full_text(Review(request), 0.0))


def test_what_is_written_as_lines_is_visible_too() -> None:
    out = io.StringIO()
    guard: Any = EscapingStream(out)
    assert unguarded(guard) is out
    guard.writelines(["\x1b", "a\n"])
    assert out.getvalue() == "\\u001ba\n"
