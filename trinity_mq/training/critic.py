"""The critic: a value function on a copy of the first model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from trinity_mq.algorithms.values import clipped_value_loss
from trinity_mq.config.algorithm import CriticConfig
from trinity_mq.config.run import Config
from trinity_mq.training.checkpoint import DamagedCheckpointError
from trinity_mq.training.packing import MicroBatch
from trinity_mq.training.policy import Policy

CRITIC_FILE = "critic.pt"
"""Inside a checkpoint: weights, optimizer and train steps of the critic."""


@dataclass(frozen=True)
class Targets:
    """What the critic learns in a train step; float32 ``[trained tokens of the step]``, on its device."""

    old: Tensor
    """Its values before the step."""
    returns: Tensor


class Critic:
    """Values of the state before each trained token, from the hidden state that the token's logprob comes from.

    The backbone begins as the first model, the head with zeros: all values are 0 at first.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        """Load the backbone from the Hugging Face folder of the first model; torch's random state stays.

        Raises:
            ModelNotLoadedError: No model there.
            LearnerError: No such device.
        """
        random_state = torch.get_rng_state()
        policy = Policy(config.model, folder, config.seed)
        torch.set_rng_state(random_state)
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.device = policy.device
        self.settings: CriticConfig = config.algorithm.critic
        self.backbone: nn.Module = policy.model.base_model
        self.head = nn.Linear(width, 1, device=self.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._dtype = getattr(torch, config.model.dtype)
        betas = config.algorithm.optimizer.betas
        self._optimizer = torch.optim.AdamW(self.parameters, self.settings.lr, betas, weight_decay=0.0, fused=True)
        self.steps = 0
        """Train steps in which it learned."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters."""
        return [*self.backbone.parameters(), *self.head.parameters()]

    @property
    def is_warming_up(self) -> bool:
        """The policy has to wait in this train step. Counted by the critic's own steps: the run's stand still."""
        return self.steps < self.settings.warmup_steps

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the values of a micro-batch on the critic's device, float32 ``[tokens]``, with gradient."""
        reduced = self._dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=reduced):
            hidden: Tensor = self.backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden[batch.rows, batch.columns].float())[:, 0]
        return values

    @torch.no_grad()
    def values(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Return the values of the tokens in ``batches`` by their index, float32 ``[tokens]``, 0 for all others."""
        result = torch.zeros(tokens, device=self.device)
        for packed in batches:
            batch = packed.to(self.device)
            result[batch.index] = self.forward(batch)
        return result

    def optimizer_step(self, batches: Sequence[MicroBatch], targets: Targets) -> tuple[bool, dict[str, float]]:
        """Move the weights once by the mean of the clipped value loss over all tokens in ``batches``.

        Returns:
            Whether loss and gradient were finite (else nothing is changed), and the metrics ``critic/vf_loss``,
            ``critic/vf_clipfrac`` and ``critic/grad_norm``.
        """
        tokens = sum(batch.tokens for batch in batches)
        self._optimizer.zero_grad()
        total, cut = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for packed in batches:
            batch = packed.to(self.device)
            old, returns = targets.old[batch.index], targets.returns[batch.index]
            losses, clipped = clipped_value_loss(self.forward(batch), old, returns, self.settings.value_clip)
            loss = losses.sum() / tokens
            torch.autograd.backward(loss)
            total, cut = total + loss.detach(), cut + clipped.sum()
        norm = clip_grad_norm_(self.parameters, self.settings.clip_grad).item()
        metrics = {"critic/vf_loss": total.item(), "critic/vf_clipfrac": cut.item() / tokens, "critic/grad_norm": norm}
        finite = math.isfinite(norm) and math.isfinite(metrics["critic/vf_loss"])
        if finite:
            self._optimizer.step()
        return finite, metrics

    def save(self, path: Path) -> None:
        """Write everything :meth:`restore` needs."""
        state = {
            "backbone": self.backbone.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
        }
        torch.save(state, path)

    def restore(self, path: Path) -> None:
        """Put back what :meth:`save` wrote; the settings stay those of the configuration.

        Raises:
            DamagedCheckpointError: It does not load, or is not there.
        """
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
            raise DamagedCheckpointError(f"{path} is damaged or not there") from error
        try:
            self.backbone.load_state_dict(state["backbone"])
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.steps = state["steps"]
        except (KeyError, ValueError, RuntimeError) as error:
            raise DamagedCheckpointError(f"{path} does not fit the first model: {error}") from error
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.lr


class CriticTotals:
    """Collects what the critic's optimizer steps of one train step report."""

    def __init__(self) -> None:
        self._applied: list[dict[str, float]] = []
        self._nonfinite = 0

    @property
    def has_learned(self) -> bool:
        """Whether an optimizer step was applied."""
        return bool(self._applied)

    def add(self, finite: bool, metrics: dict[str, float]) -> None:
        """Count one optimizer step."""
        if finite:
            self._applied.append(metrics)
        else:
            self._nonfinite += 1

    def metrics(self) -> dict[str, float]:
        """Return averages over the applied optimizer steps, and counts."""
        steps = len(self._applied)
        found = {"critic/optimizer_steps": float(steps), "critic/nonfinite_skipped": float(self._nonfinite)}
        for name in self._applied[0] if self._applied else ():
            found[name] = math.fsum(metrics[name] for metrics in self._applied) / steps
        return found
