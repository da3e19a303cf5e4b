"""The critic: a value function on a copy of the first model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from trinity_mq.algorithms.surrogates import clipped_value_loss
from trinity_mq.config.algorithm import CriticConfig
from trinity_mq.config.run import Config
from trinity_mq.training.checkpoints.state import Parts, StatePart, module_state, optimizer_part, optimizer_state
from trinity_mq.training.model.attention import model_inputs
from trinity_mq.training.model.policy import Policy
from trinity_mq.training.packing import MicroBatch
from trinity_mq.training.parallel.ranks import Ranks
from trinity_mq.training.parallel.sharding import gathered, sharded_states

CRITIC, CRITIC_OPTIMIZER = "critic", "critic_optimizer"
"""Names of the critic's parts in a checkpoint."""


@dataclass(frozen=True)
class Targets:
    """Targets of the critic in a train step; float32 ``[trained tokens of the step]``, on the critic's device."""

    old: Tensor
    """Values before the train step."""
    returns: Tensor


class _Values(nn.Module):
    """Backbone with a scalar head. The head starts at 0."""

    def __init__(self, backbone: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.backbone, self.head = backbone, nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the values of a micro-batch's trained tokens, float32 ``[tokens]``."""
        device = batch.input_ids.device.type
        with torch.autocast(device, dtype=self._dtype, enabled=self._dtype != torch.float32):
            inputs = model_inputs(self.backbone, batch)
            hidden: Tensor = self.backbone(**inputs, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden[batch.rows, batch.columns].float())[:, 0]
        return values


class Critic:
    """Computes the value of the state before each trained token, from the hidden state that also yields the token's
    logprob, and is trained on returns.

    The backbone starts as a copy of the first model and the head starts at zero, so all values are 0 at first.
    """

    def __init__(self, config: Config, folder: Path, ranks: Ranks | None = None) -> None:
        """Load the backbone from the Hugging Face folder of the first model, and shard it over ``ranks``. All weights
        of the backbone are trained, even if the policy has adapters.

        Raises:
            ModelNotLoadedError: The folder holds no loadable model.
            LearnerError: The device does not exist, or the model does not support the settings of the trainer.
        """
        plain = config.model.model_copy(update={"lora": None})
        policy = Policy(plain, folder, config.seed, config.trainer, ranks, shards=False)
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.ranks, self.device, self.division = policy.ranks, policy.device, policy.division
        self.settings: CriticConfig = config.algorithm.critic
        dtype = getattr(torch, config.model.dtype)
        self.module = _Values(policy.model.base_model, width, dtype)
        self.module.head.to(self.device)
        policy.shard(self.module, [self.module.head])
        betas = config.algorithm.optimizer.betas
        self.optimizer = torch.optim.AdamW(self.parameters, self.settings.lr, betas, weight_decay=0.0, fused=True)
        self.steps = 0
        """Number of train steps that updated the critic."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters."""
        return list(self.module.parameters())

    @property
    def is_warming_up(self) -> bool:
        """Whether the policy must wait in this train step. The critic counts its own steps, because the run's step
        number does not advance while the policy waits.
        """
        return self.steps < self.settings.warmup_steps

    @torch.no_grad()
    def values(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Return the values of the tokens in ``batches`` by token index, float32 ``[tokens]``, 0 for all other
        tokens.
        """
        result = torch.zeros(tokens, device=self.device)
        for packed in batches:
            batch = packed.to(self.device)
            result[batch.index] = self.module(batch)
        self.ranks.sum(result)
        return result

    def optimizer_step(self, batches: Sequence[MicroBatch], targets: Targets) -> tuple[bool, dict[str, float]]:
        """Update the weights once with the gradient of the mean clipped value loss over all tokens in ``batches``.

        Returns:
            Whether loss and gradient were finite (otherwise nothing changes), and the metrics ``critic/vf_loss``,
            ``critic/vf_clipfrac`` and ``critic/grad_norm``.
        """
        tokens = sum(self.ranks.gather(sum(batch.tokens for batch in batches)))
        self.optimizer.zero_grad()
        total, cut = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for packed in batches:
            batch = packed.to(self.device)
            old, returns = targets.old[batch.index], targets.returns[batch.index]
            losses, clipped = clipped_value_loss(self.module(batch), old, returns, self.settings.value_clip)
            loss = losses.sum() / tokens
            torch.autograd.backward(loss)
            total, cut = total + loss.detach(), cut + clipped.sum()
        self.ranks.sum(total, cut)
        norm = gathered(clip_grad_norm_(self.parameters, self.settings.clip_grad)).item()
        metrics = {"critic/vf_loss": total.item(), "critic/vf_clipfrac": cut.item() / tokens, "critic/grad_norm": norm}
        finite = math.isfinite(norm) and math.isfinite(metrics["critic/vf_loss"])
        if finite:
            self.optimizer.step()
        return finite, metrics

    def parts(self) -> Parts:
        """Return the critic's parts of a checkpoint: its live weights and its optimizer state."""
        weights = StatePart(module_state(self.module), {"steps": self.steps})
        return {CRITIC: weights, CRITIC_OPTIMIZER: optimizer_part(self.optimizer, self.module)}

    def restore(self, parts: Parts) -> None:
        """Restore the optimizer state and step count that :meth:`parts` returned. The weights are already loaded. The
        settings of the optimizer come from the configuration.

        Raises:
            KeyError, TypeError, ValueError: The parts do not belong to this critic.
        """
        state = optimizer_state(parts[CRITIC_OPTIMIZER])
        self.optimizer.load_state_dict(state | {"state": sharded_states(state["state"], self.parameters)})
        self.steps = int(parts[CRITIC].facts["steps"])
        for group in self.optimizer.param_groups:
            group.update(self.optimizer.defaults)


class CriticTotals:
    """Collects the reports of the critic's optimizer steps in one train step."""

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
        result = {"critic/optimizer_steps": float(steps), "critic/skipped_nonfinite": float(self._nonfinite)}
        for name in self._applied[0] if self._applied else ():
            result[name] = math.fsum(metrics[name] for metrics in self._applied) / steps
        return result
