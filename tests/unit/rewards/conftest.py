from collections.abc import Iterator

import pytest

from trinity_mq.rewards.math import answers


@pytest.fixture
def exact_only() -> Iterator[None]:
    """Fails a test that asks the judge process: its numbers are compared here."""
    before = answers.same.cache_info()
    yield
    assert answers.same.cache_info() == before
