"""Exceptions and exit codes of an agent that cannot go on, and the errors that a message causes by its content."""

from __future__ import annotations

from trinity_mq.bus import BusError

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


OF_CONTENT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that handling code raises at values that it does not expect. Errors of decoding and validation are such."""
NOT_OF_CONTENT = (OSError, BusError, FatalError, RestartMe)
"""Errors of disk, broker and run. They win over :data:`OF_CONTENT`."""


def is_of_content(error: BaseException) -> bool:
    """Return whether handling failed because of the content of a message. All errors of a group must be such errors.

    >>> is_of_content(KeyError("a")), is_of_content(OSError()), is_of_content(MemoryError())
    (True, False, False)
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_of_content(part) for part in error.exceptions)
    return isinstance(error, OF_CONTENT) and not isinstance(error, NOT_OF_CONTENT)


def reason_of(error: BaseException) -> str:
    """Return the reason that a dead letter gives for an error of content."""
    cause = first_leaf(error)
    return str(cause) if isinstance(cause, EndsProcessError) else f"cannot be handled: {type(cause).__name__}: {cause}"


class EndsProcessError(ValueError):
    """A message was in hand at so many deaths of the process that it is not handled again."""
