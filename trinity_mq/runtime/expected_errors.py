"""Errors that tell a user of the command line what to do."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return the error that tells the user what to do, or None. Exception groups of concurrent tasks are unpacked."""
    if isinstance(error, BaseExceptionGroup):
        problems = [expected_error(inner) for inner in error.exceptions]
        return problems[0] if problems and None not in problems else None
    if is_named(error, EXPECTED):
        return error
    from trinity_mq.runtime.process import disk_full_message

    full = disk_full_message(error)
    return None if full is None else OSError(full)


def is_named(error: BaseException, names: Sequence[str]) -> bool:
    """Return whether the class of an error, or a base class of it, is one of the dotted ``names``."""
    return any(f"{cls.__module__}.{cls.__qualname__}" in names for cls in type(error).__mro__)
