"""JSON lines: one JSON object per line, always valid JSON. Values that are not finite become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dump_line(fields: Mapping[str, Any]) -> str:
    """Return ``fields`` as JSON on one line, without a line end.

    NaN and infinities become null, because JSON cannot represent them. Values of types that JSON lacks become their
    ``repr``.
    """
    return json.dumps(_finite(fields), ensure_ascii=False, allow_nan=False, default=repr)


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """Return the object in a line, or None if the line is not an object, for example after a torn write."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
