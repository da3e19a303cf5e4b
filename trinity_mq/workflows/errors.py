"""Exceptions by which a workflow reports why its run failed and whether a retry can help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""Pattern of a failure kind. A kind is short, because each kind has its own metric."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and its chain of causes. For an exception group, the chain continues with its first exception."""
    cause: BaseException | None = error
    visited: set[int] = set()  # an exception may be raised from itself
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__


class RunFailedError(Exception):
    """A run of a workflow failed or returned nothing usable. The message gives the reason.

    Args:
        message: The reason, for a person.
        kind: Kind of the failure, counted as ``rollout/failures/<kind>``: letters a-z, digits and ``_``, at most 32
            characters. None: the ``default_kind`` of the class.
        retryable: Whether a further attempt may succeed. False: the run has failed permanently and is not retried.

    Raises:
        ValueError: ``kind`` does not match :data:`KIND`.
    """

    default_kind: ClassVar[str] = "workflow"

    def __init__(self, message: str = "", *, kind: str | None = None, retryable: bool = True) -> None:
        super().__init__(message)
        self.kind = self.default_kind if kind is None else kind
        """Kind of the failure."""
        self.retryable = retryable
        """Whether a further attempt may succeed."""
        if not (isinstance(self.kind, str) and KIND.fullmatch(self.kind)):
            raise ValueError(
                f"{type(self).__name__}(kind={kind!r}): a kind has letters a-z, digits and _, begins with a letter and "
                f"has at most 32 characters, such as 'sandbox'; put the rest into the message. It was: {message}"
            )


class SandboxFailed(RunFailedError):
    """A dependency of the run other than the model failed: its sandbox, a tool, a provider, or its process.

    The task is not at fault, so the run may be retried. When slices of a lane keep failing in this way and in no other
    way, runners pause the lane (``runner.circuit_breaker``). Only the kinds ``sandbox``, ``tool``, ``provider`` and
    ``environment`` count for the pause. A failure that is not ``retryable`` does not count.
    """

    default_kind: ClassVar[str] = "sandbox"
