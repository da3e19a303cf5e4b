"""Plain texts for continued pre-training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_mq.data.formatters.base import FormatError, Reader
from trinity_mq.experience import Experience


def format_text(reader: Reader, record: Mapping[str, Any]) -> Experience:
    """Return the experience of a text: all tokens except the first are trained on, including the end of sequence."""
    tokens = reader.codec.encode(reader.text(record, reader.keys.prompt_key), special=True)
    if not tokens or tokens[-1] not in reader.codec.stop_ids:
        tokens = [*tokens, reader.codec.end_id]
    if len(tokens) < 2:
        raise FormatError("its text is a single token, which leaves nothing to predict")
    return Experience(tokens=tokens, prompt_length=1)
