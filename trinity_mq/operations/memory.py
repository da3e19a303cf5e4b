"""Estimate of the memory that a run needs, before it starts. Torch runs in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trinity_mq.config.engines import engine_row
from trinity_mq.config.run import Config
from trinity_mq.training.memory.estimate import (
    TOKEN_STEPS,
    Device,
    MeasureRequest,
    MemoryEstimate,
    ModelMemory,
    Parts,
    engine_fraction,
    engine_parts,
    fixed_parts,
    has_critic,
    host_parts,
    longest_pass,
    pass_parts,
)

SECONDS = 300.0
"""Seconds for the measurement of all models of a run."""

Measured = ModelMemory | str
"""Sizes of a model, or the reason why they are not known."""


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
    is_chosen = config.trainer.max_tokens_per_micro_batch == "auto" and kind == "cuda"
    tokens = longest_pass(config, TOKEN_STEPS[0] if is_chosen else config.trainer.first_max_tokens)
    requests = _requests(config, kind)
    measured = dict(zip(requests, measure_models(list(requests.values())), strict=True))
    unknown = {name: result for name, result in measured.items() if isinstance(result, str)}
    auxiliary: dict[str, Parts | None] = {}
    for served in config.explorer.auxiliary_models:
        if served.model is not None and engine_row(served.engine).computes_here:
            sizes = measured[served.name]
            parts = None if isinstance(sizes, str) else engine_parts(sizes, served.model, config, kind, served.engine)
            auxiliary[served.name] = parts
    policy, critic = measured["model"], measured.get("critic")
    if isinstance(policy, str) or isinstance(critic, str):
        return MemoryEstimate(kind, tokens, auxiliary=auxiliary, unknown=unknown)
    settings = config.explorer.rollout_model
    workers = getattr(settings, "tensor_parallel_size", 1)
    return MemoryEstimate(
        kind,
        tokens,
        trainer={**fixed_parts(policy, config, kind, critic), **pass_parts(policy, config, kind, tokens, critic)},
        trainer_host=host_parts(policy, config, kind, critic),
        engine=engine_parts(policy, config.model, config, kind, settings.engine, workers),
        engine_fraction=engine_fraction(config, kind),
        auxiliary=auxiliary,
        unknown=unknown,
    )


def _requests(config: Config, device: Device) -> dict[str, MeasureRequest]:
    requests = {"model": MeasureRequest.of_trained(config, device)}
    if has_critic(config):
        requests["critic"] = MeasureRequest.of_trained(config, device, is_critic=True)
    for served in config.explorer.auxiliary_models:
        if served.model is not None and engine_row(served.engine).computes_here:
            requests[served.name] = MeasureRequest(served.model.model_dump(mode="json"), device, passes=False)
    return requests


def measure_models(requests: Sequence[MeasureRequest]) -> list[Measured]:
    """Return the sizes of each model, or the reason why they are not known."""
    argv = [sys.executable, "-m", "trinity_mq.training.memory.measure"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    body = json.dumps([asdict(request) for request in requests])
    try:
        done = subprocess.run(argv, input=body, text=True, capture_output=True, timeout=SECONDS, check=False, env=env)
        answers: list[Mapping[str, Any] | str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return [f"the measurement took more than {SECONDS:g} s"] * len(requests)
    except ValueError:
        reason = " ".join(done.stderr.split()[-40:]) or f"exit code {done.returncode}"
        return [f"the measurement failed: {reason}"] * len(requests)
    return [answer if isinstance(answer, str) else ModelMemory.of(answer) for answer in answers]
