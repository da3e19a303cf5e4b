"""Control-plane golden bodies as plain maps: what any writer may send, not what today's models make.

``control_cases.json`` has them by kind and version, and by the name of the case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _read() -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    named = ((name.partition(".v"), cases) for name, cases in table.items())
    return {(kind, int(version)): cases for (kind, _, version), cases in named}


CASES = _read()
