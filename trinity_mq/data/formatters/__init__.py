"""Formatters: convert records of supervised data into experiences with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trinity_mq.data.formatters.base import FormatError, Formatter, Reader, fitted
from trinity_mq.data.formatters.cpt import text_of
from trinity_mq.data.formatters.dpo import pair_of
from trinity_mq.data.formatters.sft import answer_of

FORMATTERS: Mapping[str, Formatter] = MappingProxyType({"sft": answer_of, "dpo": pair_of, "cpt": text_of})
"""Formatters by ``schema_type``."""

__all__ = ["FORMATTERS", "FormatError", "Formatter", "Reader", "fitted"]
