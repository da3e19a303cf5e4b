"""Reads checkpoints of earlier releases: weights in ``model/``, and everything else in files of ``torch.save``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.checkpoints.state import Parts, StatePart, module_state

OPTIMIZER_FILE, CRITIC_FILE, REFERENCE_FILE = "optimizer.pt", "critic.pt", "reference.pt"


def is_legacy(folder: Path) -> bool:
    """Return whether a checkpoint has the format of an earlier release."""
    return (folder / OPTIMIZER_FILE).exists()


def read_old_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the facts of an old checkpoint, except the critic's, in the format of
    :func:`trinity_mq.training.checkpoints.state.read_facts`.

    Raises:
        DamagedCheckpointError: The file does not load.
    """
    state = _load(folder / OPTIMIZER_FILE)
    facts: dict[str, dict[str, Any]] = {"memory": state.get("memory", {})}
    if "reference" in state:
        facts["reference"] = {"origin": state["reference"], "has_moved": state.get("reference_has_moved", False)}
    return facts


def read_old_parts(folder: Path, modules: Mapping[str, nn.Module]) -> Parts:
    """Return the parts of an old checkpoint. The critic, and a reference that has moved, are loaded into their
    ``modules``. The policy's weights were already loaded with the model.

    Args:
        folder: The checkpoint.
        modules: ``policy``, and also ``critic`` and ``reference`` where the run has them.

    Raises:
        DamagedCheckpointError: A file does not load, or belongs to another model.
    """
    parts = {name: StatePart(facts=facts) for name, facts in read_old_facts(folder).items()}
    path = folder / OPTIMIZER_FILE
    try:
        parts["policy"] = StatePart(module_state(modules["policy"]))
        parts["optimizer"] = _optimizer(_load(path)["optimizer"], modules["policy"])
        if parts.get("reference", StatePart()).facts.get("has_moved") and "reference" in modules:
            path = folder / REFERENCE_FILE
            modules["reference"].load_state_dict(_load(path))
            parts["reference"].tensors = module_state(modules["reference"])
        if "critic" in modules:
            path, critic = folder / CRITIC_FILE, modules["critic"]
            state = _load(path)
            weights = {f"{name}.{key}": tensor for name in ("backbone", "head") for key, tensor in state[name].items()}
            critic.load_state_dict(weights)
            parts["critic"] = StatePart(module_state(critic), {"steps": state["steps"]})
            parts["critic_optimizer"] = _optimizer(state["optimizer"], critic)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} does not fit the model: {error}") from error
    return parts


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        # torch's message stays in the exception chain only: it advises loading without weights_only
        raise DamagedCheckpointError(f"{path} is damaged or missing") from error


def _optimizer(saved: Mapping[str, Any], module: nn.Module) -> StatePart:
    """Return the state of an optimizer as a part. The saved state numbers the parameters in the order of the module."""
    names = [name for name, _ in module.named_parameters()]
    tensors = {
        f"{names[number]}/{key}": tensor for number, state in saved["state"].items() for key, tensor in state.items()
    }
    return StatePart(tensors, {"names": names, "param_groups": saved["param_groups"], "numbers": {}})
