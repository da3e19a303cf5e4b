"""Ready-file: address of a living engine, and the identity of its process."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from trinity_mq.config import AuxiliaryModelConfig, Config
from trinity_mq.release import VERSION
from trinity_mq.runtime.gpus import GpuReport, visible_gpus
from trinity_mq.runtime.process import write_atomic

TOKEN_VARIABLE = "TRINITY_MQ_ENGINE_TOKEN"
FATAL = b"fatal"
"""Message through the pipe of an engine that cannot run."""
CREATE_TIME_TOLERANCE = 2.0
"""Seconds by which two readings of a process's start time may differ. They depend on the boot time, which clock
corrections change.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFile:
    """Report of an engine that accepts requests. Only its owner can read the file, because it holds the admin token."""

    id: str
    pid: int
    create_time: float
    """Start time of the process in seconds since the epoch. Together with the pid it identifies one process."""
    url: str
    token: str
    name: str
    model_path: str
    fingerprint: str
    """Hash of tokenizer, chat template and vocabulary."""
    digest: str
    """Hash of the settings with which the engine was started."""

    def write(self, path: Path) -> None:
        """Write the file atomically, with mode 0600."""
        write_atomic(path, json.dumps(asdict(self)).encode(), 0o600)

    @classmethod
    def read(cls, path: Path) -> ReadyFile | None:
        """Return the content of ``path``, or None if the file does not exist or is not a ready-file."""
        try:
            return cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def lives(self) -> bool:
        """Return whether the process that wrote this file still runs, and not another process with the same pid."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.create_time) <= CREATE_TIME_TOLERANCE
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def ready_descriptor(word: str) -> int:
    """Return the file descriptor that ``--ready-fd`` names, made non-inheritable.

    A child process with the descriptor, such as vLLM's server, would keep the host waiting after the engine closed it.
    """
    fd = int(word)
    os.set_inheritable(fd, False)
    return fd


def write_ready(path: Path, fd: int | None, **fields: str) -> None:
    """Write the ready-file of this process with ``fields``, its pid and its start time. Then close ``fd``, on which its
    host waits.
    """
    process = psutil.Process()
    ReadyFile(pid=process.pid, create_time=process.create_time(), **fields).write(path)
    if fd is not None:
        os.close(fd)


def refuse(path: Path, fd: int | None) -> None:
    """Tell the host that waits on ``fd`` that a restart of this engine does not help. Does nothing if the engine was
    ready.
    """
    if fd is not None and not path.exists():
        os.write(fd, FATAL)


def free_gpus(run_dir: Path) -> GpuReport:
    """Return the visible GPUs. While engines of the run live, for example after a crash of their host, the free memory
    is unknown, so that their GPUs do not count as filled by others.
    """
    report = visible_gpus()
    ready = (ReadyFile.read(path) for path in (run_dir / "engines").glob("*.ready.json"))
    if any(file is not None and file.lives() for file in ready):
        return replace(report, gpus=[replace(gpu, free=None) for gpu in report.gpus])
    return report


def engine_digest(
    config: Config, auxiliary: AuxiliaryModelConfig | None = None, devices: Sequence[str] | None = None
) -> str:
    """Return a digest of the engine's settings, its GPUs and the release. An engine with another digest must not be
    adopted.
    """
    rollout = config.explorer.rollout_model.model_dump(mode="json", exclude={"engine_num"})
    sync, lora = config.synchronizer, config.model.lora
    parts = {"model": config.model.model_dump(mode="json"), "rollout_model": rollout, "seed": config.seed}
    parts |= {"pause_mode": sync.effective_pause_mode, "colocated": sync.colocated}
    if lora is not None and lora.sync == "adapter":
        parts["max_staleness"] = sync.effective_max_staleness  # it sizes the engine's room for adapters
    if auxiliary is not None:
        parts = {"auxiliary": auxiliary.model_dump(mode="json", exclude={"engine_num"}), "seed": config.seed}
        parts["served"] = {key: rollout[key] for key in ("host", "max_batch_sequences")}
    parts |= {"devices": devices, "release": VERSION}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
