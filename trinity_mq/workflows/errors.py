"""Exceptions by which a workflow says why its run failed, and whether trying it again can help."""

from __future__ import annotations

import re
from typing import ClassVar

KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""A kind of failure: short, since each is a metric of its own."""


class RunFailedError(Exception):
    """A run of a workflow failed, or returned nothing usable; the message says why.

    Args:
        message: What was wrong, for a person.
        kind: Its kind, under which it is counted (``rollout/failures/<kind>``): letters a-z, digits and ``_``, at most
            32 characters. None: that of the class.
        retryable: Whether a further attempt may go well. False: the run has failed for good, and is not tried again.

    Raises:
        ValueError: ``kind`` is no such name.
    """

    default_kind: ClassVar[str] = "workflow"

    def __init__(self, message: str = "", *, kind: str | None = None, retryable: bool = True) -> None:
        super().__init__(message)
        self.kind = self.default_kind if kind is None else kind
        """Kind of the failure."""
        self.retryable = retryable
        """Whether a further attempt may go well."""
        if not (isinstance(self.kind, str) and KIND.fullmatch(self.kind)):
            raise ValueError(
                f"{type(self).__name__}(kind={kind!r}): a kind has letters a-z, digits and _, begins with a letter and "
                f"has at most 32 characters, such as 'sandbox'; put the rest into the message. It was: {message}"
            )


class SandboxFailed(RunFailedError):
    """Something that a run needs beside the model failed: its sandbox, a tool, a provider, or its process.

    It is no fault of the task, so that the run may be tried again. When slices of a lane keep failing in this way, and
    no other way, runners pause the lane (``runner.circuit_breaker``). Only the kinds ``sandbox``, ``tool``,
    ``provider`` and ``environment`` count for that; a failure that is not ``retryable`` does not.
    """

    default_kind: ClassVar[str] = "sandbox"
