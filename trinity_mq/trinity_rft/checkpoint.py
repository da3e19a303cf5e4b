"""Converts checkpoints of Trinity-RFT (veRL on FSDP) to Hugging Face folders with the weights of the policy.

A run of Trinity-RFT writes ``global_step_N/actor`` below its checkpoint folder. The weights are in ``huggingface/`` (if
it was asked to export them), in ``model.safetensors`` (written for weight syncs), or in one file per rank, a pickle of
DTensors. Such files are read by torch's restricted unpickler, which executes no code. The classes that describe the
shards are replaced by stand-ins, so that files of other releases of torch are read too.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
)

from trinity_mq.config import ModelConfig
from trinity_mq.errors import CommandError
from trinity_mq.models import ModelError
from trinity_mq.models.model_folder import CONFIG_FILE, model_without_weights, no_progress_bar
from trinity_mq.runtime.process import apply_umask
from trinity_mq.training.checkpoints.state import LateTensors
from trinity_mq.training.model.policy import EXPORT_BYTES, file_placeholders

STEP, ACTOR, HUGGINGFACE, ADAPTER = "global_step_", "actor", "huggingface", "lora_adapter"
LATEST = "latest_checkpointed_iteration.txt"
"""File in the checkpoint folder with the number of the latest complete checkpoint."""
WEIGHTS = "model.safetensors"
DESCRIPTIONS = {".json", ".jinja", ".txt", ".model"}
"""Suffixes of the files of configuration and tokenizer."""
_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_PREFIX = "base_model.model."
MAX_RANKS = 4096


class StoredDTensor(Tensor):
    """Stand-in for a DTensor: its shape, the local shard and how it was placed."""

    _local_tensor: Tensor
    _spec: Any

    @property
    def part(self) -> Tensor:
        """The shard of the rank."""
        return self._local_tensor

    @property
    def placements(self) -> Sequence[StoredPlacement]:
        """The placement on each dimension of the mesh of ranks."""
        return tuple(getattr(self._spec, "placements", ()))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse to compute."""
        raise NotImplementedError(f"{func} of a stored shard")


class StoredPlacement:
    """Stand-in for a placement and for the other descriptions in a file. It has the attributes of the object that it
    stands for.
    """

    dim: int
    """Dimension on which a ``Shard`` divides the tensor."""

    def __new__(cls, dim: Any = None, *_: Any) -> Self:
        """Return a placement. Its ``dim`` is the first argument, or is set later as an attribute."""
        placement = super().__new__(cls)
        if isinstance(dim, int):
            placement.dim = dim
        return placement

    def __init__(self, *_: Any) -> None:
        """Ignore the arguments, which ``__new__`` has used."""


class ShardPlacement(StoredPlacement):
    """Stand-in for ``Shard``: the tensor is divided on ``dim``."""


class ReplicatePlacement(StoredPlacement):
    """Stand-in for ``Replicate``: each rank has the whole tensor."""


_MODULES = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")
_STAND_INS: list[Any] = [
    *((StoredDTensor, f"torch.distributed.{name}.DTensor") for name in ("tensor", "_tensor.api", "tensor._api")),
    *((ShardPlacement, f"{module}.Shard") for module in _MODULES),
    *((ReplicatePlacement, f"{module}.Replicate") for module in _MODULES),
]
_DESCRIPTIONS_MODULE = "torch.distributed."
"""Other names in this package describe shards: :class:`StoredPlacement` stands for each of them."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    source: Path
    """File or folder from which the weights were read."""
    weights: int
    """Number of tensors."""
    parameters: int
    """Number of values in all tensors."""
    adapters: int = 0
    """Number of merged adapters."""


def actor_folder(folder: Path) -> Path:
    """Return the folder of the policy in a checkpoint.

    Args:
        folder: The folder ``actor``, a folder ``global_step_N``, or the checkpoint folder of a run. In the last case
            the checkpoint that the file :data:`LATEST` names is taken. Without this file, the last checkpoint with the
            files of all ranks is taken.

    Raises:
        CommandError: The folder holds no weights.
    """
    if _holds_weights(folder):
        return folder
    if _holds_weights(folder / ACTOR):
        return folder / ACTOR
    steps = {
        int(path.name.removeprefix(STEP)): path
        for path in folder.glob(f"{STEP}*")
        if path.name.removeprefix(STEP).isdecimal() and _holds_weights(path / ACTOR)
    }
    try:
        latest = int((folder / LATEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        complete = [step for step, path in steps.items() if _has_all_ranks(path / ACTOR)]
        latest = max(complete or steps, default=-1)
    if latest in steps:
        return steps[latest] / ACTOR
    if (folder / ACTOR / "dist_ckpt").is_dir() or (folder / "dist_ckpt").is_dir():
        raise CommandError(
            f"{folder} is a checkpoint of Megatron, wanted one of FSDP; write its Hugging Face folder with Trinity-RFT "
            f"(`trinity convert --checkpoint-dir {folder}`), then give model.model_path this folder, actor/huggingface"
        )
    raise CommandError(
        f"{folder} has no weights of Trinity-RFT; wanted the checkpoint folder of a run, a folder {STEP}N or its "
        f"folder {ACTOR}, with {WEIGHTS}, {HUGGINGFACE}/ or model_world_size_*_rank_*.pt"
    )


def _holds_weights(folder: Path) -> bool:
    return bool(_rank_matches(folder)) or any(map(_holds_safetensors, (folder, folder / HUGGINGFACE)))


def _holds_safetensors(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (WEIGHTS, f"{WEIGHTS}.index.json"))


def _has_all_ranks(folder: Path) -> bool:
    """Return False if files of ranks are missing, as in a checkpoint of a run that was killed while it saved."""
    try:
        _rank_files(folder)
    except CommandError:
        return False
    return True


def _rank_matches(folder: Path) -> list[re.Match[str]]:
    """Return the matched names of the files of the ranks."""
    names = (path.name for path in folder.glob("model_world_size_*_rank_*.pt"))
    return [match for name in names if (match := _RANK_FILE.fullmatch(name))]


def _rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of the ranks by rank; empty without such files.

    Raises:
        CommandError: The files belong to two runs with different numbers of ranks, or a rank has no file.
    """
    matches = _rank_matches(folder)
    if not matches:
        return {}
    worlds = {int(match[1]) for match in matches}
    if len(worlds) > 1 or not 0 < (world := min(worlds)) <= MAX_RANKS:
        raise CommandError(f"{folder} has files of {sorted(worlds)} ranks, wanted those of one run")
    ranks = {int(match[2]): folder / match[0] for match in matches}
    if lacking := [rank for rank in range(world) if rank not in ranks]:
        raise CommandError(f"{folder} lacks the files of {len(lacking)} of {world} ranks, first of rank {lacking[0]}")
    return ranks


def convert_checkpoint(folder: Path, out: Path, model: Path | None = None) -> Converted:
    """Write the weights of a checkpoint, its ``config.json`` and its tokenizer into a Hugging Face folder.

    Adapters (LoRA) are merged into the weights. The tensors keep their dtypes; they are read while they are written.

    Args:
        folder: A folder that :func:`actor_folder` accepts.
        out: New folder.
        model: Hugging Face folder with configuration and tokenizer, if the checkpoint has none.

    Raises:
        CommandError: The checkpoint cannot be read, does not fit the model, or the folder cannot be written.
    """
    if out.exists():
        raise CommandError(f"--out {str(out)!r} exists and is not overwritten; give a new folder")
    actor = actor_folder(folder)
    described = model or (actor if (actor / CONFIG_FILE).is_file() else actor / HUGGINGFACE)
    if not (described / CONFIG_FILE).is_file():
        raise CommandError(
            f"{described} has no {CONFIG_FILE}; give the folder of the model from which the run started: --model FOLDER"
        )
    source, stored = _stored_weights(actor)
    weights, adapters = _without_adapters(stored, actor / ADAPTER)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _write(weights, described, part)
        part.rename(out)
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    parameters = sum(math.prod(shape.shape) for shape in weights.shapes.values())
    return Converted(source, len(weights), parameters, adapters)


def _stored_weights(actor: Path) -> tuple[Path, LateTensors]:
    """Return the file or folder of the weights, and the weights. Files of ranks are preferred, because names in them
    show adapters.
    """
    if ranks := _rank_files(actor):
        return actor, _of_ranks([ranks[rank] for rank in range(len(ranks))])
    place = actor if _holds_safetensors(actor) else actor / HUGGINGFACE
    return place, _of_safetensors(sorted(place.glob("model*.safetensors")))


def _of_safetensors(paths: Sequence[Path]) -> LateTensors:
    try:
        files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # no mapping
        shapes = {name: _without_values(file, name) for name, file in places.items()}
    except (SafetensorError, OSError, KeyError) as error:
        raise CommandError(f"{paths[0].parent} cannot be read: {error}") from error
    return LateTensors(shapes, lambda name: places[name].get_tensor(name))


def _without_values(file: Any, name: str) -> Tensor:
    """Return a tensor on the meta device with the shape and dtype of a tensor in a safetensors file."""
    part = file.get_slice(name)
    shape = part.get_shape()
    values: Tensor = part[0:0] if shape else file.get_tensor(name)
    return torch.empty(shape, dtype=values.dtype, device="meta")


@contextmanager
def _stand_ins(path: Path) -> Iterator[None]:
    """Let torch's restricted unpickler use the stand-ins for the names in a file, and nothing that the process allowed
    before.

    Raises:
        CommandError: The file refers to another name.
    """
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(_STAND_INS)
    try:
        for name in get_unsafe_globals_in_checkpoint(path):
            if not name.startswith(_DESCRIPTIONS_MODULE):
                raise CommandError(f"{path} refers to {name[:100]}, which weights do not need; no code was executed")
            add_safe_globals([(StoredPlacement, name)])
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _of_ranks(paths: Sequence[Path]) -> LateTensors:
    """Return the whole tensors of a model, joined from the parts that the ranks have stored."""
    ranks: list[Mapping[str, Any]] = []
    for path in paths:
        try:
            with _stand_ins(path):
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except CommandError:
            raise
        except Exception as error:  # hostile bytes: the unpickler raises errors of many classes
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise CommandError(f"{path} is damaged or no file of weights ({reason}); no code was executed") from error
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            raise CommandError(f"{path} holds no weights by name")
        if ranks and state.keys() != ranks[0].keys():
            raise CommandError(f"{path} has other weights than {paths[0]}")
        ranks.append(state)
    parts = {name: _parts(name, [state[name] for state in ranks]) for name in ranks[0]}
    shapes = {
        name: torch.empty(ranks[0][name].shape, dtype=tensors[0].dtype, device="meta")
        for name, (tensors, _) in parts.items()
    }
    return LateTensors(shapes, lambda name: torch.cat(list(parts[name][0]), parts[name][1]))


def _parts(name: str, values: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
    """Return the parts that make a tensor and the dimension on which they are joined.

    With several copies of the model (HSDP), the ranks of the first copy come first.
    """
    first = values[0]
    if not isinstance(first, StoredDTensor):
        return [_stored(name, first)], 0
    try:
        shards = [_stored(name, value.part) for value in values if isinstance(value, StoredDTensor)]
        dims = [
            range(first.dim())[placement.dim] for placement in first.placements if isinstance(placement, ShardPlacement)
        ]
    except (AttributeError, TypeError, LookupError) as error:
        raise CommandError(f"{name} has no shard, or is divided on a dimension that it does not have") from error
    copies = [placement for placement in first.placements if isinstance(placement, ReplicatePlacement)]
    if len(shards) != len(values) or len(dims) + len(copies) != len(first.placements):
        raise CommandError(f"{name} is divided in a form that this command does not read")
    if not dims:
        return shards[:1], 0
    if len(dims) > 1:
        raise CommandError(f"{name} is divided on dimensions {dims} (tensor parallelism), wanted one")
    dim, parts, length = dims[0], list[Tensor](), 0
    for part in shards:
        if length >= first.shape[dim] and parts:
            break
        if part.dtype != first.dtype or [*part.shape[:dim], *part.shape[dim + 1 :]] != [
            *first.shape[:dim],
            *first.shape[dim + 1 :],
        ]:
            raise CommandError(f"{name} has shape {tuple(first.shape)}, and a part of it {tuple(part.shape)}")
        parts.append(part)
        length += part.shape[dim]
    if length != first.shape[dim]:
        raise CommandError(f"{name} has shape {tuple(first.shape)}, and its parts have {length} on dimension {dim}")
    return parts, dim


def _stored(name: str, part: Any) -> Tensor:
    """Return a tensor if its file has all of its values. A small file may describe a tensor that repeats a value, which
    would fill the disk.
    """
    is_plain = isinstance(part, Tensor) and part.device.type == "cpu" and part.layout == torch.strided
    if not is_plain or part.numel() * part.element_size() > part.untyped_storage().nbytes():
        raise CommandError(f"{name} is not stored with all of its values, wanted a plain tensor")
    return part  # type: ignore[no-any-return]


def _without_adapters(stored: LateTensors, folder: Path) -> tuple[LateTensors, int]:
    """Return weights with the adapters merged into them, and the number of adapters."""
    names = {name.removeprefix(_PREFIX).replace(".base_layer.", "."): name for name in stored}
    adapters: dict[str, dict[str, str]] = {}
    for name in list(names):
        if match := _LORA.fullmatch(name):
            adapters.setdefault(f"{match[1]}.weight", {})[match[2]] = names.pop(name)
    shapes = {new: stored.shapes[old] for new, old in names.items()}
    if not adapters:
        if (folder / "adapter_config.json").is_file():
            raise CommandError(
                f"{folder} has adapters, and the weights next to it have none, so they may be merged or not; convert a "
                "full checkpoint of the run (trainer.save_interval), which has model_world_size_*_rank_*.pt"
            )
        return LateTensors(shapes, lambda name: stored[names[name]]), 0
    if broken := [name for name, sides in adapters.items() if set(sides) != {"A", "B"} or name not in names]:
        raise CommandError(f"the adapter of {broken[0]} is not complete")
    scale = _adapter_scale(folder / "adapter_config.json")
    for name, sides in adapters.items():
        low, high, shape = (stored.shapes[part].shape for part in (sides["A"], sides["B"], names[name]))
        if len(low) != 2 or len(high) != 2 or (low[0], high[0], low[1]) != (high[1], *shape):
            raise CommandError(f"the adapter of {name} has shapes {[*low]} and {[*high]}, and the weight {[*shape]}")

    def read(name: str) -> Tensor:
        weight = stored[names[name]]
        if name not in adapters:
            return weight
        low, high = (stored[adapters[name][side]].float() for side in "AB")
        return (weight.float() + scale * (high @ low)).to(weight.dtype)

    return LateTensors(shapes, read), len(adapters)


def _adapter_scale(path: Path) -> float:
    """Return the factor of ``B A`` that ``peft`` uses: alpha over r, or over the square root of r for rsLoRA."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        special = [key for key in ("rank_pattern", "alpha_pattern", "use_dora", "fan_in_fan_out") if settings.get(key)]
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommandError(f"the weights have adapters, and {path} cannot be read: {error}") from error
    if special or rank < 1 or not math.isfinite(alpha):
        wrong = ", ".join(special) or f"r to {rank} and lora_alpha to {alpha}"
        raise CommandError(f"{path} sets {wrong}, which this command does not merge")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _write(weights: LateTensors, described: Path, out: Path) -> None:
    """Write the folder and check that the model takes each weight.

    Raises:
        CommandError: A weight is missing, has another shape, or is not part of the model.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    out.mkdir(parents=True)
    for path in described.iterdir():
        if path.is_file() and path.suffix in DESCRIPTIONS and not path.name.startswith("model."):
            shutil.copyfile(path, out / path.name)
    try:
        with torch.device("meta"):
            model = model_without_weights(ModelConfig(model_path=str(out)))
    except ModelError as error:
        raise CommandError(str(error)) from error
    expected = model.state_dict().keys()
    with no_progress_bar():
        if set(weights) <= set(expected):
            model.save_pretrained(out, state_dict=file_placeholders(model, weights), max_shard_size=EXPORT_BYTES)
            shutil.copyfile(described / CONFIG_FILE, out / CONFIG_FILE)
        else:  # names of an earlier release of transformers, which this release translates when it loads them
            save_torch_state_dict(dict(weights), out, max_shard_size=EXPORT_BYTES)
        # no device_map: it needs the package accelerate
        checks = {"dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True}
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # its report of several lines is one line below
        try:
            _, loaded = AutoModelForCausalLM.from_pretrained(out, **checks)
        finally:
            logging.set_verbosity(level)
    apply_umask(out)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loaded[kind])):
            words = kind.removesuffix("_keys")
            raise CommandError(
                f"the weights do not fit the model of {described / CONFIG_FILE}: {len(names)} are {words}, first "
                f"{names[0]}"
            )
