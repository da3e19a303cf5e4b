"""The reference model: a copy of the model that the run began with, which may follow the policy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from trinity_mq.config.algorithm.reference import ReferenceConfig
from trinity_mq.config.run import Config
from trinity_mq.training.checkpoint import DamagedCheckpointError
from trinity_mq.training.packing import MicroBatch
from trinity_mq.training.policy import LearnerError, Policy
from trinity_mq.training.update import score

REFERENCE_FILE = "reference.pt"
"""Inside a checkpoint: the weights of a reference that is no longer the first model."""


@dataclass
class Reference:
    """A model without gradients whose logprobs the policy is held near, or compared with."""

    policy: Policy
    origin: str
    """Hash of the first model's weights: a resumed run uses the same reference, or does not begin."""
    settings: ReferenceConfig
    has_moved: bool = False
    """Whether its weights are no longer those of the first model, so that a checkpoint needs them."""

    @classmethod
    def load(cls, config: Config, folder: Path, origin: str | None) -> Reference:
        """Load the reference from a folder.

        Args:
            config: The run.
            folder: Hugging Face folder of the run's first model.
            origin: Of the checkpoint that is gone on from; None: there is none, or it was written without a reference.

        Raises:
            LearnerError: The model there is not the one that the checkpoint was trained with.
            ModelNotLoadedError: No model there.
        """
        policy = Policy(config.model, folder, config.seed)
        for parameter in policy.parameters:
            parameter.requires_grad_(False)
        found = digest(policy)
        if origin is not None and origin != found:
            raise LearnerError(
                f"the reference model in {folder} has the hash {found}, and the checkpoint was trained with {origin}: "
                "put the first model back, or train anew with --fresh"
            )
        result = cls(policy, found, config.algorithm.reference)
        result._leave_device()
        return result

    def logprobs(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Return the logprobs of the tokens in ``batches`` at the temperatures of their samples, see :func:`score`."""
        self.policy.model.to(self.policy.device)
        try:
            return score(self.policy, batches, tokens)[0]
        finally:
            self._leave_device()

    def _leave_device(self) -> None:
        if self.settings.offload:
            self.policy.model.to("cpu")

    @torch.no_grad()
    def follow(self, policy: Policy, step: int) -> None:
        """Become what the settings say after train step ``step`` (from 1), which has changed ``policy``."""
        if self.settings.update == "never" or step % self.settings.every_steps:
            return
        share = 1.0 if self.settings.update == "copy" else 1 - self.settings.decay
        for own, new in zip(self.policy.parameters, policy.parameters, strict=True):
            own.lerp_(new.detach().to(own.device), share)
        self.has_moved = True

    def save(self, path: Path) -> None:
        """Write its weights."""
        torch.save(self.policy.model.state_dict(), path)

    def restore(self, path: Path) -> None:
        """Put back the weights that :meth:`save` wrote.

        Raises:
            DamagedCheckpointError: They do not load, or are not there.
        """
        try:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
            raise DamagedCheckpointError(f"{path} is damaged or not there") from error
        try:
            self.policy.model.load_state_dict(weights)
        except (TypeError, RuntimeError) as error:
            raise DamagedCheckpointError(f"{path} does not fit the first model: {error}") from error
        self.has_moved = True


def digest(policy: Policy) -> str:
    """Return a hash of the weights' bytes by name, 16 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in policy.model.named_parameters():
        found.update(name.encode())
        found.update(memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).cast("B"))
    return found.hexdigest()
