"""LoRA adapters on vLLM's base model, for ``model.lora.sync`` ``adapter``.

A weight sync loads one more adapter under its own name, and new requests name it. Running requests continue with the
adapter with which they began. A later sync unloads an adapter that no request uses.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.config import Config, ModelConfig
from trinity_mq.config.model import LoraConfig
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.server.admin_api import Receiver
from trinity_mq.engines.torch.weights import WeightsError
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.client import VllmClient
from trinity_mq.engines.vllm.generator import COMMAND_TIMEOUT, VllmGenerator, version_of
from trinity_mq.messages import Version
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import model_without_weights
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.threads import in_thread

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger(__name__)

TENSORS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter's folder, as peft names them."""
AT_ONCE = (4, 8)
"""Minimum and maximum number of adapters in one batch: vLLM reserves memory for each."""

Layers = dict[str, tuple[int, int]]
"""Numbers of inputs and outputs of each layer with an adapter, by layer name."""


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """Properties of future adapters, derived from the settings."""

    lora: LoraConfig
    room: api.AdapterRoom
    shapes: dict[str, list[int]]
    """Shapes of the adapter's tensors, by tensor name."""


def adapter_plan(config: Config, folder: Path, *, cpu: bool) -> AdapterPlan | None:
    """Return the plan for the model in ``folder``, or None if the sync sends merged weights.

    Raises:
        ModelError: vLLM cannot serve such adapters.
    """
    lora = config.model.lora
    if lora is None or lora.sync != "adapter":
        return None
    if not cpu and config.model.dtype == "float32":
        raise ModelError(
            "model.lora.sync is adapter and model.dtype float32: on a GPU vLLM computes adapters in 16 bits only; set "
            "model.dtype to bfloat16, or model.lora.sync to merged"
        )
    layers = adapted_layers(config.model, lora, folder)
    # one adapter for each allowed staleness from 0, and one for the version being loaded, which the canary uses
    min_adapters, max_adapters = AT_ONCE
    versions = max(min_adapters, min(config.synchronizer.effective_max_staleness + 2, max_adapters))
    return AdapterPlan(lora, api.adapter_room(lora.r, versions, layers), tensor_shapes(layers, lora.r))


def adapted_layers(config: ModelConfig, lora: LoraConfig, folder: Path) -> Layers:
    """Return the layers of the model in ``folder`` that get an adapter from ``lora``, selected by peft's rules.

    Raises:
        ModelError: The folder holds no causal language model, no layer is selected, or vLLM does not support adapters
            on a selected layer.
    """
    import torch
    from torch import nn

    with torch.device("meta"):
        model = model_without_weights(config.model_copy(update={"tiny": None, "model_path": str(folder)}))
    head, targets = model.get_output_embeddings(), lora.target_modules
    linear = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if isinstance(targets, str):
        return linear
    chosen = [name for name, _ in model.named_modules() if any(f".{name}".endswith(f".{target}") for target in targets)]
    if not chosen or not linear.keys() >= set(chosen):
        problem = f"names {next(name for name in chosen if name not in linear)!r}" if chosen else "names no layer"
        raise ModelError(
            f"model.lora.target_modules is {targets}, which {problem}; vLLM serves adapters on linear layers, without "
            f"the output layer. They end in {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}: choose "
            "among these, or set model.lora.sync to merged"
        )
    return {name: linear[name] for name in chosen}


def tensor_shapes(layers: Layers, rank: int) -> dict[str, list[int]]:
    """Return the shapes of an adapter's tensors by the names under which peft saves them."""
    shapes = {}
    for layer, (inputs, outputs) in layers.items():
        shapes[f"base_model.model.{layer}.lora_A.weight"] = [rank, inputs]
        shapes[f"base_model.model.{layer}.lora_B.weight"] = [outputs, rank]
    return shapes


def check(tensors: Mapping[str, Tensor], shapes: Mapping[str, list[int]]) -> None:
    """Compare the received tensors with the shapes from :func:`tensor_shapes`.

    Raises:
        WeightsError: A name is unknown or missing, or a shape differs.
    """
    advice = "; start engine and trainer with the same model.lora"
    if unknown := [name for name in tensors if name not in shapes]:
        similar = difflib.get_close_matches(unknown[0], shapes, n=1) or list(shapes)[:1]
        raise WeightsError(
            f"{len(unknown)} of {len(tensors)} tensors do not belong to the adapter that model.lora describes, first "
            f"{unknown[0]!r}, where {similar[0]!r} is wanted: lora_A and lora_B of the linear layers of "
            f"model.lora.target_modules, none of embeddings or the output layer{advice}"
        )
    if missing := [name for name in shapes if name not in tensors]:
        raise WeightsError(
            f"{len(missing)} of {len(shapes)} tensors of the adapter are missing, first {missing[0]!r}{advice}"
        )
    for name, tensor in tensors.items():
        if list(tensor.shape) != shapes[name]:
            raise WeightsError(
                f"{name!r} has shape {list(tensor.shape)}; with the engine's model.lora.r it is {shapes[name]}{advice}"
            )


def write_folder(folder: Path, tensors: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """Write an adapter as a folder that peft and vLLM can load."""
    from safetensors.torch import save_file

    folder.mkdir()
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": sorted(layers),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1))
    # tensors received in one buffer share it; contiguous copies are saved separately
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS)


def read_tensor(folder: Path, name: str) -> bytes:
    """Return one tensor of an adapter's folder as safetensors bytes; raises WeightsError if no tensor has this name."""
    from safetensors import safe_open
    from safetensors.torch import save

    with safe_open(folder / TENSORS, framework="pt") as file:
        if name not in (names := list(file.keys())):
            raise WeightsError(f"the adapter has no tensor {name!r}; the first of {len(names)} is {names[0]!r}")
        data: bytes = save({name: file.get_tensor(name)})
    return data


@dataclass(eq=False, slots=True)
class Adapter:
    """One version of the policy as an adapter in vLLM."""

    name: str
    folder: Path
    users: int = 0
    """Running requests that use the adapter."""


class VllmAdapters:
    """The adapters that vLLM holds. Each has a folder below ``home``, which vLLM may read again at any time."""

    def __init__(self, client: VllmClient, home: Path, plan: AdapterPlan) -> None:
        self.changed = Notifier()
        """Notified when :attr:`has_room` may have become true."""
        self._client, self._home, self._lora = client, home, plan.lora
        self._most = plan.room.adapters - 1
        self._numbers = itertools.count(1)
        self._held: list[Adapter] = []
        self._current: Adapter | None = None

    @property
    def current(self) -> Adapter:
        """The adapter that answers new requests."""
        assert self._current is not None, "no adapter has been received yet"
        return self._current

    @property
    def has_room(self) -> bool:
        """Whether requests may begin to use the current adapter.

        One of the adapters that fit into a batch is reserved for the canary of the next sync. Without it the canary
        would wait until all requests of an older adapter have ended.
        """
        used = [adapter for adapter in self._held if adapter.users]
        return self._current in used or len(used) < self._most

    @contextlib.contextmanager
    def in_use(self) -> Iterator[str]:
        """Keep the current adapter loaded during the block, and yield its name."""
        adapter = self.current
        adapter.users += 1
        try:
            yield adapter.name
        finally:
            adapter.users -= 1
            if not adapter.users:
                self.changed.notify()

    async def load(self, tensors: Mapping[str, Tensor], version: Version | None) -> Adapter:
        """Load one more adapter into vLLM; the served adapter does not change.

        Raises:
            ApiError: vLLM did not load it.
            OSError: Its folder cannot be written.
        """
        # numbered, because a version may be sent twice to an engine that missed its commit
        name = f"policy-{api.label(version)}-{next(self._numbers)}"
        adapter = Adapter(name, self._home / name)
        try:
            await in_thread(lambda: write_folder(adapter.folder, tensors, self._lora), "write-adapter")
            named = {"lora_name": name, "lora_path": str(adapter.folder)}
            await self._client.command(api.LOAD_ADAPTER, named, COMMAND_TIMEOUT)
        except Exception:
            await self._remove(adapter)
            raise
        self._held.append(adapter)
        return adapter

    async def serve(self, adapter: Adapter) -> None:
        """Answer new requests with ``adapter``, and unload adapters that no request uses any more."""
        self._current = adapter
        unused = [held for held in self._held if held is not adapter and not held.users]
        for held in unused:
            self._held.remove(held)
            await self._remove(held)

    async def _remove(self, adapter: Adapter) -> None:
        try:
            await self._client.command(api.UNLOAD_ADAPTER, {"lora_name": adapter.name}, COMMAND_TIMEOUT)
        except ApiError as error:  # it costs host memory at most, until newer adapters displace it
            log.warning("adapter_not_unloaded", adapter=adapter.name, reason=str(error))
        await in_thread(lambda: shutil.rmtree(adapter.folder, ignore_errors=True), "remove-adapter")


class AdapterGenerator(VllmGenerator):
    """Weight updates by adapters, which this process receives instead of vLLM's workers."""

    def __init__(
        self, adapters: VllmAdapters, plan: AdapterPlan, receiver: Receiver, /, *args: Any, **options: Any
    ) -> None:
        """Create the generator. ``receiver`` returns the tensors of a transfer; the other arguments are for the base
        class.
        """
        super().__init__(*args, **options)
        self._adapters, self._plan, self._receiver = adapters, plan, receiver

    async def receive(self, spec: dict[str, Any]) -> Mapping[str, Any]:
        """Receive the tensors and return them with the spec; raises the channel's error if they did not arrive."""
        return {"spec": spec, "tensors": await self._receiver(spec)}

    async def check(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load the received adapter into vLLM without serving it.

        Raises:
            WeightsError: The tensors are not the adapter that the settings describe.
            ApiError: vLLM did not load it.
            OSError: Its folder cannot be written.
        """
        check(spec["tensors"], self._plan.shapes)
        return {"spec": spec["spec"], "adapter": await self._adapters.load(spec["tensors"], version_of(spec["spec"]))}

    async def apply(self, spec: Mapping[str, Any]) -> None:
        """Answer the canary, and new requests after the commit, with the loaded adapter."""
        self._name_canary(spec["spec"])
        self._adapter = spec["adapter"].name
        await self._adapters.serve(spec["adapter"])

    async def weight(self, name: str) -> bytes:
        """Return a tensor of the served adapter as safetensors bytes; raises WeightsError if the adapter lacks it."""
        folder = self._adapters.current.folder
        return await in_thread(lambda: read_tensor(folder, name), "read-adapter")
