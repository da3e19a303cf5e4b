"""How an agent ends when it cannot go on."""

from __future__ import annotations

EXIT_RESTART = 75
"""Something passing: start me again (sysexits EX_TEMPFAIL)."""
EXIT_RECYCLE = 79
"""Nothing is wrong: start a fresh process in my place."""
EXIT_FATAL = 78
"""Starting again does not help (sysexits EX_CONFIG)."""


class FatalError(Exception):
    """The run cannot go on; a restart would meet the same. The message is one line for a person."""


class RestartMe(Exception):
    """This process cannot go on, a fresh one can."""


class RecycleMe(RestartMe):
    """This process has done its share; a fresh one takes its place, and nobody counts that as a failure."""
