"""The ready-file: where a living engine is found, and whether it is still the same process."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from trinity_mq.config import AuxiliaryModelConfig, Config
from trinity_mq.release import VERSION
from trinity_mq.runtime.process import write_atomic

TOKEN_VARIABLE = "TRINITY_MQ_ENGINE_TOKEN"
FATAL = b"fatal"
"""The message that comes through the pipe of an engine that cannot run."""
CREATE_TIME_TOLERANCE = 2.0
"""Seconds by which two readings of a process's start may differ: they depend on the boot time,
which the clock corrects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFile:
    """Report of an engine that takes requests. Readable by its owner only: it holds the admin token."""

    id: str
    pid: int
    create_time: float
    """Start of the process in seconds since the epoch; with the pid it names one process."""
    url: str
    token: str
    name: str
    model_path: str
    fingerprint: str
    """Hash over tokenizer, chat template and vocabulary."""
    digest: str
    """Hash over the settings the engine was started with."""

    def write(self, path: Path) -> None:
        """Write atomically, mode 0600."""
        write_atomic(path, json.dumps(asdict(self)).encode(), 0o600)

    @classmethod
    def read(cls, path: Path) -> ReadyFile | None:
        """Return what is in ``path``, None if there is no such file or it is not a ready-file."""
        try:
            return cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def lives(self) -> bool:
        """Say whether the process that wrote this still runs; another one under its pid does not count."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.create_time) <= CREATE_TIME_TOLERANCE
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def kept_descriptor(word: str) -> int:
    """Return the file descriptor that ``--ready-fd`` names, which no process that the engine starts inherits: whoever
    holds it too, as vLLM would, keeps the host waiting after the engine has closed it.
    """
    fd = int(word)
    os.set_inheritable(fd, False)
    return fd


def announce(path: Path, fd: int | None, **said: str) -> None:
    """Write the ready-file of this process, with what it says beside pid and start, and close ``fd``, at which its host
    waits.
    """
    process = psutil.Process()
    ReadyFile(pid=process.pid, create_time=process.create_time(), **said).write(path)
    if fd is not None:
        os.close(fd)


def refuse(path: Path, fd: int | None) -> None:
    """Tell the host that waits at ``fd`` that starting this engine again does not help; not once it was ready."""
    if fd is not None and not path.exists():
        os.write(fd, FATAL)


def engine_digest(config: Config, auxiliary: AuxiliaryModelConfig | None = None) -> str:
    """Return a digest of what an engine is built from: one of other settings or another release must not be adopted."""
    rollout = config.explorer.rollout_model.model_dump(mode="json", exclude={"engine_num"})
    parts = {"model": config.model.model_dump(mode="json"), "rollout_model": rollout, "seed": config.seed}
    if auxiliary is not None:
        parts = {"auxiliary": auxiliary.model_dump(mode="json", exclude={"engine_num"}), "seed": config.seed}
        parts["served"] = {key: rollout[key] for key in ("host", "max_batch_sequences", "max_batch_delay")}
    parts["release"] = VERSION
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
