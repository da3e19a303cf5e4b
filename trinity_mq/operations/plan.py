"""Plan of a run on the GPUs of a machine: the GPU of each process, its estimated memory, and the memory left there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_mq.config import Config
from trinity_mq.operations.doctor.checks import size
from trinity_mq.runtime.gpus import Gpu
from trinity_mq.runtime.placement import GpuNeed, Placement
from trinity_mq.terminal import align_columns
from trinity_mq.training.memory.estimate import MemoryEstimate, Parts, total

UPPER_BOUNDS = ("cache", "logits")
"""Parts of the estimate for the engine ``transformers`` that are upper bounds, because the engine takes only the memory
that its requests need."""
TABLE_HEAD = ("process", "GPU", "estimated memory", "left on the GPU", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """The use of one GPU by a process."""

    name: str
    kind: str
    gpu: int
    """Position among the visible GPUs."""
    parts: Parts
    """Estimated bytes by part. Empty: unknown."""
    share: int = 0
    """Bytes that a vLLM process takes in total by ``gpu_memory_utilization``. Its cache gets the bytes that the parts
    leave. 0: the process takes only its parts."""
    least: int = 0
    """Estimated bytes without parts that are upper bounds, or the share if that is larger."""

    @property
    def bytes(self) -> int | None:
        """Estimated bytes that the process takes on the GPU: the share or the parts. None: unknown."""
        return max(self.share, total(self.parts) or 0) if self.parts else None

    @property
    def lacks_share(self) -> bool:
        """Whether the parts need more than the share."""
        return bool(self.share) and self.share < (total(self.parts) or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGpu:
    """The use of one GPU by all processes of the run."""

    number: int
    gpu: Gpu
    processes: Sequence[PlannedProcess]
    takes_turns: bool = False
    """Whether trainer and engines use the memory one after the other."""

    @property
    def room(self) -> int | None:
        """Bytes of the GPU that other runs and programs leave free; if unknown, its size. None: both are unknown."""
        return self.gpu.total if self.gpu.free is None else self.gpu.free

    @property
    def left(self) -> int | None:
        """Bytes of the room that the run leaves, below 0 if the room does not suffice. None: unknown."""
        sizes = [(process.kind, process.bytes) for process in self.processes if process.bytes is not None]
        return None if self.room is None or len(sizes) < len(self.processes) else self.room - self._at_once(sizes)

    @property
    def missing(self) -> int:
        """Bytes that are missing even if no part reaches its upper bound. 0: the room suffices, or is unknown."""
        sizes = [(process.kind, process.least) for process in self.processes]
        return 0 if self.room is None else max(0, self._at_once(sizes) - self.room)

    def _at_once(self, sizes: Sequence[tuple[str, int]]) -> int:
        """Return the largest sum of bytes at a time, from the bytes of each process by its kind."""
        totals = {kind: sum(size for other, size in sizes if other == kind) for kind, _ in sizes}
        sides = [totals.pop("trainer", 0), totals.pop("engine", 0)]
        return sum(totals.values()) + (max(sides) if self.takes_turns else sum(sides))


@dataclass(frozen=True)
class RunPlan:
    """The placement of a run, and the memory that its processes need there."""

    config: Config
    placement: Placement
    estimate: MemoryEstimate | None = None
    """Estimated memory of the run. None: the memory of a GPU is unknown, or no process of the run uses a GPU."""

    @property
    def processes(self) -> list[PlannedProcess]:
        """The use of each GPU by each process of the run that computes on GPUs. Empty if no GPU is visible."""
        return [use for need in self.placement.needs if self.placement.gpus for use in self._uses(need)]

    @property
    def gpus(self) -> list[PlannedGpu]:
        """The visible GPUs and their uses."""
        processes = self.processes
        return [
            PlannedGpu(
                number=number,
                gpu=gpu,
                processes=[use for use in processes if use.gpu == number],
                takes_turns=self.config.synchronizer.colocated,
            )
            for number, gpu in enumerate(self.placement.gpus)
        ]

    def _uses(self, need: GpuNeed) -> Iterator[PlannedProcess]:
        served = next((model for model in self.config.explorer.auxiliary_models if model.name == need.model), None)
        section = served or self.config.explorer.rollout_model
        parts = self._parts(need)
        least = total(parts) or 0
        fraction = 0.0
        if need.kind != "trainer" and section.engine == "vllm" and section.vllm.kv_cache_memory_bytes is None:
            fraction = section.vllm.fraction(dedicated=not self.placement.shares(need.name))
        elif need.kind != "trainer" and section.engine == "transformers":
            least -= sum(parts.get(name) or 0 for name in UPPER_BOUNDS)
        word = "rank" if need.kind == "trainer" else "worker"
        for number, gpu in enumerate(self.placement.positions[need.name]):
            share = round(fraction * (self.placement.gpus[gpu].total or 0)) if parts else 0
            yield PlannedProcess(
                name=f"{need.name} {word} {number}" if need.count > 1 else need.name,
                kind=need.kind,
                gpu=gpu,
                parts=parts,
                share=share,
                least=max(share, least),
            )

    def _parts(self, need: GpuNeed) -> Parts:
        """Return the estimated bytes of each rank or worker, by part; empty if they are unknown."""
        if self.estimate is None:
            return {}
        if need.kind == "auxiliary":
            return self.estimate.auxiliary.get(need.model) or {}
        return (self.estimate.trainer if need.kind == "trainer" else self.estimate.engine) or {}

    @property
    def problems(self) -> list[str]:
        """The reasons why the run does not fit, each with possible remedies."""
        small = [process for process in self.processes if process.lacks_share]
        problems = [
            f"{process.name} gets {size(process.share)} of GPU {process.gpu} by gpu_memory_utilization, and needs an "
            f"estimated {size(total(process.parts) or 0)} without its cache: raise gpu_memory_utilization or "
            "tensor_parallel_size"
            for process in small
        ]
        return problems + [self._shortage(gpu) for gpu in self.gpus if gpu.missing]

    def _shortage(self, gpu: PlannedGpu) -> str:
        others = ""
        if gpu.gpu.total is not None and gpu.room is not None and gpu.room < gpu.gpu.total:
            others = f" that other processes leave of {size(gpu.gpu.total)}"
        needs = ", ".join(f"{process.name} {size(process.least)}" for process in gpu.processes)
        return (
            f"GPU {gpu.number} has {size(gpu.room or 0)}{others}, and an estimated {size(gpu.missing)} more are needed "
            f"({needs}): try {', '.join(self._remedies(gpu))}"
        )

    def _remedies(self, gpu: PlannedGpu) -> Iterator[str]:
        trainer, kinds = self.config.trainer, {process.kind for process in gpu.processes}
        if "trainer" in kinds:
            if trainer.gradient_checkpointing is False:
                yield "trainer.gradient_checkpointing=true"
            yield "a smaller trainer.max_tokens_per_micro_batch"
            yield "a larger trainer.nproc" if trainer.nproc > 1 else "algorithm.optimizer.offload=true"
            if self.config.model.lora is None:
                yield "model.lora"
        if any(process.share and not process.lacks_share for process in gpu.processes):
            yield "a smaller gpu_memory_utilization"
        if len(gpu.processes) > 1:
            yield "fewer processes on this GPU"
        elif "trainer" not in kinds:
            yield "a larger tensor_parallel_size"

    def as_json(self) -> dict[str, Any]:
        """Return the plan for programs; sizes in bytes."""
        return {
            "run": self.config.name,
            "gpus": [
                {
                    "gpu": gpu.number,
                    "entry": gpu.gpu.entry,
                    "name": gpu.gpu.name,
                    "total": gpu.gpu.total,
                    "free": gpu.gpu.free,
                    "left": gpu.left,
                }
                for gpu in self.gpus
            ],
            "processes": [
                {
                    "process": process.name,
                    "kind": process.kind,
                    "gpu": process.gpu,
                    "estimate": process.bytes,
                    "parts": dict(process.parts),
                }
                for process in self.processes
            ],
            "environment": {need.name: self.placement.environment(need.name) for need in self.placement.needs},
            "host_memory": None if self.estimate is None else self.estimate.trainer_host_bytes,
            "unknown": {} if self.estimate is None else dict(self.estimate.unknown),
            "problems": self.problems,
            "fits": not self.problems,
        }

    def lines(self) -> list[str]:
        """Return the plan for a person: a table and remarks."""
        gpus = self.gpus
        rows = [
            (process.name, str(process.gpu), _size(process.bytes), _size(gpus[process.gpu].left), _summary(process))
            for process in self.processes
        ]
        if not rows:
            return ["no process of this run computes on a GPU"]
        return [*align_columns([TABLE_HEAD, *rows]), *self._remarks(gpus)]

    def _remarks(self, gpus: Sequence[PlannedGpu]) -> Iterator[str]:
        if idle := [str(gpu.number) for gpu in gpus if not gpu.processes]:
            yield f"not used: GPU {', '.join(idle)}"
        yield "all other processes on this machine get no GPU"
        if any(gpu.takes_turns for gpu in gpus):
            yield "trainer and engines take turns: on each GPU only the larger side counts"
        for gpu in gpus:
            if gpu.left is not None and gpu.left < 0 and not gpu.missing:
                yield f"GPU {gpu.number} is too small if its engines get as many and as long requests as they accept"
        if self.estimate is None:
            return
        has_trainer = any(need.kind == "trainer" for need in self.placement.needs)
        if has_trainer and (host := self.estimate.trainer_host_bytes) is not None:
            yield f"the trainer also needs an estimated {size(host)} of host memory"
        for name, reason in self.estimate.unknown.items():
            yield f"the memory of {name} is unknown: {reason}"


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return size(count) if count >= 0 else f"-{size(-count)}"


def _summary(process: PlannedProcess) -> str:
    parts = [f"{name} {size(part)}" for name, part in process.parts.items() if part]
    return ", ".join(["gpu_memory_utilization, of which", *parts] if process.share else parts)
