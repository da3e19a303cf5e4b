"""The policy as a torch model: loading, logprobs at chosen positions, saving. Use a policy from one thread only, except
where a method allows any thread.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trinity_mq.algorithms.scoring import HeadOperation, Scores, entropy_baselines, head_scores, token_logprobs
from trinity_mq.config.agents import TrainerConfig
from trinity_mq.config.model import ModelConfig
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import CHAT_TEMPLATE_FILE, configured_template
from trinity_mq.models.routers import Routers, RouterShape
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.process import apply_umask
from trinity_mq.sync.channels.buckets import total_digest
from trinity_mq.training.checkpoints.state import LateTensors, module_state
from trinity_mq.training.model.attention import Packing, model_inputs, use_packed_attention
from trinity_mq.training.model.lora import Adapters, loading
from trinity_mq.training.model.shared_prefixes import prefix_problem
from trinity_mq.training.model.weight_files import (
    DeferredWeights,
    WeightsNotDeferredError,
    build,
    stand_in,
    weights_without_memory,
)
from trinity_mq.training.packing import DivisionSettings, MicroBatch
from trinity_mq.training.parallel.ranks import Ranks, own_device, ranks_on_machine
from trinity_mq.training.parallel.sharding import blocks, shard

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
"""Tokenizer files are copied unchanged, because loading and saving a tokenizer may alter it."""

EXPORT_BYTES = "1GB"
"""Maximum size of a weight file of a model whose weights are gathered while they are written."""
DEFERRING_ERRORS = (
    *(
        WeightsNotDeferredError,
        SafetensorError,
        ImportError,
        AttributeError,
        TypeError,
        ValueError,
        KeyError,
        IndexError,
    ),
    *(OSError, RuntimeError, AssertionError),
)
"""Errors after which the model is loaded as a whole. Its code may not expect a model without weights; for other faults
this loading gives a clearer error."""

log = structlog.get_logger(__name__)


class LearnerError(FatalError):
    """The learner cannot do the requested work; the message says what to change."""


class ModelNotLoadedError(LearnerError):
    """No model could be loaded from a folder."""


class Policy:
    """A causal language model with float32 weights.

    With ``dtype: bfloat16`` it computes in bfloat16 (autocast) and exports its weights in bfloat16. The weights that
    the optimizer updates stay float32, because a step of 1e-6 is lost in a bfloat16 weight. With adapters, only the
    adapters are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        seed: int,
        trainer: TrainerConfig | None = None,
        ranks: Ranks | None = None,
        *,
        shards: bool = True,
    ) -> None:
        """Load the model in ``folder``. With several ranks the weights are read after the model was built and sharded,
        so that no process holds the whole model; on a single GPU after the model was built, directly into its memory.
        Where this is impossible the model is loaded as a whole before.

        Args:
            config: Configuration of the model.
            folder: Hugging Face folder of the model.
            seed: Seed for weights that the folder lacks, and for new adapters.
            trainer: Decides whether rows are packed, prefixes shared and activations kept. None: padded rows of whole
                sequences; activations are kept on a CPU only.
            ranks: Ranks over which the model is sharded; None: the model is not sharded.
            shards: Whether to shard the model. False: the caller shards a module around it, see :meth:`shard`.

        Raises:
            ModelNotLoadedError: The folder holds no loadable model.
            LearnerError: The device does not exist, or the model does not support the ``trainer`` settings.
        """
        self.ranks = ranks or Ranks()
        self._chat_template = configured_template(config)
        self.device = select_device(config.device, self.ranks.world)
        self._dtype = getattr(torch, config.dtype)
        self._files: DeferredWeights | None = None
        self.model, probe = self._load(config, folder, seed)
        self.adapters: Adapters | None = None
        """Adapters that are trained instead of the weights; None if all weights are trained."""
        if config.lora is not None:
            with weights_without_memory(self.model):
                self.adapters = Adapters(self.model, config.lora, config.model_path, seed)
        try:
            self._scorer = TokenScorer(self.model, probe=probe)
        except ValueError as error:
            raise LearnerError(f"the model in {folder} cannot be trained: {error}") from error
        try:
            self._routers = Routers(self.model) if config.router_replay else None
        except ModelError as error:
            raise LearnerError(str(error)) from error
        if self._scorer.after is None:
            log.info("logits_not_chunked", model=type(self.model).__name__, reason="unknown operation after its head")
        trainer = trainer or TrainerConfig(packing="padded", share_prefixes=False)
        self.recomputes = self._use_checkpointing(trainer)
        """Whether the backward pass recomputes blocks."""
        self.packs = self._use_packing(trainer.packing, probe)
        """Whether the micro-batches of the policy are packed rows."""
        self.division = DivisionSettings(
            trainer.first_max_tokens,
            packed=self.packs,
            shares_prefixes=self._can_share_prefixes(trainer),
            rank=self.ranks.rank,
            ranks=self.ranks.world,
            hidden_size=int(self.model.config.get_text_config().hidden_size),
        )
        if shards:
            self.shard(self._scorer)

    def _load(self, config: ModelConfig, folder: Path, seed: int) -> tuple[Any, Any]:
        """Return the model, and a model of the same kind that can compute already: the model itself, or a small
        stand-in.
        """
        from transformers import AutoModelForCausalLM

        arguments = loading(config, self.device) | {"trust_remote_code": config.trust_remote_code}
        if (self.ranks.world > 1 or self.device.type == "cuda") and "device_map" not in arguments:
            torch.manual_seed(seed)
            try:
                model, self._files = build(folder, **arguments)
                if self.ranks.world > 1:
                    return model, stand_in(model, self.device)
                self._files.fill(model, self.device)
                return model.to(self.device).eval(), model
            except DEFERRING_ERRORS as error:
                self._close_files()
                log.info("model_loaded_whole", folder=str(folder), reason=f"{type(error).__name__}: {error}")
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelNotLoadedError(
                f"no causal language model could be loaded from {folder}: {error}; it must be a Hugging Face folder "
                "with config.json and safetensors weights"
            ) from error
        # eval() turns dropout off, so that policy ratios of unchanged weights are 1. Gradients are still computed.
        model = model.eval() if "device_map" in arguments else model.to(self.device).eval()
        return model, model

    def _close_files(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def shard(self, root: nn.Module, heads: Sequence[nn.Module] = ()) -> None:
        """Shard ``root``, which contains the blocks of the model, over the ranks, and read its weights. A single rank
        shards nothing. Close the weight files unless they are needed for merging adapters.

        Args:
            root: Module that computes.
            heads: Modules in ``root`` to shard on their own, which compute in float32.
        """
        if self.ranks.world > 1:
            if self.adapters is not None and not self.ranks.rank:
                self.adapters.keep_for_merging(self._files)
            for head in heads:
                shard(head, (), self.device, self.ranks.world, torch.float32)
            shard(root, blocks(self.model), self.device, self.ranks.world, self._dtype)
            if self._files is not None:
                self._files.fill(root, self.device)
        if self.adapters is None or self.ranks.rank or self.ranks.world == 1:
            self._close_files()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, tied parameters once."""
        return list(self.model.parameters())

    @property
    def routed(self) -> RouterShape | None:
        """Shape of the routers if tokens pass through the experts that the engine chose for them, else None."""
        return None if self._routers is None else self._routers.shape

    def _use_packing(self, packing: Packing, probe: Any) -> bool:
        """Prepare the model for packed rows if they are requested, and return whether it supports them.

        Raises:
            LearnerError: ``packing`` is ``packed``, and the model does not support packed rows.
        """
        if packing == "padded":
            return False
        problem = use_packed_attention(self.model, packing, self._dtype, probe)
        kind = self.model.config.model_type
        if problem is not None and packing == "packed":
            raise LearnerError(
                f"trainer.packing is packed, but sequences of a {kind} model cannot be packed into one row: {problem}; "
                "use trainer.packing=auto or padded"
            )
        if problem is not None:
            log.info("rows_are_padded", model=kind, reason=problem)
        return problem is None

    def _use_checkpointing(self, trainer: TrainerConfig) -> bool:
        """Checkpoint the blocks if the settings ask for it, and return whether the blocks are checkpointed. ``auto``
        accepts a model without such blocks.
        """
        if not trainer.recomputes(self.device.type):
            return False
        if trainer.gradient_checkpointing == "auto" and not can_checkpoint(self.model):
            log.info("activations_kept", model=type(self.model).__name__, reason="no gradient checkpointing")
            return False
        checkpoint_blocks(self.model)
        return True

    def limit_passes(self, max_tokens: int) -> None:
        """Set the maximum number of tokens in a pass, padding included."""
        self.division = replace(self.division, max_tokens=max_tokens)

    def _can_share_prefixes(self, trainer: TrainerConfig) -> bool:
        """Return whether rows may share prefixes. If sharing is requested but the model does not support it, log the
        reason.
        """
        if not trainer.share_prefixes or self.packs or self.ranks.world > 1 or self.recomputes:
            return False
        if self._routers is not None:  # experts are prescribed for whole sequences
            return False
        with self._autocast():
            problem = prefix_problem(self.model, self._dtype)
        if problem is not None:
            log.info("prefixes_not_shared", model=self.model.config.model_type, reason=problem)
        return problem is None

    def _autocast(self) -> torch.autocast:
        """Return the autocast context of the model's computation."""
        return torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32)

    def score(self, batch: MicroBatch, *, entropy_gradient: bool, with_baseline: bool = False) -> Scores:
        """Return the scores of the batch's trained tokens at their temperatures, float32 ``[tokens]`` each."""
        if self._routers is not None:
            self._routers.prescribe(batch.experts)
        with self._autocast():
            scores: Scores = self._scorer(
                model_inputs(self.model, batch),
                (batch.rows, batch.columns),
                batch.targets,
                batch.temperature,
                entropy_gradient=entropy_gradient,
                with_baseline=with_baseline,
            )
        return scores

    @torch.no_grad()
    def sequence_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprob of each token after the first, at temperature 1, under the current weights."""
        if len(tokens) < 2:
            raise ValueError(f"got {len(tokens)} tokens, wanted at least 2: the first one has no logprob")
        ids = torch.tensor([list(tokens)], device=self.device)
        columns = torch.arange(len(tokens) - 1, device=self.device)
        places, heat = (torch.zeros_like(columns), columns), torch.ones(len(columns), device=self.device)
        if self._routers is not None:
            self._routers.prescribe(None)
        with self._autocast():
            scores = self._scorer({"input_ids": ids[:, :-1]}, places, ids[0, 1:], heat, entropy_gradient=False)
        logprobs: list[float] = scores.logprob.tolist()
        return logprobs

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors for a checkpoint: all weights, or only the adapters if the model has adapters."""
        return module_state(self.model) if self.adapters is None else self.adapters.state()

    def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return ``(name, dtype, shape)`` of each tensor of :meth:`weights`, in the same order."""
        name_of = str(self._dtype).removeprefix("torch.")
        if self.adapters is not None:
            return [(name, name_of, shape) for name, shape in self.adapters.manifest().items()]
        return [(name, name_of, list(tensor.shape)) for name, tensor in self.model.named_parameters()]

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return the tensors for engines, by name in module order, tied weights once. Without adapters they are the
        parameters, live if the dtype allows. With adapters they are the merged weights, or the adapters.
        """
        return [(name, self.weight(name)) for name, _, _ in self.manifest()]

    def weight(self, name: str) -> Tensor:
        """Return one tensor of :meth:`weights`."""
        if self.adapters is not None:
            return self.adapters.shown(name).to(self._dtype)
        weight: Tensor = self.model.get_parameter(name).detach().to(self._dtype)
        return weight

    def digest(self, state: Mapping[str, Tensor]) -> str:
        """Return the checksum of :meth:`weights` from a copy of :meth:`state`, the same as in a weight sync."""

        def shown(name: str) -> Tensor:
            return state[name] if self.adapters is None else self.adapters.shown(name, state)

        return total_digest(shown(name).to(self._dtype) for name, _, _ in self.manifest())

    def save(self, folder: Path, tokenizer: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a Hugging Face folder with float32 weights, the tokenizer files of the folder ``tokenizer`` and the
        chat template of the configuration, if it sets a template. Adapters are merged into the weights, and also
        written to ``adapter/`` in ``peft`` format.

        Args:
            folder: Target folder, created if missing.
            tokenizer: Hugging Face folder of the tokenizer.
            state: Copy of :meth:`state` to write instead of the live state. With a copy, any thread may call this.
                Late tensors are read while they are written, to several files of :data:`EXPORT_BYTES` if necessary.
        """
        model, weights = self.model, state
        if self.adapters is not None:
            model, weights = self.adapters.without(), self.adapters.merged_state(state)
            self.adapters.save(folder / "adapter", state)
        if isinstance(weights, LateTensors):
            model.save_pretrained(folder, state_dict=file_placeholders(model, weights), max_shard_size=EXPORT_BYTES)
        else:
            model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        for pattern in TOKENIZER_FILES:
            for source in tokenizer.glob(pattern):
                if source.is_file():
                    shutil.copyfile(source, folder / source.name)
        if self._chat_template is not None:
            (folder / CHAT_TEMPLATE_FILE).write_text(self._chat_template, encoding="utf-8")
        apply_umask(folder)


def file_placeholders(model: Any, weights: LateTensors) -> dict[str, Tensor]:
    """Return placeholders of ``weights`` for ``save_pretrained``, which reads the values of one file at a time. If
    ``save_pretrained`` has to compute weights of the file format from several weights of the model, return all values.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the model was not loaded, and is written with the rules of its class
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not any(isinstance(rule, WeightConverter) for rule in conversions):
        return weights.placeholders()
    log.info("model_written_whole", model=type(model).__name__, reason="its files have other weights than the model")
    return dict(weights)


def select_device(requested: Literal["auto", "cpu", "cuda"], world: int = 1) -> torch.device:
    """Return the device to compute on. With several ranks it is the GPU of this rank, otherwise the current GPU.

    Args:
        requested: ``model.device``.
        world: Number of ranks of this process's trainer.

    Raises:
        LearnerError: The device is not available, or this machine has more ranks than visible GPUs.
    """
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise LearnerError("model.device is cuda, but torch sees no CUDA device here; use model.device=auto or cpu")
    if not available or requested == "cpu":
        return torch.device("cpu")
    if world > 1 and (count := torch.cuda.device_count()) < (wanted := ranks_on_machine(world)):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise LearnerError(
            f"{wanted} ranks of the trainer on this machine see {count} GPUs (CUDA_VISIBLE_DEVICES is {visible}), "
            f"wanted {wanted}, because each rank needs its own: make {wanted} GPUs visible, set trainer.nproc to the "
            "number of GPUs, or use model.device=cpu"
        )
    return torch.device("cuda", own_device(torch.cuda.current_device()))


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep only the inputs of each block for the backward pass, which recomputes the rest.

    The switch of ``transformers`` works only in training mode, which would turn dropout on.

    Raises:
        LearnerError: The model has no blocks that support gradient checkpointing.
    """
    blocks = _checkpointed_layers(model)
    if not blocks:
        raise LearnerError(
            f"trainer.gradient_checkpointing is on, but {type(model).__name__} has no block of the class "
            "transformers.modeling_layers.GradientCheckpointingLayer; use trainer.gradient_checkpointing=false"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def can_checkpoint(model: nn.Module) -> bool:
    """Return whether a model has blocks that support gradient checkpointing."""
    return bool(_checkpointed_layers(model))


def _checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


class TokenScorer(nn.Module):
    """Computes logprobs and entropies of chosen tokens, from the hidden states at the input of the model's head.

    The head itself is called with zero tokens, unless the operation after the head is unknown. Its weight is read in
    this module's forward pass, and every tensor with a gradient leaves through this module's outputs. So this module
    must be the root for sharding (``torch.distributed.fsdp.fully_shard``): the weight is then unsharded in this forward
    pass, and again when the backward pass recomputes the logits. Adapters must be added to the model before this module
    wraps it.
    """

    def __init__(self, model: Any, after: HeadOperation | None = None, probe: Any = None) -> None:
        """Find out what the model does after its head.

        Args:
            model: Model to score with.
            after: Operation after the head. None: find out by a test run.
            probe: Model of the same kind that has its weights, for the test run. None: ``model`` has them.

        Raises:
            ValueError: The model has no head.
        """
        super().__init__()
        self.model = model
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings to take logits from")
        self._places: tuple[Tensor, Tensor] | None = None
        self._hidden: Tensor | None = None
        self.after = after or detect_head_operation(model if probe is None else probe)
        """Operation after the head. None: the operation is unknown, so the model computes the logits of all chosen
        tokens at once.
        """
        head.register_forward_pre_hook(self._take)

    def _take(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Keep only the hidden states of the chosen tokens, because logits of all tokens would be the largest tensor of
        the pass.
        """
        if self._places is None:
            return None
        self._hidden = arguments[0][self._places]
        return (self._hidden if self.after is None else self._hidden[:0],)

    def forward(
        self,
        inputs: dict[str, Any],
        places: tuple[Tensor, Tensor],
        targets: Tensor,
        temperature: Tensor,
        *,
        entropy_gradient: bool,
        with_baseline: bool = False,
    ) -> Scores:
        """Return the scores of the tokens; see :func:`trinity_mq.algorithms.scoring.head_scores`.

        Args:
            inputs: Arguments for the model.
            places: Row and position in ``input_ids`` that predict each token, both int64 ``[tokens]``.
            targets: Token ids, int64 ``[tokens]``.
            temperature: Sampling temperatures, float32 ``[tokens]``.
            entropy_gradient: Whether the entropies have a gradient.
            with_baseline: Whether to return the entropy baselines.
        """
        self._places = places
        try:
            logits: Tensor = self.model(**inputs, use_cache=False).logits
            hidden = self._hidden
        finally:
            self._places = self._hidden = None
        if self.after is not None:
            assert hidden is not None
            return head_scores(
                hidden,
                self.model.get_output_embeddings(),
                targets,
                temperature,
                self.after,
                entropy_gradient=entropy_gradient,
                with_baseline=with_baseline,
            )
        columns = token_logprobs(logits, targets, temperature, entropy_gradient=entropy_gradient)
        return Scores(*columns, entropy_baselines(logits, temperature) if with_baseline else None)


@torch.no_grad()
def detect_head_operation(model: Any) -> HeadOperation | None:
    """Return the operation that a model applies to the output of its head, or None if the operation is unknown.

    The settings of Gemma (``final_logit_softcapping``), Cohere (``logit_scale``) and Granite (``logits_scaling``) come
    from the configuration. Then a test run checks them: the model runs on four tokens with random numbers instead of
    the head's output, and its logits are compared with the result of the operation on these numbers.
    """
    settings = model.config.get_text_config()
    factor, divisor = (getattr(settings, name, None) for name in ("logit_scale", "logits_scaling"))
    scale = (factor if isinstance(factor, int | float) else 1.0) / (divisor or 1.0)
    after = HeadOperation(scale, getattr(settings, "final_logit_softcapping", None) or None)
    products: list[Tensor] = []

    def replace(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        products.append((20 * torch.randn(output.shape, generator=generator)).to(output))
        return products[-1]

    handle = model.get_output_embeddings().register_forward_hook(replace)
    try:
        logits = model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).logits
    finally:
        handle.remove()
    is_known = logits.shape == products[0].shape and torch.allclose(
        after(products[0].float()), logits.float(), rtol=1e-5
    )
    return after if is_known else None
