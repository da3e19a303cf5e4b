"""Formatters: convert records of supervised data into experiences with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trinity_mq.data.formatters.base import FormatError, Formatter, Reader, fit_to_length
from trinity_mq.data.formatters.cpt import format_text
from trinity_mq.data.formatters.dpo import format_pair
from trinity_mq.data.formatters.sft import format_answer

FORMATTERS: Mapping[str, Formatter] = MappingProxyType({"sft": format_answer, "dpo": format_pair, "cpt": format_text})
"""Formatters by ``schema_type``."""

__all__ = ["FORMATTERS", "FormatError", "Formatter", "Reader", "fit_to_length"]
