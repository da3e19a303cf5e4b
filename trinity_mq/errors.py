"""The error that commands raise for the user."""

from __future__ import annotations


class CommandError(ValueError):
    """An error that the user can fix. The message is one line: the problem and the next step."""
