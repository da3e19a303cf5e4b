"""Changes of the code that a test must notice, each with the test that does: ``table.json``.

A mutation is found by its code, which occurs once in its file: when that code changes, its row there changes with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """A change, and the test that must fail with it."""

    name: str
    file: str
    code: str
    """Occurs once in the file."""
    becomes: str
    test: str
    """Below ``tests/``, as pytest names it; with parameters or without."""


MUTATIONS = [Mutation(**row) for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))]
