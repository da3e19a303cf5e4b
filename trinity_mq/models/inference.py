"""Handle and status of a model that an engine serves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from trinity_mq.messages import EngineStatus, EngineUse, Version

ModelRole = Literal["rollout", "auxiliary"]


@dataclass(frozen=True, slots=True)
class InferenceModel:
    """Address and identity of a served model, as an engine's heartbeat announces them; plain data that a runner sends
    to the processes of its slices.
    """

    id: str
    """Id of the engine."""
    url: str
    """Base URL without ``/v1``, such as ``http://127.0.0.1:8000``."""
    name: str
    """Name of the model in requests."""
    model_path: str = ""
    """Folder with tokenizer and configuration; empty if the engine does not name a folder."""
    version: Version | None = None
    """``(generation, step)`` of the weights when the handle was made. None: no weights yet, or not versioned."""
    role: ModelRole = "rollout"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> InferenceModel:
        """Return the handle with these fields; unknown keys are ignored.

        Raises:
            ValueError: ``id``, ``url`` or ``name`` is missing, or a field has a wrong type.
        """
        return TypeAdapter(cls).validate_python(data)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Last known status of an engine."""

    id: str
    alive: bool = False
    state: str = "loading"
    """One of loading, empty, current, paused, asleep, dirty, draining, gone; unreachable for an external server."""
    url: str = ""
    name: str = ""
    model_path: str = ""
    fingerprint: str = ""
    version: Version | None = None
    progress: int = 0
    load: int = 0
    """Number of sequences that are being generated or are waiting."""
    tokens: int = 0
    """Tokens sampled since the process started."""
    restarts: int = 0
    use: EngineUse | None = None
    """Use of the batch and the KV cache. None: the engine does not report it."""
    asked_at: float | None = None
    """Loop time in seconds of the oldest admin request of the host without an answer. None: all requests are answered.
    """

    def model(self, role: ModelRole = "rollout") -> InferenceModel:
        """Return the handle that runners use."""
        return InferenceModel(self.id, self.url, self.name, self.model_path, self.version, role)

    def unanswered(self, now: float) -> float:
        """Return the seconds since the oldest unanswered admin request at loop time ``now``; 0 if all are answered."""
        return 0.0 if self.asked_at is None else round(now - self.asked_at, 1)

    def detail(self, role: ModelRole = "rollout") -> EngineStatus:
        """Return the status for the engine's heartbeat."""
        fields = asdict(self)
        del fields["alive"], fields["asked_at"]
        return EngineStatus(role=role, **fields)
