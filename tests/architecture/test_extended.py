"""Every test that ``scripts/test`` leaves out by default is in ``tests/EXTENDED.md``, with what catches its fault."""

from __future__ import annotations

import re

import pytest

from tests.extended import MARKED, SOME, TESTS, base, rows


@pytest.fixture
def marked(pytestconfig: pytest.Config) -> dict[str, bool]:
    """Of all tests that this session collected: after ``pytest tests`` these are all there are."""
    return pytestconfig.stash[MARKED]


def test_every_extended_test_is_in_the_table(marked: dict[str, bool]) -> None:
    known = rows()
    assert len(known) > 20
    assert [
        nodeid for nodeid, is_marked in marked.items() if is_marked and not any(r.covers(nodeid) for r in known)
    ] == []


def test_every_row_is_of_an_extended_test(marked: dict[str, bool]) -> None:
    for row in rows():
        path, _, name = row.test.removesuffix(SOME).partition("::")
        text = (TESTS / path).read_text(encoding="utf-8")
        assert "pytest.mark.extended" in text, row.test
        assert re.search(rf"def {name or 'test_'}", text), row.test
        collected = [is_marked for nodeid, is_marked in marked.items() if row.covers(nodeid)]
        if collected:
            assert any(collected) if row.test.endswith(SOME) else all(collected), row.test


def test_what_catches_the_fault_is_there_and_is_not_left_out_itself(marked: dict[str, bool]) -> None:
    caught_by = {test for row in rows() for test in row.caught_by}
    assert len(caught_by) > 20
    for test in sorted(caught_by):
        path, _, name = test.partition("::")
        assert (TESTS / path).is_file(), test
        assert re.search(rf"def {name}\(", (TESTS / path).read_text(encoding="utf-8")), test
        collected = [is_marked for nodeid, is_marked in marked.items() if base(nodeid) == test]
        assert not collected or not all(collected), f"{test} is extended"


def test_no_rule_is_held_by_extended_tests_only(marked: dict[str, bool]) -> None:
    rules = (TESTS / "RULES.md").read_text(encoding="utf-8")
    kept = {base(nodeid) for nodeid, is_marked in marked.items() if not is_marked}
    assert [test for test in {base(nodeid) for nodeid in marked} - kept if test in rules] == []
