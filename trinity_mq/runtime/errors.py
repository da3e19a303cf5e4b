"""How an agent ends when it cannot go on."""

from __future__ import annotations

EXIT_RESTART = 75
"""Something passing: start me again (sysexits EX_TEMPFAIL)."""
EXIT_FATAL = 78
"""Starting again does not help (sysexits EX_CONFIG)."""


class FatalError(Exception):
    """The run cannot go on; a restart would meet the same. The message is one line for a person."""


class RestartMe(Exception):
    """This process cannot go on, a fresh one can."""
