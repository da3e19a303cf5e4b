"""An engine as its host knows it."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_mq.messages import EngineStatus, Version
from trinity_mq.models.inference import InferenceModel, ModelRole


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """How an engine was when last heard of."""

    id: str
    alive: bool = False
    state: str = "loading"
    """loading, empty, current, paused, dirty, draining; gone."""
    url: str = ""
    name: str = ""
    model_path: str = ""
    fingerprint: str = ""
    version: Version | None = None
    progress: int = 0
    load: int = 0
    """Sequences being generated or waiting."""
    tokens: int = 0
    """Sampled since the process started."""
    restarts: int = 0

    def model(self, role: ModelRole = "rollout") -> InferenceModel:
        """Return the handle that runners use."""
        return InferenceModel(self.id, self.url, self.name, self.model_path, self.version, role)

    def detail(self, role: ModelRole = "rollout") -> EngineStatus:
        """Return the status in the engine's heartbeat."""
        return EngineStatus(
            id=self.id,
            url=self.url,
            name=self.name,
            model_path=self.model_path,
            version=self.version,
            role=role,
            load=self.load,
            state=self.state,
            fingerprint=self.fingerprint,
            progress=self.progress,
            tokens=self.tokens,
            restarts=self.restarts,
        )
