"""The reason why a process ended, in one line for people: from its exit code and its output."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from pathlib import Path

from trinity_mq.runtime.errors import display_path, is_user_code

LAST_BYTES = 32 * 1024
"""Bytes at the end of a process's output that are searched for the reason of its end. Progress bars take many bytes."""
LONGEST_LINE = 2000
"""Maximum number of characters of a line that are searched."""
_BAR = re.compile(r"(?:\d{1,3}%\|[^|]*\||\d{1,12}(?:\.\d{1,4})?[kMG]?it)[^\[]*\[[^\]]*\]?")
"""A progress bar of tqdm, with or without a total. The rest of its line does not belong to it."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FRAME = re.compile(r'\s+File "(.+?)", line (\d+)')
_LAST_FIRST, _FIRST_FIRST = "(most recent call last):", "(most recent call first):"
"""Ends of the line above the frames: of a traceback, and of the stacks written by ``faulthandler``."""
AGENT_ENDS = "(agent_ends "
"""Part of the line with which an agent logs the reason of its end."""


def describe_exit_code(code: int) -> str:
    """Return a description of an exit code: 128 + n for signal n.

    >>> describe_exit_code(1), describe_exit_code(137)
    ('exit code 1', 'killed by SIGKILL: somebody sent it, or the machine had no memory left, see `dmesg`')
    """
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    if name == "SIGKILL":
        return f"killed by {name}: somebody sent it, or the machine had no memory left, see `dmesg`"
    return f"killed by {name}"


def read_output_tail(output: Path, start: int = 0) -> str:
    """Return the end of the output that a process wrote to a file from byte ``start`` on; empty if it cannot be
    read.
    """
    with contextlib.suppress(OSError), output.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LAST_BYTES))
        return file.read().decode(errors="replace")
    return ""


def exit_reason(printed: str, code: int) -> str:
    """Return the reason why a process ended: the signal that killed it, and its last output without progress bars.

    The last output is the last line, with three exceptions: the line that an agent has logged about its end; for a
    traceback, the error; for the stacks of all threads, the line above them. To the last two the innermost line of the
    user's own code is added.

    Args:
        printed: The end of its output.
        code: Its exit code, 128 + n for signal n.
    """
    lines = map(_without_bar, _ESCAPE.sub("", printed).splitlines())
    last_output = _last_message([line for line in lines if line.strip()])
    by = describe_exit_code(code)
    if by.startswith("exit code"):
        return last_output
    return f"{by}; its last output: {last_output}" if last_output else by


def _without_bar(line: str) -> str:
    return "" if "━" in line else _BAR.split(line[:LONGEST_LINE])[-1]  # rich draws its bars with this character


def _last_message(lines: list[str]) -> str:
    for number in range(len(lines) - 1, -1, -1):
        if AGENT_ENDS in lines[number]:
            return _one_line(lines[number])
        if lines[number].endswith(_LAST_FIRST):
            return _from_traceback(lines[number + 1 :])
        if lines[number].endswith(_FIRST_FIRST):
            return _from_stacks(lines)
    return _one_line(lines[-1]) if lines else ""


def _from_traceback(below: list[str]) -> str:
    """Return the error of a traceback, and the innermost line of the user's own code among its frames."""
    frames = _frames(below)
    error = next((line for line in below if not line.startswith(" ")), "")
    return f"{_one_line(error)}{_place_suffix(frames[::-1])}".strip()


def _from_stacks(lines: list[str]) -> str:
    """Return the line above the stacks of all threads, and the innermost line of the user's own code: in the current
    thread, otherwise in another thread, since a watchdog's own stack says nothing.
    """
    heads = [number for number, line in enumerate(lines) if line.endswith(_FIRST_FIRST)]
    above = _one_line(lines[heads[0] - 1]) if heads[0] else "it was at work"
    heads.sort(key=lambda number: not lines[number].startswith("Current thread"))
    return f"{above}{_place_suffix([frame for head in heads for frame in _frames(lines[head + 1 :])])}"


def _frames(below: list[str]) -> list[tuple[str, str]]:
    """Return file and line of the frames at the beginning of ``below``."""
    frames = itertools.takewhile(lambda line: line.startswith(" "), below)
    return [(match[1], match[2]) for line in frames if (match := _FRAME.match(line))]


def _place_suffix(frames: list[tuple[str, str]]) -> str:
    return next((f" ({display_path(file)}:{line})" for file, line in frames if is_user_code(file)), "")


def _one_line(line: str) -> str:
    return " ".join(line.split())
