"""The reference model: a copy of the first model of the run, which may follow the policy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity_mq.config.algorithm.reference import ReferenceConfig
from trinity_mq.config.run import Config
from trinity_mq.training.checkpoints.state import StatePart, module_state
from trinity_mq.training.model.policy import LearnerError, Policy
from trinity_mq.training.packing import DivisionSettings, MicroBatch
from trinity_mq.training.parallel.ranks import Ranks
from trinity_mq.training.parallel.sharding import gathered
from trinity_mq.training.update import score


@dataclass
class Reference:
    """The reference model. Its logprobs, computed without gradients, are compared with the policy's, for example to
    penalise divergence.
    """

    policy: Policy
    origin: str
    """Hash of the first model's weights. A resumed run uses the same reference, or refuses to start."""
    settings: ReferenceConfig
    has_moved: bool = False
    """Whether the weights differ from the first model's, so that a checkpoint must contain them."""
    is_shared: bool = False
    """Whether the reference is the trained policy itself without its adapters."""

    @classmethod
    def load(cls, config: Config, folder: Path, origin: str | None, ranks: Ranks | None = None) -> Reference:
        """Load the reference from a folder.

        Args:
            config: Configuration of the run.
            folder: Hugging Face folder of the run's first model.
            origin: Hash in the checkpoint that the run resumes from. None: no checkpoint, or its run had no reference.
            ranks: Ranks over which the reference is sharded.

        Raises:
            LearnerError: The model in the folder is not the reference that the checkpoint was trained with.
            ModelNotLoadedError: The folder holds no loadable model.
        """
        policy = Policy(config.model, folder, config.seed, config.trainer, ranks)
        for parameter in policy.parameters:
            parameter.requires_grad_(False)
        result = cls(policy, _checked(digest(policy), origin, f"in {folder}"), config.algorithm.reference)
        result._leave_device()
        return result

    @classmethod
    def of(cls, policy: Policy, settings: ReferenceConfig, origin: str | None) -> Reference:
        """Return a reference that uses ``policy`` without its adapters, so no second model is held. See
        :meth:`load`.
        """
        weights_hash = _checked(digest(policy), origin, "that the adapters are on")
        return cls(policy, weights_hash, settings, is_shared=True)

    def logprobs(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Return the logprobs of the tokens in ``batches`` at their sampling temperatures, see :func:`score`."""
        if self.is_shared:
            assert self.policy.adapters is not None
            with self.policy.adapters.off():
                return score(self.policy, batches, tokens)[0]
        self.policy.model.to(self.policy.device)
        try:
            return score(self.policy, batches, tokens)[0]
        finally:
            self._leave_device()

    @property
    def division(self) -> DivisionSettings:
        """Division into micro-batches for this model."""
        return self.policy.division

    def _leave_device(self) -> None:
        if self.settings.offload:
            self.policy.model.to("cpu")

    @torch.no_grad()
    def follow(self, policy: Policy, step: int) -> None:
        """Update the reference as configured after train step ``step`` (from 1), which has changed ``policy``."""
        if self.settings.update == "never" or step % self.settings.every_steps:
            return
        share = 1.0 if self.settings.update == "copy" else 1 - self.settings.decay
        for parameter, new in zip(self.policy.parameters, policy.parameters, strict=True):
            parameter.lerp_(new.detach().to(parameter.device), share)
        self.has_moved = True

    def part(self) -> StatePart:
        """Return the reference's part of a checkpoint, with its live weights if they have moved."""
        weights = module_state(self.policy.model) if self.has_moved else {}
        return StatePart(weights, {"origin": self.origin, "has_moved": self.has_moved})


def _checked(weights_hash: str, origin: str | None, where: str) -> str:
    if origin is not None and origin != weights_hash:
        raise LearnerError(
            f"the reference model {where} has the hash {weights_hash}, and the checkpoint was trained with {origin}: "
            "restore the first model, or start over with --fresh"
        )
    return weights_hash


def digest(policy: Policy) -> str:
    """Return a hash of the names and bytes of the weights without adapters, 16 hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=8)
    adapters = set() if policy.adapters is None else set(policy.adapters.parameters)
    for name, tensor in policy.model.named_parameters():
        if name in adapters:
            continue
        hasher.update(name.encode())
        data: Any = gathered(tensor.detach()).cpu().contiguous().view(torch.uint8).numpy()
        hasher.update(memoryview(data).cast("B"))
    return hasher.hexdigest()
