"""Writes the tables of docs/families.md from the proofs: ``python tests/golden/families/page.py`` from the repository's
root.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT)]

from tests.golden.families.makers import SOURCES, codec_of  # noqa: E402 - behind the line above
from tests.golden.families.proofs import (  # noqa: E402
    AFTER_THOUGHTS,
    EARLIER,
    FINISHED,
    MOVED,
    PROOFS,
    THOUGHTS_OFF,
    UNPROVEN,
    UNSAMPLED,
    WITH_CALLS,
    WITH_THOUGHTS,
    Proof,
)
from trinity_mq.families.table import FAMILIES  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
NO_THOUGHTS = EARLIER - AFTER_THOUGHTS - MOVED
BREAKS = {
    frozenset[str](): "never",
    AFTER_THOUGHTS: "a new question after thoughts",
    EARLIER: "a new question",
    NO_THOUGHTS: "a new question",
    MOVED: "a new question with tools",
}
MASKS = {
    frozenset[str](): "all",
    AFTER_THOUGHTS: "no thoughts before a later question",
    WITH_THOUGHTS: "no thoughts",
    FINISHED: "one turn",
    FINISHED | WITH_THOUGHTS: "one turn without thoughts",
    EARLIER: "one question",
    EARLIER | THOUGHTS_OFF: "one question without thoughts",
    MOVED: "no question with tools after a call",
    UNSAMPLED: "one turn with thoughts",
    UNSAMPLED - WITH_THOUGHTS: "none",
    NO_THOUGHTS | {"answered"}: "none",
}
"""Words for sets of conversations."""


def calls_of(proof: Proof) -> str:
    """Return in words what a template writes of tools and calls."""
    if proof.calls:
        return proof.calls
    if proof.refused >= WITH_CALLS - WITH_THOUGHTS:
        offered = "tools" in proof.refused or not proof.writes_tools
        return "no" if offered else "tools only"
    calls = "one a message" if "parallel calls" in proof.refused else "yes"
    return calls if proof.writes_tools else f"{calls}, but no tools"


def models() -> Iterator[tuple[str, ...]]:
    """Yield a row for each proof."""
    for proof in PROOFS:
        source = SOURCES[proof.template]
        rendering = codec_of(proof.template).rendering.partition(",")[0]
        masks = {
            MASKS[rewritten]: ", ".join(f"`{name}: {value}`" for name, value in switches.items())
            for switches, rewritten in reversed(proof.rewritten)
        }
        yield (
            source["models"],
            proof.family,
            rendering,
            calls_of(proof),
            f"`{proof.thoughts}`" if proof.thoughts else "",
            BREAKS[proof.breaks],
            "; ".join(f"{words} ({switch})" if switch else words for words, switch in reversed(masks.items())),
            proof.reason if proof.unread else "",
            f"{source['package']}, {source['licence']}",
        )


def families() -> Iterator[tuple[str, ...]]:
    """Yield a row for each family."""
    for family in FAMILIES:
        proven = [proof.template for proof in PROOFS if proof.family == family.name]
        yield (
            family.name,
            ", ".join(family.library),
            " ".join(f"`{tag}`" for tag in family.thoughts or ()),
            " ".join(f"`{mark}`" for mark in family.calls_begin),
            ", ".join(proven),
            UNPROVEN.get(family.name, ""),
        )


TABLES: dict[str, tuple[Sequence[str], Callable[[], Iterable[tuple[str, ...]]]]] = {
    "models": (
        (
            "models",
            "row",
            "rendered by",
            "calls",
            "thoughts",
            "breaks",
            "whole conversations with masks",
            "answers that are not read back",
            "truth, licence of the template",
        ),
        models,
    ),
    "families": (("row", "`renderers`", "thoughts between", "calls begin with", "proven for", "not proven"), families),
}


def table(name: str) -> str:
    """Return a table in Markdown."""
    heads, rows = TABLES[name]
    cells = [heads, ["---"] * len(heads), *rows()]
    return "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in cells)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", "\\n")


def written(page: str) -> str:
    """Return the page with its tables as the proofs have them."""
    for name in TABLES:
        begin, end = f"<!-- {name} -->\n\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(f"{PAGE} has no lines {begin.strip()} and {end.strip()}")
        page = f"{before}{begin}{table(name)}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
