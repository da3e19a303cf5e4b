"""What a command says when it cannot be done."""

from __future__ import annotations


class CommandError(ValueError):
    """One line for the user: what was wrong, what to do next."""
