"""Exceptions and exit codes of an agent that cannot continue, errors caused by the content of a message, and the line
of the user's code that raised an error.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity_mq.bus import BusError

_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},)
_PROJECT = tuple(str(Path(__file__).parents[2] / package) + "/" for package in ("trinity_mq", "agents/trinity_agents"))

EXIT_RESTART = 75
"""A temporary failure: start the agent again (sysexits EX_TEMPFAIL)."""
EXIT_RECYCLE = 79
"""No failure: replace the agent with a new process."""
EXIT_DISK_FULL = 74
"""The disk is full: a restart does not help until there is space (sysexits EX_IOERR)."""
EXIT_FATAL = 78
"""A restart does not help (sysexits EX_CONFIG)."""


class FatalError(Exception):
    """This process cannot continue, and a restart would fail in the same way. The message is one line for people."""


class DeviceMemoryError(FatalError):
    """The device of a process has too little memory for its work; the message names the settings that help."""


class RestartRequested(Exception):
    """Raised so that a new process replaces a process that cannot continue."""


class RecycleRequested(RestartRequested):
    """Raised so that a new process replaces this process without counting a failure."""


def first_leaf(error: BaseException) -> BaseException:
    """Return ``error``, or for an exception group the first exception in it that is not a group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Return error and place in one line, such as ``KeyError: 'answer' (my_operator.py:17)``."""
    error = first_leaf(error)  # the text of a group does not describe the error
    name, text = type(error).__name__, " ".join(str(error).split())
    return f"{name}: {text}{place(error)}" if text else f"{name}{place(error)}"


@contextmanager
def custom_code(kind: type[Exception], what: str) -> Iterator[None]:
    """Run the user's own code in the ``with`` block. Any exception in it is replaced by an exception of class ``kind``,
    whose message is ``what``, followed by the original error and its place. A ``torch.OutOfMemoryError`` stays: its
    handler names the settings that help.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # compared by name, because this module imports no torch
            raise
        raise kind(f"{what} {describe_error(error)}") from error


def place(error: BaseException) -> str:
    """Return the place of an error, as the end of a line: the innermost line of the user's own code, and the line that
    raised the error if that is another. Without a line of the user's code it is only the raising line; without a
    traceback it is empty.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    raised = frames[-1]
    user_frame = next((frame for frame in reversed(frames) if is_user_code(frame.filename)), raised)
    if user_frame is raised:
        return f" ({display_path(user_frame.filename)}:{user_frame.lineno})"
    position = f"{display_path(user_frame.filename)}:{user_frame.lineno}"
    return f" ({position}, raised in {Path(raised.filename).name}:{raised.lineno})"


def is_user_code(file: str) -> bool:
    """Return whether a file is the user's own: it does not belong to a library or to this project."""
    return not file.startswith(("<", *_LIBRARIES, *_PROJECT))


def display_path(file: str) -> str:
    """Return the name of a file for messages: relative to the working directory if it is below it, otherwise without
    its folder.
    """
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # the file is outside of the working directory, or the working directory was deleted
        return path.name


OF_CONTENT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Types of exceptions that a message handler raises for unexpected content. They include errors of decoding and
validation."""
NOT_OF_CONTENT = (OSError, BusError, FatalError, RestartRequested)
"""Errors of disk, broker and run. They take precedence over :data:`OF_CONTENT`."""


def is_content_error(error: BaseException) -> bool:
    """Return whether handling failed because of the content of a message. All errors of a group must be such errors.

    >>> is_content_error(KeyError("a")), is_content_error(OSError()), is_content_error(MemoryError())
    (True, False, False)
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_content_error(part) for part in error.exceptions)
    return isinstance(error, OF_CONTENT) and not isinstance(error, NOT_OF_CONTENT)


def dead_letter_reason(error: BaseException) -> str:
    """Return the dead-letter reason for an error that the content of a message caused."""
    cause = first_leaf(error)
    return (
        str(cause) if isinstance(cause, CrashingMessageError) else f"cannot be handled: {type(cause).__name__}: {cause}"
    )


class CrashingMessageError(ValueError):
    """The process died too often while it handled this message, so the message is not handled again."""
