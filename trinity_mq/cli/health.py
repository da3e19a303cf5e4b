"""``trinity-mq health``: reports whether the agent of this container is alive, from the health file that the agent
writes.

This module imports only the standard library because a container runs the command every few seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

HEALTH_VARIABLE = "TRINITY_MQ_HEALTH_FILE"
"""Environment variable with the path of the health file. :mod:`trinity_mq.runtime.serve`, which writes the file, uses
the same name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq health``."""
    parser.add_argument("--file", metavar="PATH", help=f"instead of {HEALTH_VARIABLE}")
    parser.add_argument(
        "--max-age",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="maximum age of the health file in seconds (default: 30)",
    )


def health(arguments: argparse.Namespace) -> int:
    """Print a line about the agent. Return 0 if it is alive and ready, else 1."""
    name = arguments.file or os.environ.get(HEALTH_VARIABLE)
    if not name:
        print(f"no health file: set {HEALTH_VARIABLE} to the path that the agent was given, or give --file PATH")
        return 1
    healthy, line = check_health(_content(Path(name)), arguments.max_age, time.monotonic())
    print(f"{name}: {line}")
    return 0 if healthy else 1


def check_health(content: str | None, max_age: float, clock: float) -> tuple[bool, str]:
    """Return (whether a health file reports a healthy agent, the reason in words).

    Args:
        content: Content of the file. None: the file cannot be read.
        max_age: Maximum age of the file's clock, in seconds.
        clock: Current time of this machine's monotonic clock, in seconds. The file's ``clock`` comes from the same
            clock.
    """
    if content is None:
        return False, "the file does not exist: the agent has not started yet, or has ended"
    try:
        health_data = json.loads(content)
        age, ready = clock - float(health_data["clock"]), bool(health_data["ready"])
        agent, state = str(health_data["agent"]), str(health_data["state"])
    except (ValueError, TypeError, KeyError):
        return False, "not a health file: remove it, or set another path"
    if not 0 <= age <= max_age:
        written = f"{age:.0f} s ago" if age >= 0 else "before this machine started"
        return (
            False,
            f"{agent} wrote it {written}, wanted at most {max_age:g} s: its event loop is blocked, or it was killed",
        )
    if not ready:
        return False, f"{agent} starts: {state}"
    return True, f"{agent}: {state}"


def _content(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
