"""Placement of trainer processes and engines on the GPUs of one machine.

:func:`place` is pure: it maps the GPUs and the needs of the processes to the GPUs of each process. Every process gets
its GPUs in ``CUDA_VISIBLE_DEVICES``; a process without GPUs gets an empty value, so that it opens no CUDA context. All
processes of a trainer share one value, because NCCL must see the GPUs of the other ranks, and rank n uses device n of
this value.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trinity_mq.config import Config
from trinity_mq.config.engines import engine_row
from trinity_mq.config.sync import GLOO
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.gpu_memory import SHARED_VARIABLE
from trinity_mq.runtime.gpus import ORDER, ORDER_VARIABLE, VISIBLE_VARIABLE, Gpu, visible_gpus

PLACED_VARIABLE = "TRINITY_MQ_PLACED_ENGINES"
"""Environment variable that a supervisor sets for agents which it has placed on GPUs: a JSON map from the name of each
engine to the environment variables of the engine.
"""
KINDS = ("trainer", "engine")
"""Kinds of processes that get separate GPUs."""
TRAINER, EXPLORER = "trainer-0", "explorer-0"
"""Names of the agents that ``trinity-mq run`` starts on GPUs or with engines."""


class PlacementError(FatalError):
    """The processes do not fit on the GPUs. The message says which settings would fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """A process that computes on GPUs. The processes of a trainer count as a single process."""

    name: str
    kind: Literal["trainer", "engine", "auxiliary"]
    count: int = 1
    """Number of different GPUs: processes of the trainer, or tensor parallel size of an engine."""
    model: str = ""
    """Name of the auxiliary model."""
    devices: Sequence[int | str] = ()
    """GPUs that the section ``devices`` names. Empty: automatic."""

    @property
    def setting(self) -> str:
        """Key of the setting that names its GPUs."""
        return {"trainer": "devices.trainer", "engine": "devices.engines"}.get(
            self.kind, f"devices.auxiliary.{self.model}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The GPUs of each process on this machine."""

    gpus: Sequence[Gpu]
    """The visible GPUs."""
    needs: Sequence[GpuNeed] = ()
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Positions in ``gpus``, by name of the process."""

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment variables that give a process its GPUs.

        The result is empty if no GPU is visible although GPUs are wanted: the process then decides by itself.
        """
        if self.needs and not self.gpus:
            return {}
        shared = {SHARED_VARIABLE: "1"} if self.shares(name) else {}
        return {VISIBLE_VARIABLE: self.entries(name), ORDER_VARIABLE: ORDER, **shared}

    def shares(self, name: str) -> bool:
        """Return whether another process uses a GPU of this process."""
        gpus = set(self.positions.get(name, ()))
        return any(gpus & set(positions) for other, positions in self.positions.items() if other != name)

    def agent_environment(self, name: str) -> dict[str, str]:
        """Return the environment variables of an agent of a supervisor: the GPUs of the agent and of its engines."""
        engines = {need.name: self.environment(need.name) for need in self.needs if need.kind != "trainer"}
        environment = self.environment(name)
        return {**environment, PLACED_VARIABLE: json.dumps(engines)} if environment else {}

    def entries(self, name: str) -> str:
        """Return ``CUDA_VISIBLE_DEVICES`` of a process; empty for a process without GPUs."""
        return ",".join(self.gpus[position].entry for position in self.positions.get(name, ()))

    def __str__(self) -> str:
        places = [f"{need.name} on {self.entries(need.name)}" for need in self.needs if self.gpus]
        return f"GPUs: {'; '.join(places)}" if places else "GPUs: none, everything runs on the CPU"


def gpu_needs(config: Config, *, trainer: str | None, explorer: str | None, auxiliary: bool = True) -> list[GpuNeed]:
    """Return the processes of agents that compute on GPUs. With ``model.device: cpu`` they are only auxiliary models,
    which have their own device.

    Args:
        config: Configuration of the run.
        trainer: Name of the trainer. None: it is not placed.
        explorer: Name of the agent that hosts engines. None: no engine is placed.
        auxiliary: Whether the agent ``explorer`` hosts auxiliary models too.
    """
    devices, rollout, needs = config.devices, config.explorer.rollout_model, []
    if trainer is not None and config.model.device != "cpu":
        needs.append(GpuNeed(name=trainer, kind="trainer", count=config.trainer.nproc, devices=devices.trainer))
    if explorer is None:
        return needs
    if config.model.device != "cpu":
        names = engine_names(f"{explorer}-engine", rollout.engine_num)
        needs += [
            GpuNeed(name=name, kind="engine", count=rollout.tensor_parallel_size, devices=gpus)
            for name, gpus in zip(names, _explicit(devices.engines, names), strict=True)
        ]
    for served in config.explorer.auxiliary_models if auxiliary else ():
        if not engine_row(served.engine).computes_here or served.model is None or served.model.device == "cpu":
            continue
        names = engine_names(f"{explorer}-auxiliary-{served.name}", served.engine_num)
        explicit = _explicit(devices.auxiliary.get(served.name, ()), names)
        needs += [
            GpuNeed(name=name, kind="auxiliary", count=served.tensor_parallel_size, model=served.name, devices=gpus)
            for name, gpus in zip(names, explicit, strict=True)
        ]
    return needs


def _explicit(lists: Sequence[Sequence[int | str]], names: Sequence[str]) -> Sequence[Sequence[int | str]]:
    """Return the GPUs that the section ``devices`` names for each engine. If it has another number of lists, which the
    checks of the configuration report, the placement is automatic.
    """
    return lists if len(lists) == len(names) else [()] * len(names)


def engine_names(first: str, number: int) -> list[str]:
    """Return the names of a host's engines."""
    return [first, *(f"{first}-{n}" for n in range(1, number))]


def run_needs(config: Config) -> list[GpuNeed]:
    """Return the processes of ``trinity-mq run`` that compute on GPUs."""
    has_explorer = "explorer" in config.agent_counts
    return gpu_needs(config, trainer=TRAINER, explorer=EXPLORER if has_explorer else None)


def place_run(config: Config, gpus: Sequence[Gpu]) -> Placement:
    """Return the GPUs of the processes of ``trinity-mq run``. Raises PlacementError if they do not fit."""
    return place(run_needs(config), gpus, nccl=config.synchronizer.uses_nccl, colocated=config.synchronizer.colocated)


def place_trainer(config: Config, gpus: Sequence[Gpu], name: str = TRAINER) -> Placement:
    """Return the GPUs of a trainer that is started by itself. Raises PlacementError if there are too few."""
    return place(gpu_needs(config, trainer=name, explorer=None), gpus)


def place_engines(config: Config, gpus: Sequence[Gpu], host: str = EXPLORER, *, auxiliary: bool = True) -> Placement:
    """Return the GPUs of the engines of a host that is started by itself: the last visible GPUs, since a trainer that
    is started by itself takes the first. If trainer and engines take turns (``colocated``), both have the first.

    Args:
        config: Configuration of the run.
        gpus: The visible GPUs.
        host: Name of the agent that hosts the engines.
        auxiliary: Whether to place auxiliary models too.

    Raises:
        PlacementError: There are too few GPUs.
    """
    synchronizer = config.synchronizer
    return place(
        gpu_needs(config, trainer=None, explorer=host, auxiliary=auxiliary),
        gpus,
        nccl=synchronizer.uses_nccl,
        colocated=synchronizer.colocated,
        from_end=not synchronizer.colocated,
    )


def trainer_environment(config: Config, name: str) -> dict[str, str]:
    """Return the environment variables that give a trainer its GPUs: the first visible GPUs. The result is empty if
    the supervisor has placed the trainer, if the trainer computes on the CPU, or if no GPU is visible.

    Raises:
        PlacementError: There are too few GPUs.
    """
    if PLACED_VARIABLE in os.environ or not gpu_needs(config, trainer=name, explorer=None):
        return {}
    return place_trainer(config, visible_gpus().gpus, name).environment(name)


def engine_environments(
    config: Config, host: str, gpus: Callable[[], Sequence[Gpu]], *, auxiliary: bool
) -> Callable[[str], dict[str, str]]:
    """Return a function from the name of an engine to the environment variables that give the engine its GPUs.

    They are the GPUs that the supervisor of the host has chosen, else the GPUs by :func:`place_engines`.

    Args:
        config: Configuration of the run.
        host: Name of the agent that hosts the engines.
        gpus: Returns the visible GPUs.
        auxiliary: Whether to place auxiliary models too.

    Raises:
        PlacementError: There are too few GPUs.
    """
    if (placed := os.environ.get(PLACED_VARIABLE)) is not None:
        engines: dict[str, dict[str, str]] = json.loads(placed)
        return lambda name: engines.get(name, {VISIBLE_VARIABLE: ""})
    needs = gpu_needs(config, trainer=None, explorer=host, auxiliary=auxiliary)
    return place_engines(config, gpus() if needs else [], host, auxiliary=auxiliary).environment


def place(
    needs: Sequence[GpuNeed],
    gpus: Sequence[Gpu],
    *,
    nccl: bool = False,
    colocated: bool = False,
    from_end: bool = False,
) -> Placement:
    """Return the GPUs of each process.

    Trainer processes and engines get separate GPUs. On a single GPU they share it. Auxiliary models get GPUs that are
    left, else share the GPUs of engines, else the GPUs of the trainer. GPUs that other processes fill are not used,
    unless all are filled or the section ``devices`` names them.

    Args:
        needs: The processes.
        gpus: The visible GPUs; without any, nothing is placed.
        nccl: Whether the weights are sent over NCCL, which needs separate GPUs for rank 0 and all engines.
        colocated: Whether trainer and engines take turns on the same GPUs, however many GPUs there are.
        from_end: Use the last GPUs first.

    Raises:
        PlacementError: The processes do not fit.
    """
    positions = {
        need.name: [_position(device, need, gpus) for device in need.devices] for need in needs if need.devices
    }
    if not needs or not gpus:
        return Placement(gpus=gpus, needs=needs)
    untaken = [position for position, gpu in enumerate(gpus) if not gpu.is_taken]
    usable = (untaken or list(range(len(gpus))))[:: -1 if from_end else 1]
    named = set(itertools.chain.from_iterable(positions.values()))
    unnamed = [position for position in usable if position not in named]
    trainers, engines = ([need for need in needs if need.kind == kind and not need.devices] for kind in KINDS)
    load = _Load.of(trainers, engines)
    if colocated and max(load.ranks, load.size) <= len(usable):
        positions |= {need.name: usable[: need.count] for need in [*trainers, *engines]}
    elif load.apart <= len(unnamed):
        positions |= _in_turn([*trainers, *engines], unnamed)
    elif len(usable) == 1 and load.shares_one:
        positions |= _in_turn([*trainers, *engines], itertools.repeat(usable[0]))
    else:
        raise PlacementError(_misfit(load, gpus, usable, unnamed, nccl=nccl))
    _place_auxiliary([need for need in needs if need.name not in positions], needs, usable, positions)
    _check(needs, gpus, positions, nccl=nccl)
    return Placement(gpus=gpus, needs=needs, positions=positions)


@dataclass(frozen=True, slots=True)
class _Load:
    """The processes to place: trainer processes, and engines with the GPUs of each."""

    ranks: int
    engines: int
    size: int = 1

    @classmethod
    def of(cls, trainers: Sequence[GpuNeed], engines: Sequence[GpuNeed]) -> _Load:
        """Return the load of these processes. Engines of a host have the same size."""
        return cls(sum(need.count for need in trainers), len(engines), max((need.count for need in engines), default=1))

    @property
    def apart(self) -> int:
        """Number of GPUs if each process has separate GPUs."""
        return self.ranks + self.engines * self.size

    @property
    def shares_one(self) -> bool:
        """Whether a single GPU can hold all processes. It holds any number of engines."""
        return self.ranks <= 1 and self.size == 1

    def smaller(self, gpus: int, *, shared: bool) -> list[_Load]:
        """Return up to two smaller loads that fit on a number of GPUs: the load with all trainer processes and as many
        engines as possible, and the load with all engines and as many trainer processes as possible. If neither fits,
        return a single load with fewer processes and engines in proportion and, if necessary, smaller engines.

        Args:
            gpus: Number of GPUs.
            shared: Whether processes may share them.
        """
        most = max(1, gpus)
        ranks = range(min(self.ranks, most), 0, -1) or (0,)
        engines = range(self.engines if shared else min(self.engines, most), 0, -1) or (0,)
        sizes = [size for size in range(min(self.size, most), 0, -1) if self.size % size == 0]
        loads = [_Load(*load) for load in itertools.product(ranks, engines, sizes)]
        fitting = [load for load in loads if load.apart <= gpus or (shared and load.shares_one)]
        same = [load for load in fitting if load.size == self.size]
        largest = [load for load in same if load.ranks == self.ranks][:1]
        largest += [load for load in same if load.engines == self.engines][:1]
        return list(dict.fromkeys(largest)) or sorted(fitting, key=self._fraction)[-1:]

    def _fraction(self, load: _Load) -> tuple[int, float]:
        """Return the GPUs of each engine in a smaller load, and the smallest fraction that it keeps of the trainer
        processes or of the engines. Loads are compared by this pair.
        """
        pairs = ((load.ranks, self.ranks), (load.engines, self.engines))
        return load.size, min(count / whole for count, whole in pairs if whole)

    def changes(self, before: _Load) -> str:
        """Return the settings that turn another load into this load."""
        values = {
            "trainer.nproc": (before.ranks, self.ranks),
            "explorer.rollout_model.engine_num": (before.engines, self.engines),
            "explorer.rollout_model.tensor_parallel_size": (before.size, self.size),
        }
        return " ".join(f"{key}={after}" for key, (earlier, after) in values.items() if earlier != after)

    def __str__(self) -> str:
        gpus = f" of {_count(self.size, 'GPU')}"
        parts = [_count(self.ranks, "rank"), f"{_count(self.engines, 'engine')}{gpus}"]
        return " and ".join(part for part, count in zip(parts, (self.ranks, self.engines), strict=True) if count)


def _position(device: int | str, need: GpuNeed, gpus: Sequence[Gpu]) -> int:
    """Return the position of a GPU that the section ``devices`` names."""
    if isinstance(device, int) and device < len(gpus):
        return device
    for position, gpu in enumerate(gpus):
        if isinstance(device, str) and device in {gpu.entry, gpu.uuid}:
            return position
    names = [f"{position} ({gpu.uuid})" if gpu.uuid else str(position) for position, gpu in enumerate(gpus)]
    raise PlacementError(
        f"{need.setting} names GPU {device}, and the GPUs that are visible here are: {', '.join(names) or 'none'}; "
        f"name others, or make it visible ({VISIBLE_VARIABLE})"
    )


def _in_turn(needs: Sequence[GpuNeed], positions: Iterable[int]) -> dict[str, list[int]]:
    """Give each process the next GPUs."""
    remaining = iter(positions)
    return {need.name: sorted(itertools.islice(remaining, need.count)) for need in needs}


def _place_auxiliary(
    auxiliary: Sequence[GpuNeed], needs: Sequence[GpuNeed], usable: Sequence[int], positions: dict[str, list[int]]
) -> None:
    """Give auxiliary models the GPUs that are left, else the GPUs of engines, else the GPUs of the trainer."""
    for need in auxiliary:
        users = {
            position: [other for other in needs if position in positions.get(other.name, ())] for position in usable
        }

        def reluctance(position: int, users: Mapping[int, Sequence[GpuNeed]] = users) -> tuple[bool, bool, int]:
            kinds = [other.kind for other in users[position]]
            return "trainer" in kinds, "engine" in kinds, len(kinds)

        chosen = sorted(usable, key=reluctance)[: need.count]
        if len(chosen) < need.count:
            raise PlacementError(
                f"auxiliary model {need.model!r} has tensor_parallel_size {need.count}, and "
                f"{_count(len(usable), 'GPU')} can be used here: lower it"
            )
        positions[need.name] = sorted(chosen)


def _check(
    needs: Sequence[GpuNeed], gpus: Sequence[Gpu], positions: Mapping[str, Sequence[int]], *, nccl: bool
) -> None:
    """Raise PlacementError if a process cannot use its GPUs, or NCCL cannot connect the processes."""
    for need in needs:
        if len(set(positions[need.name])) != need.count:
            raise PlacementError(f"{need.setting} names the same GPU twice for {need.name}: name different GPUs")
        if need.count > 1 and any(gpus[position].is_slice for position in positions[need.name]):
            raise PlacementError(
                f"{need.name} needs {need.count} GPUs, and CUDA shows a process only one MIG slice: set "
                f"{'trainer.nproc' if need.kind == 'trainer' else 'tensor_parallel_size'} to 1, or disable MIG"
            )
    members = [position for need in needs if need.kind == "engine" for position in positions[need.name]]
    members += [positions[need.name][0] for need in needs if need.kind == "trainer"]
    if nccl and len(set(members)) < len(members):
        raise PlacementError(
            f"synchronizer.backend is nccl, which needs a separate GPU for trainer rank 0 and for each GPU of an "
            f"engine, {len(members)} in all, and they share {len(set(members))}: set {GLOO}, or use more GPUs"
        )


def _misfit(load: _Load, gpus: Sequence[Gpu], usable: Sequence[int], unnamed: Sequence[int], *, nccl: bool) -> str:
    """Return the reason why the processes do not fit, and settings with which they fit."""
    taken = [str(position) for position in range(len(gpus)) if position not in usable]
    others = f", besides GPU {', '.join(taken)}, which other processes fill" if taken else ""
    left, are_all = len(unnamed), len(unnamed) == len(usable)
    here = f"{_be(left)} here" if are_all else f"{_be(left)} left besides those that devices names"
    shared = len(usable) == 1 and not nccl
    choices = [smaller.changes(load) for smaller in load.smaller(left, shared=shared)]
    workers = load.engines * load.size
    if load.ranks and load.engines and are_all and not nccl and max(load.ranks, workers) <= len(usable):
        ordered = sorted(usable)
        lists = [ordered[end - load.size : end] for end in range(len(usable), len(usable) - workers, -load.size)]
        choices.append(f"'devices={{trainer: {ordered[: load.ranks]}, engines: {lists}}}', which shares GPUs")
    remedy = f": set {', or '.join(choices)}" if choices else ": use fewer processes or more GPUs"
    if load.ranks and load.engines and are_all and max(load.ranks, workers) <= len(usable):
        remedy += "; `trinity-mq node` runs them on several machines"
    return f"{load} need {_count(load.apart, 'GPU')} apart, {here}{others}{remedy}"


def _be(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
