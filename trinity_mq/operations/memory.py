"""Estimate of the memory that a run needs, before it starts. Torch runs in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trinity_mq.config.run import Config
from trinity_mq.training.memory.estimate import (
    Device,
    Measured,
    MeasureRequest,
    MemoryEstimate,
    ModelMemory,
    estimate,
    measure_requests,
)

SECONDS = 120.0
"""Maximum seconds for the start of the measuring process, and for the measurement of each model."""


def estimate_memory(config: Config, device: Device | None = None) -> MemoryEstimate:
    """Return the memory that the trainer and the engines of a run need. The call takes seconds.

    Only ``config.json`` of each model is read. The values of a model that is not downloaded yet are unknown.

    With ``trainer.max_tokens_per_micro_batch: auto`` on a GPU the estimate is for the smallest value that ``auto`` may
    choose: if this does not fit, no value fits.

    Args:
        config: Configuration of the run.
        device: Kind of the devices. None: ``model.device``, where ``auto`` means GPUs.
    """
    kind: Device = device or ("cpu" if config.model.device == "cpu" else "cuda")
    requests = measure_requests(config, kind)
    measured = dict(zip(requests, measure_models(list(requests.values())), strict=True))
    return estimate(config, kind, measured)


def measure_models(requests: Sequence[MeasureRequest]) -> list[Measured]:
    """Return the sizes of each model, or the reason why they are not known."""
    argv = [sys.executable, "-m", "trinity_mq.training.memory.measure"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    body = json.dumps([asdict(request) for request in requests])
    limit = SECONDS * (1 + len(requests))
    try:
        done = subprocess.run(argv, input=body, text=True, capture_output=True, timeout=limit, check=False, env=env)
        answers: list[Mapping[str, Any] | str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return [f"the measurement took more than {limit:g} s"] * len(requests)
    except ValueError:
        reason = " ".join(done.stderr.split()[-40:]) or f"exit code {done.returncode}"
        return [f"the measurement failed: {reason}"] * len(requests)
    return [answer if isinstance(answer, str) else ModelMemory.of(answer) for answer in answers]
