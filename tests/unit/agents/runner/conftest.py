from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with capture_logs():  # rendering a traceback for the console takes a second
        yield
