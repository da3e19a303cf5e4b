from collections.abc import Iterator

import pytest

from trinity_mq.rewards.math import answers


@pytest.fixture
def math_verify_questions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Stands in for the judge process: collects its questions, and answers that no two formulas are equal."""
    questions: list[tuple[str, ...]] = []

    def same(*question: str) -> bool:
        questions.append(question)
        return False

    monkeypatch.setattr(answers, "same", same)
    return questions


@pytest.fixture
def exact_only(math_verify_questions: list[tuple[str, ...]]) -> Iterator[None]:
    """Fails a test that asks the judge process: its numbers are compared here."""
    yield
    assert math_verify_questions == []
