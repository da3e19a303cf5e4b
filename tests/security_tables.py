"""Rows of the tables in docs/security.md."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "security.md"


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, its first row (the names of the columns) first."""
    below = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in below.splitlines() if line.startswith("|") and not line.startswith("|--")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
