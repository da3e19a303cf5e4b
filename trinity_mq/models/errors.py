"""Errors of models and engines, by who has to act on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_mq.messages import Version
from trinity_mq.runtime.errors import FatalError

if TYPE_CHECKING:
    from trinity_mq.models.inference import InferenceModel


class ModelError(FatalError):
    """A model or its tokenizer cannot be had; one line that says what to change."""


class EngineError(Exception):
    """Base of what an engine, or its absence, answers."""

    said = ""
    """Words of the engine about the request, without its address; empty: it said nothing about the request."""
    param: str | None = None
    """Option of the request that the engine named."""


class EngineNotReady(EngineError):
    """The engine lives but serves nothing at present: it waits for weights, or is shutting down. Ask again later."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds until asking again is worth it."""


class EngineLost(EngineError):
    """No answer: refused, reset, or too late. Another engine may serve."""

    def __init__(self, message: str, engine: InferenceModel | None = None) -> None:
        super().__init__(message)
        self.engine = engine
        """The engine that did not answer, where that is known."""

    def __str__(self) -> str:
        """Return the message, with who was lost."""
        said, engine = super().__str__(), self.engine
        if engine is None:
            return said
        what = "rollout engine" if engine.role == "rollout" else f"engine of auxiliary model {engine.name!r}"
        return f"{what} {engine.id} is lost: {said}"


class EngineRefused(EngineError):
    """The engine answered with an error that asking again does not cure."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status."""
        self.code = code
        """Machine-readable reason from the error body."""


class VersionMismatch(EngineRefused):
    """The request is pinned to a version of the weights that the engine does not hold."""

    def __init__(self, message: str, wanted: Version | None, held: Version | None) -> None:
        super().__init__(message, 409, "version_mismatch")
        self.wanted = wanted
        self.held = held


class PromptTooLong(EngineRefused):
    """The prompt leaves no room for an answer or is over the limit the request gave."""

    def __init__(self, message: str, token_ids: list[int], limit: int) -> None:
        super().__init__(message, 400, "context_length_exceeded")
        self.token_ids = token_ids
        """The first ``limit + 1`` token ids of the prompt."""
        self.limit = limit
        """Prompt tokens allowed."""


class EngineFailed(EngineError):
    """An engine process could not be started, or does not do what its host asks; carries what it said."""
