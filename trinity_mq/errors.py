"""The error that commands raise for the user, and hints and lists in messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CommandError(ValueError):
    """An error that the user can fix. The message is one line: the problem and the next step."""


def suggest(
    name: str, choices: Iterable[str], listed: str = "there are", *, count: int = 1, cutoff: float = 0.6
) -> str:
    """Return a hint for a message about an unknown name: similar names, else all names.

    >>> suggest("rewad", ["reward", "run"]), suggest("x", ["reward", "run"], "known:")
    ("did you mean 'reward'?", 'known: reward, run')

    Args:
        name: The unknown name.
        choices: The known names.
        listed: Words before the list of all names.
        count: Maximum number of similar names.
        cutoff: Minimum similarity, from 0 to 1.
    """
    names = list(choices)
    near = difflib.get_close_matches(name, names, n=count, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"{listed} {', '.join(names) or 'none'}"


def excerpt(items: Sequence[object], most: int = 5) -> str:
    """Return the first ``most`` items as text, and the number of further items."""
    remaining = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {remaining} more" if remaining > 0 else "")
