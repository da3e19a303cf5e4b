"""Topic matching as AMQP 0-9-1 defines it."""

from __future__ import annotations

from collections.abc import Sequence


def topic_matches(pattern: str, key: str) -> bool:
    """Return whether a routing key fits a binding pattern: ``*`` is one word, ``#`` any number of words, also none.

    >>> topic_matches("train.#", "train"), topic_matches("*.a", "x.y.a")
    (True, False)
    """
    return _match(_words(pattern), _words(key))


def _words(text: str) -> Sequence[str]:
    return text.split(".") if text else ()


def _match(pattern: Sequence[str], key: Sequence[str]) -> bool:
    if not pattern:
        return not key
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(_match(rest, key[skipped:]) for skipped in range(len(key) + 1))
    return bool(key) and first in {"*", key[0]} and _match(rest, key[1:])
