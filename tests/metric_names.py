"""The names in docs/metrics.md, and whether a metric is among them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
LINE = {"time", "role", "agent", "step"}
"""What a line of metrics.jsonl has besides metrics."""
WITH_SLASHES = {"<metric>", "<taskset>"}
"""What a workflow or a user names as they like."""


@functools.cache
def documented() -> tuple[str, ...]:
    """Return the names in the first columns of the page's tables; those of other systems are not among them."""
    text, _, _ = PAGE.read_text(encoding="utf-8").partition("## Also known as")
    firsts = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return tuple(name for first in firsts for name in re.findall(r"`([^`]+)`", first))


@functools.cache
def _pattern() -> re.Pattern[str]:
    def form(name: str) -> str:
        parts = re.split(r"(<[^>]*>)", name)
        return "".join(
            re.escape(part) if not part.startswith("<") else ".+" if part in WITH_SLASHES else "[^/]+" for part in parts
        )

    return re.compile("|".join(f"(?:{form(name)})" for name in documented()))


def undocumented(names: Iterable[str]) -> set[str]:
    """Return the metrics that the page does not name."""
    return {name for name in names if name not in LINE and not _pattern().fullmatch(name)}
