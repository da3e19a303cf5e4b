"""A causal language model that samples and scores. It is used only in the engine's worker thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity_mq.config import ModelConfig
from trinity_mq.engines.generation.request import Completion, GenerationListener, GenerationRequest, ScoreRequest
from trinity_mq.engines.generation.stopping import StopStrings, cut, stop_in, without_stop_token
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.torch.decoding import RowListener, decode
from trinity_mq.engines.torch.sampling import tempered_logprobs
from trinity_mq.engines.torch.weights import WeightsError, check, copy_into, named_weights
from trinity_mq.models.errors import ModelError

SCORE_TOKENS = 1 << 14
"""Maximum padded tokens scored in one forward pass."""


class TextGenerator:
    """Generates batches of requests, each batch in one call."""

    def __init__(self, model: Any, codec: TextCodec, *, max_model_len: int) -> None:
        self.model = model.eval()
        self.codec = codec
        self.device: torch.device = next(model.parameters()).device
        self.max_model_len = max_model_len
        """Maximum tokens of prompt and response together."""
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        """Size of the vocabulary; token ids are smaller."""
        self._cancelled = threading.Event()

    @classmethod
    def build(cls, config: ModelConfig, folder: Path, *, num_threads: int) -> TextGenerator:
        """Return a generator with random weights; the trainer sends the real weights later.

        Raises:
            ModelError: The folder does not describe a causal language model that can be built.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        codec = TextCodec.load(folder, trust_remote_code=config.trust_remote_code)
        device = choose_device(config.device)
        try:
            described = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(
                    described, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
                )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(
                f"{folder} does not hold a causal language model: {' '.join(str(error).split())}"
            ) from error
        longest = getattr(described.get_text_config(), "max_position_embeddings", None) or config.max_model_len
        return cls(model, codec, max_model_len=min(config.max_model_len, longest))

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each request, in order. ``listener`` receives each token and reports requests
        without a waiting caller.

        Raises:
            GenerationCancelled: :meth:`cancel` was called.
        """
        stops = [request.stop for request in requests for _ in range(request.n)]
        sampled = decode(
            self.model,
            requests,
            pad_id=self.codec.pad_id,
            device=self.device,
            stop_watch=StopStrings(stops, self.codec.decode) if any(stops) else None,
            row_listener=None if listener is None else RowListener(requests, listener, self.device),
            cancelled=self._cancelled.is_set,
        )
        stop_ids = [request.stop_ids for request in requests for _ in range(request.n)]
        texts = self.codec.decode(
            [without_stop_token(row.token_ids, ends) for row, ends in zip(sampled, stop_ids, strict=True)]
        )
        completions = iter(
            [
                Completion(
                    row.token_ids, row.logprobs, cut(text, stop), row.finish_reason, stopped_by=stop_in(text, stop)
                )
                for row, text, stop in zip(sampled, texts, stops, strict=True)
            ]
        )
        return [[next(completions) for _ in range(request.n)] for request in requests]

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Return for each request the logprob of every token after the first, float32, by a plain forward pass."""
        results: list[list[float]] = []
        for batch in _batches(requests):
            width = max(len(request.token_ids) for request in batch)
            padded = [
                [*request.token_ids, *[self.codec.pad_id] * (width - len(request.token_ids))] for request in batch
            ]
            ids = torch.tensor(padded, dtype=torch.int64, device=self.device)
            sizes = torch.tensor([len(request.token_ids) for request in batch], device=self.device)
            mask = (torch.arange(width, device=self.device)[None, :] < sizes[:, None]).long()
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for row, request in enumerate(batch):
                length = len(request.token_ids)
                temperatures = torch.full((length - 1,), request.temperature, dtype=torch.float32, device=self.device)
                logprobs = tempered_logprobs(logits[row, : length - 1], temperatures)
                results.append(logprobs.gather(-1, ids[row, 1:length, None])[:, 0].tolist())
        return results

    def cancel(self) -> None:
        """Make a running :meth:`generate`, and all later calls, raise within a decode step. Any thread may call it."""
        self._cancelled.set()

    def check(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that :meth:`apply` will copy.

        Raises:
            WeightsError: The tensors do not fit; nothing was touched.
        """
        return check(self.model, tensors)

    def apply(self, checked: Mapping[str, Tensor]) -> None:
        """Copy the tensors that :meth:`check` returned into the model."""
        copy_into(self.model, checked)

    def weight(self, name: str) -> bytes:
        """Return one weight as safetensors bytes.

        Raises:
            WeightsError: No weight has this name.
        """
        from safetensors.torch import save

        weights = named_weights(self.model)
        if name not in weights:
            raise WeightsError(
                f"the model has no weight {name!r}; the first of {len(weights)} is {next(iter(weights))!r}"
            )
        data: bytes = save({name: weights[name].detach().cpu().contiguous()})
        return data


def choose_device(device: str) -> str:
    """Return ``cuda`` or ``cpu``; ``auto`` chooses a GPU if one exists.

    Raises:
        ModelError: ``cuda`` is set, but torch sees no GPU.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "model.device is cuda, but torch sees no GPU; set model.device=auto or cpu, or install torch for CUDA"
        )
    return device


def _batches(requests: Sequence[ScoreRequest]) -> list[list[ScoreRequest]]:
    """Split ``requests``, in order, into parts of at most SCORE_TOKENS padded tokens (or of a single request)."""
    parts: list[list[ScoreRequest]] = []
    width = 0
    for request in requests:
        width = max(width, len(request.token_ids))
        if parts and width * (len(parts[-1]) + 1) <= SCORE_TOKENS:
            parts[-1].append(request)
        else:
            parts.append([request])
            width = len(request.token_ids)
    return parts


def auxiliary_generator(name: str, config: ModelConfig, folder: Path, *, num_threads: int) -> TextGenerator:
    """Return a generator of the auxiliary model ``name`` with the weights of its folder.

    Raises:
        ModelError: The model, or its weights, are not available.
    """
    from transformers import AutoModelForCausalLM

    generator = TextGenerator.build(config, folder, num_threads=num_threads)
    try:
        saved = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        generator.apply(generator.check(named_weights(saved)))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"auxiliary model {name!r}: the weights in {folder} cannot be read: {' '.join(str(error).split())}"
        ) from error
    return generator


async def refuse_transfer(spec: dict[str, Any]) -> Mapping[str, Any]:
    """Refuse a transfer: an auxiliary model is never trained."""
    raise WeightsError("an auxiliary engine takes no weights: it serves the weights of its folder")
