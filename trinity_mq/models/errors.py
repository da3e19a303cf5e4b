"""Errors of models and engines, grouped by the party that has to act on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_mq.messages import Version
from trinity_mq.runtime.errors import FatalError

if TYPE_CHECKING:
    from trinity_mq.models.inference import InferenceModel


class ModelError(FatalError):
    """A model or its tokenizer is not available; the message is one line that says what to change."""


class EngineError(Exception):
    """Base class of the errors for an error answer of an engine, and for a missing answer."""

    said = ""
    """Message of the engine about the request, without the engine's address; empty if the engine sent none."""
    param: str | None = None
    """Request parameter that the engine named."""


class EngineNotReady(EngineError):
    """The engine is alive but serves nothing at present: it waits for weights or shuts down. Retry later."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait before a retry."""


class EngineLost(EngineError):
    """The engine did not answer: connection refused, connection reset, or timeout. Another engine may serve."""

    def __init__(self, message: str, engine: InferenceModel | None = None) -> None:
        super().__init__(message)
        self.engine = engine
        """The engine that did not answer; None if it is not known."""

    def __str__(self) -> str:
        """Return the message, with the lost engine."""
        message, engine = super().__str__(), self.engine
        if engine is None:
            return message
        description = "rollout engine" if engine.role == "rollout" else f"engine of auxiliary model {engine.name!r}"
        return f"{description} {engine.id} is lost: {message}"


class EngineRefused(EngineError):
    """The engine answered with an error that a retry does not cure."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status."""
        self.code = code
        """Machine-readable reason from the error body."""


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
        """The first ``limit + 1`` token ids of the prompt."""
        self.limit = limit
        """Maximum number of prompt tokens."""


class EngineFailed(EngineError):
    """An engine process cannot be started, or does not obey its host; the message carries the output of the process."""
