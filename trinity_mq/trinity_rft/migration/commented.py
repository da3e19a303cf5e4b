"""Writes a configuration as YAML, with comments above the settings that have comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from trinity_mq.trinity_rft.migration.move import Path

WIDTH = 116
"""Maximum number of characters in a comment line."""


def as_yaml(settings: Mapping[str, Any], comments: Mapping[Path, Sequence[str]]) -> str:
    """Return ``settings`` as YAML.

    Args:
        settings: Nested mappings, which may contain lists of mappings or values.
        comments: Comments by place, such as ``("buffer", "eval_tasksets", 0, "path")``.
    """
    return "".join(f"{line}\n" for line in _mapping(settings, comments, (), ""))


def _mapping(
    settings: Mapping[str, Any], comments: Mapping[Path, Sequence[str]], place: Path, indent: str
) -> Iterator[str]:
    for key, value in settings.items():
        here = (*place, key)
        for comment in comments.get(here, ()):
            yield from comment_lines(comment, indent)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _mapping(value, comments, here, indent + "  ")
        elif isinstance(value, Sequence) and any(isinstance(item, Mapping) for item in value):
            yield f"{indent}{key}:"
            for number, item in enumerate(value):
                lines = list(_mapping(item, comments, (*here, number), indent + "    "))
                first = next(place for place, line in enumerate(lines) if not line.lstrip().startswith("#"))
                yield from lines[:first]
                yield f"{indent}  - {lines[first].lstrip()}"
                yield from lines[first + 1 :]
        else:
            yield f"{indent}{key}: {_value(value)}"


def comment_lines(text: str, indent: str = "") -> list[str]:
    """Return a comment as lines of YAML."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ")


def _value(value: Any) -> str:
    shown = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return shown.removesuffix("\n").removesuffix("\n...")
