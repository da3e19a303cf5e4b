"""How many examples a property test draws: all of them in ``scripts/test --all`` and in plain ``pytest``."""

from __future__ import annotations

import os

QUICK = os.environ.get("TRINITY_MQ_TEST_EXAMPLES") == "quick"
QUICK_SHARE = 4


def examples(count: int) -> int:
    """Return ``count``, or a quarter of it in the suite that a newcomer and CI run."""
    return max(1, count // QUICK_SHARE) if QUICK else count
