"""The base class of every control-plane body: a frozen record with named fields, a kind and a version."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

Version = tuple[int, int]
"""A version of the weights: ``(generation, step)``, compared as a pair. The generation rises at each start of the
trainer."""

BatchId = int | str
"""An int (training), or a string that begins with an int, such as ``"3/gsm8k"`` (evaluation)."""


SchemaRange = tuple[int, int]
"""Oldest and newest message schema of a range, both included."""


class Message(BaseModel):
    """A control-plane body.

    Evolution: a field added with a default keeps the version; readers ignore fields they do not know. Any other change
    gets a new version and a function in :data:`trinity_mq.messages.codec.UPGRADES`.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    kind: ClassVar[str]
    version_number: ClassVar[int] = 1
