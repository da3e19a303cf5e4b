"""One JSON object a line, always valid JSON: what is not finite becomes null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dump_line(fields: Mapping[str, Any]) -> str:
    """Return ``fields`` as JSON on one line, without the line's end.

    NaN and infinities become null, since JSON has no word for them; what JSON cannot hold becomes its ``repr``.
    """
    return json.dumps(_finite(fields), ensure_ascii=False, allow_nan=False, default=repr)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
