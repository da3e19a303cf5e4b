"""Each change of the list makes its test fail: a test that could not fail would show here.

By default only that the list is true of the code, which takes no time; the changes themselves with ``--all``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutations.harness import LIMIT, ROOT, copied, run_with
from tests.mutations.table import MUTATIONS, Mutation


def by_name(mutation: Mutation) -> str:
    return mutation.name


def test_the_list_is_long_enough_and_names_each_change_once() -> None:
    assert len(MUTATIONS) >= 40
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=by_name)
def test_its_code_occurs_once_and_its_test_exists(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.code) == 1, f"{mutation.file} holds {text.count(mutation.code)} times {mutation.code!r}"
    changed = text.replace(mutation.code, mutation.becomes)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), "a change of comments and texts is none"
    file, _, name = mutation.test.partition("::")
    assert re.search(rf"def {name.partition('[')[0]}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("changed"))


@pytest.mark.extended
@pytest.mark.any_broker
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=by_name)
def test_its_test_fails_with_it(mutation: Mutation, copy: Path) -> None:
    code, said = run_with(mutation, copy)
    assert code == pytest.ExitCode.TESTS_FAILED, f"pytest ended with {code}, wanted a test that fails:\n{said}"
    assert re.search(r"^\d+ failed", said, re.MULTILINE), said
    assert not re.search(r"^ERROR tests/", said, re.MULTILINE), f"a test must fail, not its preparation:\n{said}"
