"""The GPUs of this machine that a process may use, from ``nvidia-smi``, else from torch in a child process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that CUDA shows to a process: indices or UUIDs, joined by commas."""
ORDER_VARIABLE, ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
"""Environment variable with the order of the indices, and its value: the order of ``nvidia-smi``."""
PRETEND_VARIABLE = "TRINITY_MQ_PRETEND_GPUS"
"""Environment variable for tests: the number of GPUs that the placement sees. Nothing computes on them."""
INDEX_DIGITS = 9
"""Maximum number of digits of an index; a longer index names no GPU."""
MOST = 1024
"""Maximum number of pretended GPUs, far above the GPUs of any machine."""
SMI_SECONDS, TORCH_SECONDS = 30.0, 90.0
SMI_QUERY = ("--query-gpu=uuid,name,memory.total,memory.free,mig.mode.current", "--format=csv,noheader,nounits")
_LISTED_GPU = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>GPU-[^)]+)\)")
_LISTED_SLICE = re.compile(r"\s+MIG (?P<profile>\S*?(?P<gib>\d+)gb\S*) .*\(UUID: (?P<uuid>MIG-[^)]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU or a MIG slice."""

    entry: str
    """Name in ``CUDA_VISIBLE_DEVICES``: an index in the order of ``nvidia-smi``, or a UUID."""
    uuid: str = ""
    name: str = ""
    total: int | None = None
    """Bytes of memory. None: unknown."""
    free: int | None = None
    """Bytes of memory that no process uses. None: unknown."""

    @property
    def is_slice(self) -> bool:
        """Whether this is a MIG slice. CUDA shows a process only one slice."""
        return (self.uuid or self.entry).startswith("MIG-")

    @property
    def is_taken(self) -> bool:
        """Whether other processes use more than half of the memory. False if the memory is unknown."""
        return self.total is not None and self.free is not None and self.free < self.total / 2


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The GPUs that a process may use, in the order of their numbers in the process."""

    gpus: Sequence[Gpu]
    why: str = ""
    """Explanation for an empty ``gpus``, such as ``nvidia-smi lists 0 GPUs``. Without meaning if ``gpus`` is not empty.
    An empty text: the reason is unknown.
    """


def visible_gpus(environ: Mapping[str, str] = os.environ) -> GpuReport:
    """Return the GPUs that a process with this environment may use. The call asks ``nvidia-smi``, or else torch if the
    machine has GPU devices; either takes some seconds, and up to 90 seconds if the GPU driver hangs.
    """
    mask = environ.get(VISIBLE_VARIABLE)
    hides = "" if mask is None else f", {VISIBLE_VARIABLE} is {mask[:100]!r}"
    if pretended := environ.get(PRETEND_VARIABLE, ""):
        count = int(pretended) if pretended.isdecimal() and len(pretended) <= len(str(MOST)) else -1
        wanted = "" if 0 <= count <= MOST else f", wanted a number from 0 to {MOST}"
        machine = [] if wanted else [[Gpu(entry=str(n), name="pretended")] for n in range(count)]
        return GpuReport(unmasked(machine, mask), f"{PRETEND_VARIABLE} is {pretended!r}{wanted}{hides}")
    if shutil.which("nvidia-smi") is None:
        return _ask_torch_for_gpus(mask) if has_gpu_devices() else GpuReport([], "no GPU device is on this machine")
    try:
        table = _nvidia_smi(*SMI_QUERY)
        listing = _nvidia_smi("-L") if "Enabled" in table else ""
        machine = parse_smi(table, listing)
    except OSError as error:
        return GpuReport([], str(error))
    devices = sum(map(len, machine))
    return GpuReport(unmasked(machine, mask), f"nvidia-smi lists {devices} GPU{'s' * (devices != 1)}{hides}")


def _nvidia_smi(*words: str) -> str:
    """Return the output of ``nvidia-smi``. Raises OSError if it fails or does not answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"nvidia-smi did not answer in {SMI_SECONDS:g} s") from error
    if done.returncode:
        raise OSError(f"nvidia-smi fails: {' '.join((done.stdout + done.stderr).split())[:300]}")
    return done.stdout


def parse_smi(table: str, listing: str = "") -> list[list[Gpu]]:
    """Return for each GPU of the machine the devices on which a process can compute: the GPU itself, or its MIG slices.

    Args:
        table: Output of ``nvidia-smi`` with :data:`SMI_QUERY`; memory in MiB.
        listing: Output of ``nvidia-smi -L``, if MIG is enabled on a GPU.

    Raises:
        OSError: A line of the table does not describe a GPU.
    """
    slices: dict[str, list[Gpu]] = {}
    uuid = ""
    for line in listing.splitlines():
        if match := _LISTED_GPU.match(line):
            uuid = match["uuid"]
        elif match := _LISTED_SLICE.match(line):
            memory = int(match["gib"]) * 2**30  # the free memory of a slice is not listed
            gpu = Gpu(entry=match["uuid"], uuid=match["uuid"], name=f"MIG {match['profile']}", total=memory)
            slices.setdefault(uuid, []).append(gpu)
    machine = []
    for index, line in enumerate(filter(str.strip, table.splitlines())):
        uuid, name, total_mib, free_mib, mig = (part.strip() for part in [*line.split(","), "", "", "", ""][:5])
        if not uuid.startswith("GPU-"):
            raise OSError(f"nvidia-smi prints {line.strip()[:100]!r}, wanted the UUID of a GPU and its memory")
        if mig == "Enabled":
            machine.append(slices.get(uuid, []))
            continue
        total, free = (
            int(mib) * 2**20 if mib.isdecimal() and len(mib) <= INDEX_DIGITS else None for mib in (total_mib, free_mib)
        )
        machine.append([Gpu(entry=str(index), uuid=uuid, name=name, total=total, free=free)])
    return machine


def unmasked(machine: Sequence[Sequence[Gpu]], mask: str | None) -> list[Gpu]:
    """Return the devices that the value ``mask`` of ``CUDA_VISIBLE_DEVICES`` leaves visible, each with its entry there.

    As in CUDA, an entry that names no device hides itself and all later entries (CUDA C++ Programming Guide,
    "CUDA Environment Variables"), a UUID may be shortened to a unique prefix, and a device that is named twice hides
    all (torch's ``_parse_visible_devices``).

    Args:
        machine: For each GPU the devices on it.
        mask: None: all devices are visible.
    """
    devices = list(itertools.chain.from_iterable(machine))
    if mask is None:
        return devices
    visible: dict[str, Gpu] = {}
    for entry in (word.strip() for word in mask.split(",")):
        if entry.isdecimal():
            index = int(entry) if len(entry) <= INDEX_DIGITS else len(machine)
            matches = list(machine[index][:1]) if index < len(machine) else []
        else:
            matches = [gpu for gpu in devices if entry and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        if matches[0] in visible.values():
            return []
        visible[entry] = matches[0]
    return [dataclasses.replace(gpu, entry=entry) for entry, gpu in visible.items()]


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the GPUs to which the environment limits this process, for its first log event. None: not limited."""
    mask = environ.get(VISIBLE_VARIABLE)
    return None if mask is None else [entry for entry in mask.split(",") if entry]


def has_gpu_devices() -> bool:
    """Return whether the system shows devices of an NVIDIA or AMD GPU."""
    folder = Path("/dev")
    return any(folder.glob("nvidia[0-9]*")) or any((folder / name).exists() for name in ("kfd", "dxg"))


def _ask_torch_for_gpus(mask: str | None) -> GpuReport:
    report = ask_torch()
    if isinstance(report, str):
        return GpuReport([], report)
    gpus = report.get("gpus", ())
    entries = [word.strip() for word in mask.split(",")] if mask else [str(index) for index in range(len(gpus))]
    return GpuReport(
        [
            Gpu(entry=entry, name=name, free=free, total=total)
            for entry, (name, free, total) in zip(entries, gpus, strict=False)
        ],
        "torch sees none of the machine's GPUs",
    )


TORCH_REPORT = """
import json, torch
report = {"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
if report["available"]:
    numbers = range(torch.cuda.device_count())
    report["gpus"] = [[torch.cuda.get_device_name(n), *torch.cuda.mem_get_info(n)] for n in numbers]
print(json.dumps(report))
"""


def ask_torch() -> Any:
    """Return torch's report on itself and its GPUs, else the reason for a missing report.

    Torch runs in a separate process, because a GPU driver may hang.
    """
    argv = [sys.executable, "-c", TORCH_REPORT]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TORCH_SECONDS, check=False)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"torch did not start and look for GPUs in {TORCH_SECONDS:g} s: see whether `nvidia-smi` answers"
    except ValueError:
        return " ".join(done.stderr.decode(errors="replace").split()[-40:]) or f"exit code {done.returncode}"
