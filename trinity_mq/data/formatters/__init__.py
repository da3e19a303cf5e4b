"""Formatters: convert records of supervised data into experiences with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trinity_mq.config import ExperienceBufferConfig
from trinity_mq.data.formatters.base import FormatError, Formatter, Reader, fit_to_length
from trinity_mq.data.formatters.class_form import FORMATTER, ExperienceFormatter, PromptType, class_formatter
from trinity_mq.data.formatters.cpt import format_text
from trinity_mq.data.formatters.dpo import format_pair
from trinity_mq.data.formatters.sft import format_answer
from trinity_mq.engines.generation.text import TextCodec

FORMATTERS: Mapping[str, Formatter] = MappingProxyType({"sft": format_answer, "dpo": format_pair, "cpt": format_text})
"""Formatters by ``schema_type``."""


def find_formatter(data: ExperienceBufferConfig, codec: TextCodec) -> Formatter:
    """Return the formatter of training data: built in, or a class by its dotted path or entry point.

    Raises:
        UnknownNameError: The class does not exist.
        TasksetError: An object of the class cannot be created.
    """
    built_in = FORMATTERS.get(data.schema_type)
    return built_in or class_formatter(data.schema_type, codec, data.format, data.name)


__all__ = [
    "FORMATTER",
    "FORMATTERS",
    "ExperienceFormatter",
    "FormatError",
    "Formatter",
    "PromptType",
    "Reader",
    "class_formatter",
    "find_formatter",
    "fit_to_length",
]
