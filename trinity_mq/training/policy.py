"""The policy as torch sees it: loading, logprobs at chosen positions, saving. Called from one thread only."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trinity_mq.algorithms.scoring import entropy_baselines, token_logprobs
from trinity_mq.config.model import ModelConfig
from trinity_mq.runtime.errors import FatalError
from trinity_mq.training.packing import MicroBatch

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)
"""Copied as they are: a tokenizer that is loaded and saved again may come back as another one."""


class LearnerError(FatalError):
    """The learner cannot do what is asked; the message says what to change."""


class ModelNotLoadedError(LearnerError):
    """No model could be loaded from a folder."""


class Policy:
    """A causal language model with float32 weights.

    With ``dtype: bfloat16`` it computes in bfloat16 (autocast) and shows its weights to others in it, while the weights
    that the optimizer moves stay float32: a step of 1e-6 is lost in a bfloat16 weight.
    """

    def __init__(self, config: ModelConfig, folder: Path, seed: int) -> None:
        """Load the model in ``folder``.

        Raises:
            ModelNotLoadedError: No model there.
            LearnerError: No such device.
        """
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        self.device = _device(config.device)
        self._dtype = getattr(torch, config.dtype)
        torch.manual_seed(seed)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelNotLoadedError(
                f"no causal language model could be loaded from {folder}: {error}; it must be a Hugging Face folder "
                "with config.json and safetensors weights"
            ) from error
        # eval() turns dropout off, so that ratios of unchanged weights are 1; gradients flow all the same.
        self.model = model.to(self.device).eval()
        head = self.model.get_output_embeddings()
        if head is None:
            raise LearnerError(f"{type(model).__name__} in {folder} has no output embeddings to take logits from")
        self._positions: tuple[Tensor, Tensor] | None = None
        head.register_forward_pre_hook(self._select)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, tied ones once."""
        return list(self.model.parameters())

    def _select(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Hand the head only the positions asked for: logits of all others would be the largest tensor of the pass."""
        return None if self._positions is None else (arguments[0][self._positions],)

    def _logits(self, input_ids: Tensor) -> Tensor:
        reduced = self._dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=reduced):
            logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits

    def score(self, batch: MicroBatch, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of the batch's trained tokens, float32 ``[tokens]``, at their temperatures."""
        logits = self._token_logits(batch)
        return token_logprobs(logits, batch.targets, batch.temperature, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def score_with_baseline(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return logprobs, entropies and entropy baselines of the batch's trained tokens, without gradient."""
        logits = self._token_logits(batch)
        found = token_logprobs(logits, batch.targets, batch.temperature, entropy_gradient=False)
        return *found, entropy_baselines(logits, batch.temperature)

    def _token_logits(self, batch: MicroBatch) -> Tensor:
        """Return the logits that the batch's trained tokens were chosen by, ``[tokens, vocabulary]``."""
        self._positions = (batch.rows, batch.columns)
        try:
            return self._logits(batch.input_ids)
        finally:
            self._positions = None

    @torch.no_grad()
    def sequence_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprob of each token after the first, at temperature 1."""
        if len(tokens) < 2:
            raise ValueError(f"got {len(tokens)} tokens, wanted at least 2: the first one has no logprob")
        ids = torch.tensor([list(tokens)], device=self.device)
        distribution = self._logits(ids[:, :-1])[0].float().log_softmax(-1)
        found: list[float] = distribution.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found

    def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return ``(name, dtype, shape)`` of each tensor of :meth:`weights`, in its order."""
        name_of = str(self._dtype).removeprefix("torch.")
        return [(name, name_of, list(tensor.shape)) for name, tensor in self.model.named_parameters()]

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return the parameters by name in module order, tied ones once; the live ones where the dtype allows."""
        return [(name, tensor.detach().to(self._dtype)) for name, tensor in self.model.named_parameters()]

    def save(self, folder: Path, tokenizer: Path) -> None:
        """Write a Hugging Face folder with float32 weights and the tokenizer files of the folder ``tokenizer``."""
        self.model.save_pretrained(folder)
        for pattern in TOKENIZER_FILES:
            for source in tokenizer.glob(pattern):
                if source.is_file():
                    shutil.copyfile(source, folder / source.name)


def _device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise LearnerError("model.device is cuda, but torch sees no CUDA device here; use model.device=auto or cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")
