"""The interface of a sink of experiences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trinity_mq.experience import Experience
from trinity_mq.runtime.errors import FatalError


class SinkError(FatalError):
    """The sink cannot be used; the message says what to do."""


class ExperienceSink(Protocol):
    """Takes the experiences of batches. Its methods block: call them on a thread."""

    title: str
    """The destination of the experiences, for a person."""

    def write(self, batch: int, experiences: Sequence[Experience]) -> None:
        """Write the experiences of a batch, durably and whole or not at all; those written for it before are replaced.

        Raises:
            SinkError: They cannot be written.
        """

    def close(self) -> None:
        """Give everything back."""
