"""Models as workflows and runners use them: the model wrapper, connections to engines, their errors, and model folders.

Modules that need torch or HTTP load on first use, so importing this package costs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trinity_mq.models.errors import (
    EngineError,
    EngineFailed,
    EngineLost,
    EngineNotReady,
    EngineRefused,
    ModelError,
    PromptTooLong,
    VersionMismatch,
)
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.model_folder import ensure_model_folder

if TYPE_CHECKING:
    from trinity_mq.models.clients import EngineClients
    from trinity_mq.models.wrapper import ModelWrapper

_LAZY = {
    "EngineClients": "trinity_mq.models.clients",
    "EngineHost": "trinity_mq.engines.host.host",
    "ModelWrapper": "trinity_mq.models.wrapper",
}

__all__ = [
    "EngineClients",
    "EngineError",
    "EngineFailed",
    "EngineLost",
    "EngineNotReady",
    "EngineRefused",
    "InferenceModel",
    "ModelError",
    "ModelWrapper",
    "PromptTooLong",
    "VersionMismatch",
    "ensure_model_folder",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
