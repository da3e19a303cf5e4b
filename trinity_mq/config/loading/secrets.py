"""Secrets in settings: API keys, passwords and tokens, which messages and comments do not show."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trinity_mq.telemetry.log import mask_passwords

MASK = "***"
WORDS = frozenset({"none", "null", "true", "false"})
"""Texts that do not count as secrets."""
SHORTEST, SHORTEST_WORD = 4, 6
"""Minimum numbers of characters of a secret, and of a word of a secret, that are searched in texts."""
VARIABLE = re.compile(r"\$\{(?:oc\.)?env:([^},:]+)(?:[,:]([^}]*))?\}")
"""Interpolation of an environment variable: its name and its default."""
_WORDS = (
    r"(?:(?:(?:api|access|private|secret)[_-]?key|secret|password|passwd|passphrase|credential)s?|token|authorization)"
)
_NAME = re.compile(rf"(?:^|[._-]|(?<=[a-z])(?=[A-Z]))(?i:{_WORDS})(?:[.\[]\d+\]?)*$")
_INSIDE = re.compile(
    rf"""(?i){_WORDS}["']?\s*[=:]\s*["']?(?:(?:bearer|basic|token)\s+)?([^\s"'&,;}}\]]{{6,}})"""
    rf"""|(?<![\w-])--[\w-]{{0,60}}{_WORDS}\s+["']?([^\s"'-][^\s"']{{5,}})|://([^\s:/?#@]{{20,}})@"""
    r"""|\b((?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{8,})|\bbearer\s+([\w.~+/=-]{8,})"""
)
_PARTS = re.compile(rf"""(?i){_WORDS}["']?\s*[=:]|[\w+/=-]{{40,}}""")


class Secrets:
    """Hides the secrets of settings in texts.

    Args:
        settings: Sections, lists or texts. A value is a secret if its key is called ``api_key``, ``password`` or
            similar, or if a part of it has the form of a secret, such as ``token=...``.
    """

    def __init__(self, *settings: Any) -> None:
        texts = {form for section in settings for text in _secrets(section) for form in _forms(text)}
        self._pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None

    def hide(self, text: str) -> str:
        """Return a text without the secrets, and without the passwords of URLs."""
        text = mask_passwords(text)
        return text if self._pattern is None else self._pattern.sub(MASK, text)

    def shown(self, key: str, value: Any) -> str:
        """Return the value of a dotted key as one line without secrets."""
        return MASK if is_secret_name(key) else self.hide(" ".join(str(value).split()))


def is_secret_name(key: str) -> bool:
    """Return whether the value of a dotted key is a secret."""
    return bool(_NAME.search(key))


def may_contain_secrets(line: str) -> bool:
    """Return whether a line of a file may contain a secret, or a part of one: a long text, or the name of a secret."""
    return bool(_PARTS.search(line) or _INSIDE.search(line))


def _secrets(value: Any, *, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets(inner, is_secret=is_secret or is_secret_name(str(key)))
    elif isinstance(value, list | tuple):
        for previous, inner in zip(["", *value], value, strict=False):  # --api-key and its value are two items
            is_argument = isinstance(previous, str) and previous.startswith("-") and is_secret_name(previous)
            yield from _secrets(inner, is_secret=is_secret or is_argument)
    elif value is not None and not isinstance(value, bool):
        text = str(value)
        yield from (group for match in _INSIDE.finditer(text) for group in match.groups() if group)
        if is_secret:
            variables = VARIABLE.findall(text)
            yield from (part for name, default in variables for part in (os.environ.get(name, ""), default))
            yield VARIABLE.sub("", text)


def _forms(text: str) -> set[str]:
    """Return the texts under which a secret may appear in messages, which quote values and join or cut lines."""
    words = {word for word in text.split() if len(word) >= SHORTEST_WORD}
    whole = {form for form in (text, text.strip(), repr(text)[1:-1]) if len(form) >= SHORTEST}
    return {form for form in whole | words if form.lower() not in WORDS}
