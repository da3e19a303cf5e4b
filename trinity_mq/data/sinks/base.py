"""The interface of a sink of experiences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trinity_mq.experience import Experience
from trinity_mq.runtime.errors import FatalError


class SinkError(FatalError):
    """The sink cannot be used. The message gives the remedy."""


class ExperienceSink(Protocol):
    """Stores the experiences of batches. Its methods block: call them on a thread."""

    title: str
    """The destination of the experiences, for a person."""

    def write(self, batch: int, experiences: Sequence[Experience]) -> None:
        """Write the experiences of a batch durably and atomically. Experiences written earlier for this batch are
        replaced.

        Raises:
            SinkError: The experiences cannot be written.
        """

    def close(self) -> None:
        """Release all resources."""
