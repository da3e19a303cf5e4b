"""Texts of strangers on a terminal: they command nothing, hide nothing, and forge no line and no colour."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import unicodedata
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.bus.base import Incoming
from trinity_mq.cli import main as cli
from trinity_mq.cli.dead import paragraph
from trinity_mq.errors import CommandError
from trinity_mq.messages import FailureStatus, Heartbeat
from trinity_mq.observability.display import LiveDisplay, PlainDisplay, render_table
from trinity_mq.observability.run_state import RunState
from trinity_mq.operations.dead_letters import row
from trinity_mq.terminal import (
    EscapingStream,
    escape_and_indent,
    escape_to_one_line,
    escape_unsafe,
    open_console,
    unguarded,
)

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
@pytest.mark.parametrize("name", [name for name, _, _ in cli.COMMANDS])
def test_what_any_command_prints_is_visible(
    name: str, command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Parser:
        def parse_args(self, argv: object) -> Namespace:
            return Namespace(command=name, function=command)

    monkeypatch.setattr(cli, "argument_parser", Parser)
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


def test_the_guard_is_one_however_often_it_is_set() -> None:
    out = io.StringIO()
    guard: Any = EscapingStream(out)
    assert unguarded(guard) is out
    assert guard.write("\x1b") == 1
    guard.writelines(["\x1b", "a\n"])
    assert out.getvalue() == "\\u001b\\u001ba\n"
