"""Models and who serves them: engines, their host, and the wrapper that workflows are handed.

Names load on first use, so that importing this package costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_mq.models.clients import EngineClients
    from trinity_mq.models.engines.generation.text import fingerprint
    from trinity_mq.models.engines.host.host import EngineHost
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
    from trinity_mq.models.wrapper import ModelWrapper

_HOMES = {
    "EngineClients": "trinity_mq.models.clients",
    "EngineError": "trinity_mq.models.errors",
    "EngineFailed": "trinity_mq.models.errors",
    "EngineHost": "trinity_mq.models.engines.host.host",
    "EngineLost": "trinity_mq.models.errors",
    "EngineNotReady": "trinity_mq.models.errors",
    "EngineRefused": "trinity_mq.models.errors",
    "InferenceModel": "trinity_mq.models.inference",
    "ModelError": "trinity_mq.models.errors",
    "ModelWrapper": "trinity_mq.models.wrapper",
    "PromptTooLong": "trinity_mq.models.errors",
    "VersionMismatch": "trinity_mq.models.errors",
    "ensure_model_folder": "trinity_mq.models.model_folder",
    "fingerprint": "trinity_mq.models.engines.generation.text",
}

__all__ = [
    "EngineClients",
    "EngineError",
    "EngineFailed",
    "EngineHost",
    "EngineLost",
    "EngineNotReady",
    "EngineRefused",
    "InferenceModel",
    "ModelError",
    "ModelWrapper",
    "PromptTooLong",
    "VersionMismatch",
    "ensure_model_folder",
    "fingerprint",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
