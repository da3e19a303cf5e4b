"""Errors of the user's own code, with the place in the user's file at which they were raised."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},)
_PROJECT = tuple(str(Path(__file__).parents[2] / package) + "/" for package in ("trinity_mq", "agents/trinity_agents"))


def described(error: BaseException) -> str:
    """Return error and place in one line, such as ``KeyError: 'answer' (my_operator.py:17)``."""
    while isinstance(error, BaseExceptionGroup):  # the words of a group do not say what went wrong
        error = error.exceptions[0]
    name, text = type(error).__name__, " ".join(str(error).split())
    return f"{name}: {text}{place(error)}" if text else f"{name}{place(error)}"


def place(error: BaseException) -> str:
    """Return where an error was raised, as the end of a line: the innermost line of the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    raised = frames[-1]
    own = next((frame for frame in reversed(frames) if is_own(frame.filename)), raised)
    if own is raised:
        return f" ({shown(own.filename)}:{own.lineno})"
    return f" ({shown(own.filename)}:{own.lineno}, raised in {Path(raised.filename).name}:{raised.lineno})"


def is_of_user(error: BaseException) -> bool:
    """Return whether an error went through a line of the user's own code."""
    return any(is_own(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def is_own(file: str) -> bool:
    """Return whether a file is the user's own: it belongs neither to a library nor to this project."""
    return not file.startswith(("<", *_LIBRARIES, *_PROJECT))


def shown(file: str) -> str:
    """Return how a file is named to a person: relative to the working directory where it lies below it."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or the working directory is gone
        return path.name
