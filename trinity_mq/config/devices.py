"""The section that names the GPUs of trainer processes and engines, and its checks against the other sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from trinity_mq.config.agents import ExplorerConfig, RolloutModelConfig, TrainerConfig
from trinity_mq.config.base import Section
from trinity_mq.config.engines import AuxiliaryModelConfig, engine_row

Device = Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^(GPU|MIG)-[A-Za-z0-9/-]+$")]
"""Index of a GPU, or UUID of a GPU or MIG slice."""
Devices = tuple[Device, ...]


class DevicesConfig(Section):
    """Placement on the GPUs of a machine. By default it is automatic: trainer processes and engines use separate GPUs,
    and share the GPU where there is only one; ``trinity-mq plan`` shows it. A GPU is named by its index among the GPUs
    that ``CUDA_VISIBLE_DEVICES`` of the starting process leaves visible, counted in the order of ``nvidia-smi``, or by
    the UUID of a GPU or of a MIG slice. The same GPU may be named several times to share it.
    """

    trainer: Devices = ()
    """The GPU of each trainer process, such as ``[0, 1]`` for ``trainer.nproc: 2``. Empty: automatic."""
    engines: tuple[Devices, ...] = ()
    """For each engine its list of GPUs, ``explorer.rollout_model.tensor_parallel_size`` in number, such as ``[[2],
    [3]]``. It applies to every machine that hosts engines of the run. Empty: automatic."""
    auxiliary: dict[str, tuple[Devices, ...]] = Field(default_factory=dict)
    """Lists of GPUs as in ``engines``, by the name of an auxiliary model, such as ``{judge: [[3]]}``. Models that are
    not named are placed automatically: on GPUs that are left, else next to engines."""


def device_problems(
    devices: DevicesConfig, trainer: TrainerConfig, explorer: ExplorerConfig, *, computes_on_gpus: bool
) -> Iterator[str]:
    """Yield the contradictions between explicit placement and the other sections.

    Args:
        devices: The explicit placement.
        trainer: The section with the number of trainer processes.
        explorer: The section with the number and sizes of engines.
        computes_on_gpus: False if ``model.device`` is cpu.
    """
    if (devices.trainer or devices.engines) and not computes_on_gpus:
        yield "devices names GPUs, and model.device is cpu: leave out devices, or set model.device to auto"
    if devices.trainer and len(devices.trainer) != trainer.nproc:
        yield (
            f"devices.trainer names {len(devices.trainer)} GPUs, and trainer.nproc is {trainer.nproc}: name one GPU "
            "for each process"
        )
    if repeated := _repeated(devices.trainer):
        yield (
            f"devices.trainer names GPU {repeated[0]} more than once, and the processes of a trainer need separate "
            "GPUs: name others, or lower trainer.nproc"
        )
    if devices.engines:
        rollout = explorer.rollout_model
        yield from _engine_problems("devices.engines", devices.engines, "explorer.rollout_model.", rollout)
    models = {model.name: model for model in explorer.auxiliary_models}
    for name, engines in devices.auxiliary.items():
        if (model := models.get(name)) is None:
            yield (
                f"devices.auxiliary names {name!r}, wanted a name of explorer.auxiliary_models: "
                f"{', '.join(models) or 'there are none'}"
            )
        elif not engine_row(model.engine).computes_here or (model.model is not None and model.model.device == "cpu"):
            yield f"devices.auxiliary names {name!r}, which uses no GPU here: remove it"
        else:
            yield from _engine_problems(f"devices.auxiliary.{name}", engines, f"auxiliary model {name!r}: ", model)


def _engine_problems(
    key: str, engines: Sequence[Devices], prefix: str, served: RolloutModelConfig | AuxiliaryModelConfig
) -> Iterator[str]:
    if len(engines) != served.engine_num:
        yield (
            f"{key} has {len(engines)} lists of GPUs, and {prefix}engine_num is {served.engine_num}: give one list for "
            "each engine"
        )
    for gpus in engines:
        if len(gpus) != served.tensor_parallel_size or _repeated(gpus):
            yield (
                f"{key} has the list {list(gpus)}, wanted {served.tensor_parallel_size} different GPUs for each engine "
                f"({prefix}tensor_parallel_size)"
            )


def _repeated(gpus: Devices) -> list[int | str]:
    return [gpu for gpu in dict.fromkeys(gpus) if gpus.count(gpu) > 1]
