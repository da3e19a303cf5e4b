"""Formatters in Trinity-RFT's class form: the base class, the registry, and the bridge to formatters of trinity_mq."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

from trinity_mq.config import RecordFormatConfig
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.formatters.base import FormatError, Formatter, Reader
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.experience import Experience
from trinity_mq.runtime.errors import custom_code
from trinity_mq.runtime.plugins import Registry, resolve

FORMATTER = Registry({}, "FORMATTER")
"""Formatters, by the value of ``schema_type``; see :class:`ExperienceFormatter`."""
ENTRY_GROUP = "trinity_mq.formatters"
"""Entry-point group under which installed packages add formatters."""
ABSENT = (
    "image_key", "video_key", "reply_prefix", "workflow_key", "reward_fn_key", "chat_template",
)  # fmt: skip
"""Fields of Trinity-RFT's ``FormatConfig``. A class gets None for a field that the section ``format`` lacks."""


class PromptType(StrEnum):
    """Kinds of prompts in records, the values of ``format.prompt_type``."""

    MESSAGES = "messages"
    PLAINTEXT = "plaintext"


class ExperienceFormatter(ABC):
    """Converts records of training data into experiences. It is constructed with the path of the model's tokenizer and
    the section ``format``: ``Mine(tokenizer_path, format_config)``.
    """

    @abstractmethod
    def format(self, sample: dict[str, Any]) -> Experience:
        """Return the experience of a record: ``tokens`` with ``prompt_length``, or ``chosen`` and ``rejected``."""


def class_formatter(path: str, codec: TextCodec, keys: RecordFormatConfig, data: str) -> Formatter:
    """Return a formatter that calls an object of a class.

    Args:
        path: Dotted path or entry point of the class.
        codec: The model's tokenizer.
        keys: The section ``format``.
        data: Name of the data, for error messages.

    Raises:
        UnknownNameError: The class does not exist.
        TasksetError: The object cannot be created, or lacks the method ``format``.
    """
    kind = resolve("formatter", path, entry_group=ENTRY_GROUP)
    fields = {"enable_thinking": None, **dict.fromkeys(ABSENT), **keys.model_dump()}
    what = f"training data {data!r}: schema_type {path}"
    with custom_code(TasksetError, f"{what} cannot be made of a tokenizer_path and a format_config:"):
        made = kind(tokenizer_path=codec.path, format_config=SimpleNamespace(**fields))
    if not callable(getattr(made, "format", None)):
        raise TasksetError(
            f"{what} has no method format, wanted a subclass of trinity_mq.data.formatters.ExperienceFormatter"
        )

    def formatted(_: Reader, record: Mapping[str, Any]) -> Experience:
        with custom_code(FormatError, f"cannot be formatted by {path}:"):
            experience = made.format(dict(record))
        if not isinstance(experience, Experience):
            raise FormatError(f"becomes {experience!r:.120} by {path}, wanted an Experience")
        return experience

    return formatted
