"""How many examples a property test draws: a quarter of them in the default suite of ``scripts/test``, else all."""

from __future__ import annotations

import os

QUICK = os.environ.get("TRINITY_MQ_TEST_EXAMPLES") == "quick"
QUICK_SHARE = 4


def examples(count: int) -> int:
    """Return ``count``, or a quarter of it in the default suite; one at least."""
    return max(1, count // QUICK_SHARE) if QUICK else count
