"""The table of rules names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<rule>.+) \| (?P<file>[\w/]+\.py)::(?P<test>test_\w+) \|$")


def rows() -> list[re.Match[str]]:
    lines = (TESTS / "RULES.md").read_text(encoding="utf-8").splitlines()
    said = [line for line in lines if line.startswith("|") and line not in {"| rule | test |", "|---|---|"}]
    found = [ROW.match(line) for line in said]
    assert all(found), [line for line, row in zip(said, found, strict=True) if row is None]
    return [row for row in found if row is not None]


def test_every_rule_has_a_test_that_exists() -> None:
    assert len(rows()) > 100
    missing = [
        row["test"]
        for row in rows()
        if not (TESTS / row["file"]).is_file()
        or not re.search(rf"def {row['test']}\(", (TESTS / row["file"]).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_every_test_of_a_rule_is_in_the_table() -> None:
    listed = {(row["file"], row["test"]) for row in rows()}
    files = [*TESTS.glob("unit/agents/test_rules_*.py"), TESTS / "broker" / "test_rules.py"]
    here = {
        (str(file.relative_to(TESTS)), name)
        for file in files
        if file.name != Path(__file__).name
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert here - listed == set()
