"""The reference model: a frozen copy of the model that the run began with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trinity_mq.config.run import Config
from trinity_mq.training.packing import MicroBatch
from trinity_mq.training.policy import LearnerError, Policy
from trinity_mq.training.update import score


@dataclass(frozen=True)
class Reference:
    """A frozen model whose logprobs the policy is held near, or compared with."""

    policy: Policy
    origin: str
    """Hash of its weights: a resumed run uses the same reference, or does not begin."""

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
        return cls(policy, found)

    def logprobs(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Return the logprobs of the tokens in ``batches`` at the temperatures of their samples, see :func:`score`."""
        return score(self.policy, batches, tokens)[0]


def digest(policy: Policy) -> str:
    """Return a hash of the weights' bytes by name, 16 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in policy.model.named_parameters():
        found.update(name.encode())
        found.update(memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).cast("B"))
    return found.hexdigest()
