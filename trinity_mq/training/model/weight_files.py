"""Loads a model without memory for its weights. The weights stay in their files, until the model is in its final form,
for example sharded over ranks. Then each rank reads only its own rows of each weight.

``transformers`` itself builds the model, renames the keys of its files, draws the weights that the files lack, computes
the buffers and ties the weights. It is given stand-ins on the meta device instead of the tensors of the files. So the
result has the same bits as a model that was loaded as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trinity_mq.runtime.errors import FatalError
from trinity_mq.training.parallel.sharding import own_rows

META = torch.device("meta")
COMPARED = 2**24
"""Number of elements of two tensors that are compared at a time."""
Place = tuple[int, str]
"""Place of a parameter or buffer in a model: id of its module, and its attribute there."""


class WeightsNotDeferredError(FatalError):
    """The weights of a folder cannot be read after the model was built; the message is the reason."""


@dataclass(frozen=True)
class _Stub:
    """Stand-in for a tensor of a file while ``transformers`` loads the model: it has a shape and no values."""

    shape: list[int]

    def __getitem__(self, rows: Any) -> _Stub:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on the meta device."""
        return torch.empty(self.shape, dtype=dtype, device=META)


@dataclass
class _Conversion:
    """Tensors of the files from which ``transformers`` computes parameters, for example the experts of a layer."""

    rule: Any
    target: str
    """Name of the first of these parameters."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Matching pattern of the rule and key of each tensor, in the order of ``transformers``."""

    def result(self, model: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the parameters by name."""
        rule = deepcopy(self.rule)
        for pattern, key in self.sources:
            rule.add_tensor(self.target, key, pattern, lambda key=key: read(key))
        values = rule.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


class DeferredWeights:
    """The tensors of a model's files, by the places that they have in the model. The files are open until
    :meth:`close`.

    Args:
        paths: Files in safetensors format.
    """

    def __init__(self, paths: list[str]) -> None:
        from safetensors import safe_open

        self._open = ExitStack()
        self._slices: dict[str, Any] = {}
        for path in paths:
            # "pread" reads the requested rows only, and maps no file into memory
            file = self._open.enter_context(safe_open(path, framework="pt", backend="pread"))
            self._slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  # it is not a mapping
        self._model: Any = None
        self._keys: dict[Place, str] = {}
        self._conversions: dict[Place, _Conversion] = {}

    def close(self) -> None:
        """Close the files."""
        self._slices.clear()
        self._open.close()

    def stubs(self) -> dict[str, _Stub]:
        """Return a stand-in for each tensor, by its key in the files."""
        return {key: _Stub(tensor.get_shape()) for key, tensor in self._slices.items()}

    def plan(self, model: Any, rules: list[Any]) -> None:
        """Find the place of each tensor in ``model`` by the rules of ``transformers`` for the keys of files.

        Raises:
            WeightsNotDeferredError: Two tensors have the same place.
        """
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        rule_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        state, conversions = model.state_dict(), dict[str, _Conversion]()
        keys: dict[str, str] = {}
        for key in sorted(self._slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
            if name not in state:
                continue  # transformers reports it
            if pattern is not None:
                conversion = conversions.setdefault(name, _Conversion(rule_of[pattern], name))
                conversion.sources.append((pattern, key))
            elif name in keys:
                raise WeightsNotDeferredError(f"its files have two tensors for {name}: {keys[name]} and {key}")
            else:
                keys[name] = key
        self._model = model
        self._separate(model, keys)
        self._keys = {_place(model, name): key for name, key in keys.items()}
        for conversion in conversions.values():
            shapes = conversion.result(model, lambda key: _Stub(self._slices[key].get_shape()).to())
            self._conversions |= dict.fromkeys((_place(model, name) for name in shapes), conversion)

    def _separate(self, model: Any, keys: dict[str, str]) -> None:
        """Keep tied weights tied if the files hold them once, or twice with equal values, as ``transformers`` does.
        Weights with different values are separated.
        """
        for second, first in list(model.all_tied_weights_keys.items()):
            if second not in keys or first not in keys:
                continue
            if self._equal(keys[first], keys[second]):
                del self._slices[keys.pop(second)]
            else:
                model.all_tied_weights_keys.pop(second)

    def _equal(self, first: str, second: str) -> bool:
        left, right = self._slices[first], self._slices[second]
        shape = left.get_shape()
        if shape != right.get_shape():
            return False
        rows = max(1, COMPARED // max(1, shape[-1] if len(shape) > 1 else 1))
        parts = [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]
        return all(torch.equal(left[part], right[part]) for part in parts)

    @torch.no_grad()
    def fill(self, root: nn.Module, device: torch.device) -> None:
        """Allocate memory on ``device`` for every parameter and buffer of ``root`` on the meta device, and read its
        value. Sharded parameters read their own rows. Tied parameters stay tied.

        Args:
            root: Module that contains modules of the model.
            device: Device of the computation.

        Raises:
            WeightsNotDeferredError: The files lack a value for a parameter or buffer.
        """
        for places, tensor in _allocate(root, device):
            keys = [self._keys[place] for place in places if place in self._keys]
            if keys:
                _copy_rows(tensor, self._slices[keys[0]])
                self._keys |= dict.fromkeys(places, keys[0])
                continue
            value = self._converted(places)
            if value is None:
                raise WeightsNotDeferredError(f"its files have no value for a weight of the shape {list(tensor.shape)}")
            _copy_rows(tensor, value.to(tensor.dtype))

    def _read(self, key: str) -> Tensor:
        tensor: Tensor = self._slices[key][...]
        return tensor

    def _converted(self, places: Iterable[Place]) -> Tensor | None:
        """Return the value of the first of ``places`` that a conversion yields, None if no conversion yields any."""
        for place in places:
            if (conversion := self._conversions.get(place)) is not None:
                values = conversion.result(self._model, self._read)
                return next(value for name, value in values.items() if _place(self._model, name) == place)
        return None

    def whole(self, module: nn.Module, attribute: str, dtype: torch.dtype) -> Tensor:
        """Read the whole tensor of a place in the model again."""
        place = id(module), attribute
        value = self._read(self._keys[place]) if place in self._keys else self._converted([place])
        assert value is not None, "fill() has read it"
        return value.to(dtype)


def _place(model: nn.Module, name: str) -> Place:
    path, _, attribute = name.rpartition(".")
    return id(model.get_submodule(path)), attribute


def _allocate(root: nn.Module, device: torch.device) -> list[tuple[list[Place], Tensor]]:
    """Replace the parameters and buffers on the meta device by empty tensors on ``device``. Return each with its
    places; a tied parameter has several.
    """
    allocated: dict[int, tuple[list[Place], Tensor, Tensor]] = {}
    for module in root.modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:  # noqa: SLF001
            if tensor is None or tensor.device != META:
                continue
            if id(tensor) not in allocated:
                empty = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                allocated[id(tensor)] = [], empty, tensor  # holds the tensor, so that no other gets its id
            places, empty, _ = allocated[id(tensor)]
            setattr(module, attribute, empty)
            places.append((id(module), attribute))
    return [(places, empty) for places, empty, _ in allocated.values()]


def _copy_rows(target: Tensor, source: Any) -> None:
    """Copy a whole tensor, or this rank's rows of it, into ``target``. ``source`` is a tensor or a slice of a file."""
    local, rows = own_rows(target)
    if local.numel():  # with few rows a rank may have none
        local.copy_(source[...] if rows is None else source[rows])


def build(folder: Path, **arguments: Any) -> tuple[Any, DeferredWeights]:
    """Return the causal language model in ``folder``, with its weights on the meta device, and its files. Weights that
    the files lack are drawn from torch's random state, as when the model is loaded as a whole.

    Args:
        folder: Hugging Face folder.
        arguments: Arguments of ``from_pretrained``.

    Raises:
        WeightsNotDeferredError: The weights are quantized or not in safetensors files.
        OSError, ValueError: The folder holds no loadable model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    remote = {"trust_remote_code": arguments.get("trust_remote_code", False)}
    with torch.device(META), torch.random.fork_rng(devices=[]):
        kind = type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **remote), **remote))
    files: list[DeferredWeights] = []

    def load(model: Any, state: Any, paths: list[str] | None, settings: Any, *rest: Any, **more: Any) -> Any:
        if state is not None or settings.hf_quantizer is not None or settings.device_map is not None:
            raise WeightsNotDeferredError("its weights are quantized or placed by a device map")
        if not paths or not all(path.endswith(".safetensors") for path in paths):
            raise WeightsNotDeferredError("its weights are not in safetensors files")
        files.append(DeferredWeights(paths))
        files[0].plan(model, settings.weight_mapping or [])
        return kind._load_pretrained_model(model, files[0].stubs(), None, settings, *rest, **more)  # noqa: SLF001

    # A class of the same name, whose only difference is the source of its tensors.
    deferred = type(
        kind.__name__, (kind,), {"__module__": kind.__module__, "_load_pretrained_model": staticmethod(load)}
    )
    try:
        model: Any = deferred.from_pretrained(folder, **arguments)  # type: ignore[attr-defined]
    except BaseException:
        for opened in files:
            opened.close()
        raise
    model.__class__ = kind
    return model, files[0]


def stand_in(model: Any, device: torch.device) -> Any:
    """Return a small model of the same kind on ``device``, with random weights, for tests of its code. It has a layer
    of each kind and a small vocabulary.
    """
    config = deepcopy(model.config)
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    layers = 1 + max((kinds.index(name) for name in set(kinds)), default=0)
    for settings in {id(config): config, id(text): text}.values():
        settings.pad_token_id = None
    text.num_hidden_layers, text.vocab_size = layers, min(64, text.vocab_size)
    if kinds:
        with suppress(AttributeError):  # some kinds of models derive it from the number of layers
            text.layer_types = kinds[:layers]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        return type(model)(config).float().eval()


@contextmanager
def weights_without_memory(model: nn.Module) -> Iterator[None]:
    """Give the parameters on the meta device a single element of host memory each, with their shape, in the ``with``
    block. It is for code that needs only their shape, data type and a device with memory.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    shapes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is None or parameter.device != META:
                continue
            if id(parameter) not in shapes:
                single = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                shapes[id(parameter)] = nn.Parameter(single, requires_grad=parameter.requires_grad)
            replaced.append((module, attribute, parameter))
    for module, attribute, parameter in replaced:
        setattr(module, attribute, shapes[id(parameter)])
    try:
        yield
    finally:
        for module, attribute, parameter in replaced:
            parameter.requires_grad_(getattr(module, attribute).requires_grad)
            setattr(module, attribute, parameter)
