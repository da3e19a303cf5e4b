"""Exceptions and exit codes of an agent that cannot go on."""

from __future__ import annotations

EXIT_RESTART = 75
"""A passing failure: start the agent again (sysexits EX_TEMPFAIL)."""
EXIT_RECYCLE = 79
"""No failure: start a fresh process in its place."""
EXIT_DISK_FULL = 74
"""The disk is full: starting again does not help before there is room (sysexits EX_IOERR)."""
EXIT_FATAL = 78
"""Starting again does not help (sysexits EX_CONFIG)."""


class FatalError(Exception):
    """The run cannot go on; a restart would meet the same. The message is one line for a person."""


class RestartMe(Exception):
    """Raised to have a fresh process take over from one that cannot go on."""


class RecycleMe(RestartMe):
    """Raised to have a fresh process take over without a failure being counted."""


def first_leaf(error: BaseException) -> BaseException:
    """Return the first exception that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
