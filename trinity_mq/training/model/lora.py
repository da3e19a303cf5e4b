"""LoRA (arXiv 2106.09685): trains low-rank adapters while the weights of the model stay fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trinity_mq.config.model import LoraConfig, ModelConfig
from trinity_mq.models.model_folder import empty_model
from trinity_mq.runtime.errors import FatalError
from trinity_mq.training.checkpoints.state import LateTensors
from trinity_mq.training.model.weight_files import DeferredWeights
from trinity_mq.training.parallel.sharding import gathered

ADAPTER = "default"
"""Name that ``peft`` gives to an unnamed adapter."""
SIDES = ("lora_A", "lora_B")


class AdapterError(FatalError):
    """The model does not support these adapters; the message says what to change."""


@dataclass(frozen=True)
class BaseWeight:
    """A frozen weight of the model, under its name in the model without adapters."""

    parameter: str
    """Parameter name in the model with adapters."""
    shape: list[int]
    """Shape of the unquantized weight, even where the parameter holds it quantized."""
    layer: str | None
    """Layer whose adapter is added to the weight; None if the weight has no adapter."""


class Adapters:
    """The adapters of a model. Two naming schemes exist: the names of the model without adapters, for weights with the
    adapters merged into them, and the names of a PEFT file (``adapter_model.safetensors``), for the adapters alone.

    Adapters are never merged in place, because rounding would change the frozen weights.
    """

    def __init__(self, model: Any, settings: LoraConfig, base: str | None, seed: int) -> None:
        """Add adapters to ``model``, in float32 and initially without effect, and freeze all other weights.

        Args:
            model: Model on its device.
            settings: Settings of the adapters.
            base: Folder or hub id of the model, for readers of the adapter. None if the model has none.
            seed: Seed of the random ``A``; ``B`` is 0.

        Raises:
            AdapterError: ``peft`` is not installed, or a target layer does not exist or is not linear.
        """
        check_installed(settings)
        import peft
        from peft.tuners.lora import LoraLayer
        from transformers.pytorch_utils import Conv1D

        self.settings, self._model = settings, model
        names = settings.target_modules
        if not isinstance(names, str):
            _check_names(model, names)
        self._config = peft.LoraConfig(
            r=settings.r,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # declared as int, and a factor like any other
            use_rslora=settings.rslora,
            lora_dropout=0.0,  # a policy ratio must be 1 if the weights did not change
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # Conv1D transposes
            target_modules=names if isinstance(names, str) else list(names),
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(self._config, model)
        except ValueError as error:
            raise AdapterError(f"model.lora.target_modules is {names}: {error}") from error
        self.layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        self._check(names)
        adapter_names = set(self.parameters)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in adapter_names)
            if name in adapter_names:
                parameter.data = parameter.data.float()  # bfloat16 would lose the optimizer's small steps
        self._base = dict(self._base_weights(adapter_names))
        self._kept: dict[str, Callable[[], Tensor]] = {}

    def _check(self, targets: str | Sequence[str]) -> None:
        head, embeddings = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        for name, layer in self.layers.items():
            base = layer.get_base_layer()
            if not hasattr(layer, SIDES[0]) or not layer.lora_A or layer is head or layer is embeddings:
                raise AdapterError(
                    f"model.lora.target_modules is {targets}, which names {name} of the class {type(base).__name__}: "
                    "adapters are for linear layers other than the output layer; name others, or take all-linear"
                )

    @property
    def parameters(self) -> list[str]:
        """Names of the adapters' parameters in the model, in the order of the model."""
        return [f"{name}.{side}.{ADAPTER}.weight" for name in self.layers for side in SIDES]

    @property
    def file_names(self) -> dict[str, str]:
        """Name of each parameter in a PEFT file, by its name in the model."""
        return {name: f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}" for name in self.parameters}

    def _base_weights(self, adapter_names: set[str]) -> Iterator[tuple[str, BaseWeight]]:
        for name, parameter in self._model.named_parameters():
            if name in adapter_names:
                continue
            path, _, kind = name.rpartition(".")
            layer = path.removesuffix(".base_layer")
            module = self._model.get_submodule(path)
            shape = [module.out_features, module.in_features] if _is_quantized(parameter) else list(parameter.shape)
            adapted = layer if layer in self.layers and kind == "weight" else None
            yield f"{layer}.{kind}" if layer else kind, BaseWeight(name, shape, adapted)

    def keep_for_merging(self, files: DeferredWeights | None) -> None:
        """Keep the frozen weights for merging before the model is sharded, so that only adapters have to be gathered
        from the other ranks.

        Args:
            files: Files that hold the frozen weights on the meta device, read again when they are merged. Other weights
                are copied to host memory.
        """
        for weight in self._base.values():
            path, _, attribute = weight.parameter.rpartition(".")
            module, parameter = self._model.get_submodule(path), self._model.get_parameter(weight.parameter).detach()
            if files is not None and parameter.is_meta:
                self._kept[weight.parameter] = partial(files.whole, module, attribute, parameter.dtype)
            else:
                self._kept[weight.parameter] = partial(Tensor.detach, parameter.to("cpu", copy=True))

    # -- names and weights

    def state(self) -> dict[str, Tensor]:
        """Return the live adapters by parameter name: the model's content in a checkpoint."""
        return {name: self._model.get_parameter(name).detach() for name in self.parameters}

    def manifest(self) -> dict[str, list[int]]:
        """Return the shape of every tensor for engines, by name: merged weights, or adapters as in a PEFT file."""
        if self.settings.sync == "merged":
            return {name: weight.shape for name, weight in self._base.items()}
        names = self.file_names
        return {names[name]: list(adapter.shape) for name, adapter in self.state().items()}

    def shown(self, name: str, state: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return one tensor of :meth:`manifest`, unsharded. If ``state`` is None and the model is sharded, all ranks
        must call this.

        Args:
            name: Name in the manifest.
            state: Copy of :meth:`state` to use instead of the live adapters. With a copy, any thread may call this.
        """
        if self.settings.sync == "merged":
            return self.merged(name, state)
        return self._adapter({file: parameter for parameter, file in self.file_names.items()}[name], state)

    def _adapter(self, name: str, state: Mapping[str, Tensor] | None) -> Tensor:
        return gathered(self._model.get_parameter(name).detach()) if state is None else state[name]

    @torch.no_grad()
    def merged(self, name: str, state: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the weight ``name`` of the model without adapters, with its adapter merged in: ``W + scale B A``, in
        float32. A weight without an adapter is returned unchanged. Ranks above 0 of a sharded model get only their rows
        of the frozen weight, and discard them. See :meth:`shown`.
        """
        weight = self._base[name]
        base = self._weight(weight.parameter)
        sides = [] if weight.layer is None else [f"{weight.layer}.{side}.{ADAPTER}.weight" for side in SIDES]
        factors = [self._adapter(name, state) for name in sides]
        if isinstance(base, DTensor):  # ranks above 0 only take part in the gathering
            return base.to_local()
        if weight.layer is None:
            return base
        a, b = factors
        change = self.settings.scale * (b.float() @ a.float())
        if self._config.fan_in_fan_out:
            change = change.T
        return base.float() + change.to(base.device)

    def _weight(self, parameter: str) -> Tensor:
        """Return a frozen weight, dequantized if necessary."""
        if self._kept:
            return self._kept[parameter]()
        weight: Tensor = self._model.get_parameter(parameter).detach()
        if _is_quantized(self._model.get_parameter(parameter)):
            from peft.utils.integrations import dequantize_module_weight

            weight = dequantize_module_weight(self._model.get_submodule(parameter.rpartition(".")[0])).detach()
        return weight

    def without(self) -> Any:
        """Return the architecture without adapters and quantization, with weights on the meta device."""
        config = deepcopy(self._model.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = torch.float32
        with torch.device("meta"):
            model = type(self._model)(config)
        model.generation_config = self._model.generation_config
        model._weight_conversions = getattr(self._model, "_weight_conversions", None)  # noqa: SLF001  # of its files
        return model.eval()

    def merged_state(self, state: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Return all weights and persistent buffers of the model without adapters, with adapters merged into the
        weights, in float32. If ``state`` is a :class:`LateTensors`, the result is too.
        """

        def merged(name: str) -> Tensor:
            return self.merged(name, state).float() if name in self._base else self._model.get_buffer(name)

        without = self.without()
        names = {name for name, _ in without.named_buffers()} & self._model.state_dict().keys()
        if isinstance(state, LateTensors):
            shapes = {name: torch.empty(weight.shape, device="meta") for name, weight in self._base.items()}
            return LateTensors(shapes | {name: without.get_buffer(name) for name in names}, merged)
        return {name: merged(name) for name in [*self._base, *names]}

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapters in ``peft`` format to a folder, which is created if missing."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        names = self.file_names
        tensors = {names[name]: self._adapter(name, state).cpu().contiguous() for name in self.parameters}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self._config.save_pretrained(str(folder))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters in the ``with`` block."""
        # peft's own switch also toggles requires_grad of parameters, which sharded parameters do not support
        for layer in self.layers.values():
            layer._disable_adapters = True  # noqa: SLF001
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False  # noqa: SLF001


def _check_names(model: nn.Module, targets: Sequence[str]) -> None:
    """Check that every name matches the end of a layer name: ``peft`` ignores a name without a match if other names
    match.
    """
    layers = dict(model.named_modules())
    for name in targets:
        if not any(layer == name or layer.endswith(f".{name}") for layer in layers):
            linear = {layer.rpartition(".")[2]: None for layer, kind in layers.items() if isinstance(kind, nn.Linear)}
            near = get_close_matches(name, linear, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise AdapterError(
                f"model.lora.target_modules is {targets}: the model has no layer {name!r}; {hint}its linear layers are "
                f"called {', '.join(linear)}"
            )


def check_targets(config: ModelConfig) -> None:
    """Check that the model has the target layers of the adapters. Skip the check if the model is not downloaded yet.
    The weights are not read.

    Raises:
        AdapterError: A target layer does not exist, or cannot have adapters.
    """
    assert config.lora is not None
    model = empty_model(config)
    if model is not None:
        Adapters(model, config.lora, None, 0)


def check_installed(settings: LoraConfig) -> None:
    """Check that the required packages for these adapters are installed.

    Raises:
        AdapterError: A package is missing; the message says what to install.
    """
    if find_spec("peft") is None:
        raise AdapterError(
            "model.lora is set, and peft, which makes the adapters, is not installed: install trinity-mq[lora], or "
            "leave model.lora out to train all weights"
        )
    if settings.quantization and find_spec("bitsandbytes") is None:
        raise AdapterError(
            f"model.lora.quantization is {settings.quantization}, and bitsandbytes is not installed: install "
            "bitsandbytes>=0.49, or leave quantization out"
        )


def loading(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that determine the storage of the weights.

    Weights that the optimizer updates are float32. Frozen weights have the type ``model.dtype`` or are quantized: 4
    bits as NF4 with scales that are quantized too (arXiv 2305.14314), 8 bits as LLM.int8 (arXiv 2208.07339).

    Raises:
        AdapterError: Quantization is configured but not possible here.
    """
    if config.lora is None:
        return {"dtype": torch.float32}
    dtype = getattr(torch, config.dtype)
    if config.lora.quantization is None:
        return {"dtype": dtype}
    check_installed(config.lora)
    if device.type == "cpu":
        raise AdapterError(
            f"model.lora.quantization is {config.lora.quantization}, and the model is on the CPU, where bitsandbytes "
            "has no gradients through quantized weights: use a GPU (model.device=cuda), or leave quantization out"
        )
    from transformers import BitsAndBytesConfig

    how: dict[str, Any] = {"load_in_8bit": True}
    if config.lora.quantization == "4bit":
        how = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        }
    made: Any = BitsAndBytesConfig
    return {"dtype": dtype, "quantization_config": made(**how), "device_map": {"": device}}


def _is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether bitsandbytes holds the parameter in fewer bits."""
    return type(parameter).__name__ in {"Params4bit", "Int8Params"}


def weight_count(parameter: nn.Parameter) -> int:
    """Return the number of weights in a parameter. Packed 4-bit weights count singly."""
    state = getattr(parameter, "quant_state", None)  # of bitsandbytes: a packed byte holds two weights
    return parameter.numel() if state is None else int(state.shape.numel())
