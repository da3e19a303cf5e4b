"""``trinity-mq health``: is the agent of this container alive, as its own event loop says.

Nothing is imported but the standard library: a container asks every few seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

HEALTH_VARIABLE = "TRINITY_MQ_HEALTH_FILE"
"""As in :mod:`trinity_mq.runtime.service`, which writes the file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq health``."""
    parser.add_argument("--file", metavar="PATH", help=f"instead of {HEALTH_VARIABLE}")
    parser.add_argument(
        "--max-age", metavar="SECONDS", type=float, default=30.0, help="oldest age of the file's clock (default: 30)"
    )


def health(arguments: argparse.Namespace) -> int:
    """Print a line on the agent; 0 when it lives and was connected, else 1."""
    name = arguments.file or os.environ.get(HEALTH_VARIABLE)
    if not name:
        print(f"no health file: set {HEALTH_VARIABLE} to the path that the agent was given, or give --file PATH")
        return 1
    healthy, line = judge(_content(Path(name)), arguments.max_age, time.monotonic())
    print(f"{name}: {line}")
    return 0 if healthy else 1


def judge(content: str | None, max_age: float, clock: float) -> tuple[bool, str]:
    """Return whether a health file reports a healthy agent, and the reason in words.

    Args:
        content: Of the file; None: there is none.
        max_age: Seconds.
        clock: This machine's monotonic clock, which the file was written by; seconds.
    """
    if content is None:
        return False, "there is none: the agent has not begun yet, or has ended"
    try:
        said = json.loads(content)
        age, ready = clock - float(said["clock"]), bool(said["ready"])
        who, state = str(said["agent"]), str(said["state"])
    except (ValueError, TypeError, KeyError):
        return False, "not a health file: remove it, or set another path"
    if not 0 <= age <= max_age:
        written = f"{age:.0f} s ago" if age >= 0 else "before this machine started"
        return (
            False,
            f"{who} wrote it {written}, wanted at most {max_age:g} s: its event loop is blocked, or it was killed",
        )
    if not ready:
        return False, f"{who} starts: {state}"
    return True, f"{who}: {state}"


def _content(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
