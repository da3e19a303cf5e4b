"""The error of commands."""

from __future__ import annotations


class CommandError(ValueError):
    """One line for the user: what was wrong, what to do next."""
