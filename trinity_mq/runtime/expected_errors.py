"""Errors whose message is sufficient for a user of the command line, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

EXPECTED = (
    "trinity_mq.config.loading.load.ConfigError",
    "trinity_mq.bus.base.BusError",
    "trinity_mq.data.errors.TasksetError",
    "trinity_mq.runtime.errors.FatalError",
    "trinity_mq.runtime.errors.RestartRequested",
    "trinity_mq.errors.CommandError",
)
"""Errors, subclasses included, whose message is enough for the user and is printed without a traceback. They are listed
by name because importing their modules takes a second.
"""
PASSING = ("trinity_mq.bus.base.BusUnavailable", "trinity_mq.runtime.errors.RestartRequested")
"""The errors of ``EXPECTED`` that a restart may fix."""


def expected_error(error: BaseException) -> BaseException | None:
    """Return the error that tells the user what to do: ``error`` itself if it is in :data:`EXPECTED`, or a new error
    for a full disk; None for any other error. For an exception group, return the first such error if the group
    contains no other errors.
    """
    if isinstance(error, BaseExceptionGroup):
        problems = [expected_error(inner) for inner in error.exceptions]
        return problems[0] if problems and None not in problems else None
    if is_named(error, EXPECTED):
        return error
    from trinity_mq.runtime.process import disk_full_message

    full = disk_full_message(error)
    return None if full is None else OSError(full)


def single_error(error: BaseException) -> BaseException:
    """Return the most informative error of an exception group: the first error that tells the user what to do, else the
    first error. The other errors become its notes. An error that is not a group is returned unchanged.
    """
    leaves = list(leaf_errors(error))
    chosen = next((leaf for leaf in leaves if expected_error(leaf) is not None), leaves[0])
    for other in leaves:
        if other is not chosen and (note := f"also: {type(other).__name__}: {other}") not in getattr(
            chosen, "__notes__", ()
        ):
            chosen.add_note(note)
    return chosen


def leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, or for an exception group each exception in it that is not a group itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaf_errors(inner)
    else:
        yield error


def is_named(error: BaseException, names: Sequence[str]) -> bool:
    """Return whether the class of an error, or a base class of it, is one of the dotted ``names``."""
    return any(f"{cls.__module__}.{cls.__qualname__}" in names for cls in type(error).__mro__)
