"""Errors of models and engines. Each class stands for a different reaction of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_mq.messages import Version
from trinity_mq.runtime.errors import FatalError

if TYPE_CHECKING:
    from trinity_mq.models.inference import InferenceModel


class ModelError(FatalError):
    """A model or its tokenizer is not available or cannot be used as configured; the message is one line that says what
    to change.
    """


class EngineError(Exception):
    """Base class of the errors of engines: an error answer, a missing answer, or a process that does not work."""

    said = ""
    """Message of an answer with an HTTP status from 400 to 499, without the engine's address; ``HTTP status N`` if that
    answer has no message. Empty for all other errors."""
    param: str | None = None
    """Request parameter that such an answer names. None: it names no parameter."""


class EngineNotReady(EngineError):
    """The engine is alive but does not take the request at present: it waits for weights, is overloaded, or shuts down.
    Retry later.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait before a retry."""


class EngineLost(EngineError):
    """No usable answer came: the connection failed, the time ran out, the answer cannot be read, or no engine is alive.
    Another engine may serve.
    """

    def __init__(self, message: str, engine: InferenceModel | None = None) -> None:
        super().__init__(message)
        self.engine = engine
        """The engine without a usable answer; None if it is not known."""

    def __str__(self) -> str:
        """Return the message, with the lost engine."""
        message, engine = super().__str__(), self.engine
        if engine is None:
            return message
        description = "rollout engine" if engine.role == "rollout" else f"engine of auxiliary model {engine.name!r}"
        return f"{description} {engine.id} is lost: {message}"


class EngineRefused(EngineError):
    """The engine answered with an error that a retry does not cure, or without data that the caller needs."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status."""
        self.code = code
        """Machine-readable reason, from the error body or from the check of the answer; None if neither names it."""


class VersionMismatch(EngineRefused):
    """The request is pinned to a weight version that the engine does not hold."""

    def __init__(self, message: str, wanted: Version | None, held: Version | None) -> None:
        super().__init__(message, 409, "version_mismatch")
        self.wanted = wanted
        self.held = held


class PromptTooLong(EngineRefused):
    """The prompt leaves no room for an answer, or exceeds the limit in the request."""

    def __init__(self, message: str, token_ids: list[int], limit: int) -> None:
        super().__init__(message, 400, "context_length_exceeded")
        self.token_ids = token_ids
        """Token ids of the prompt, at least the first ``limit + 1``."""
        self.limit = limit
        """Maximum number of prompt tokens."""


class EngineFailed(EngineError):
    """An engine process cannot be started, or does not obey its host; the message carries the output of the process."""
