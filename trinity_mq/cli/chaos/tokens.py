"""Tokens against the weights that they name: checkpoints of a run score what their version is said to have sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trinity_mq.cli.chaos.invariants import Verdict, judged
from trinity_mq.config import Config
from trinity_mq.experience import Experience
from trinity_mq.messages import Version
from trinity_mq.models.model_folder import no_progress_bar
from trinity_mq.training.checkpoints.checkpoint import Checkpoint

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1}
"""Nats by which a recorded logprob may differ from that of the same weights, on average over an experience: other
kernels and batch shapes round otherwise. A train step usually moves it by more."""
NAME = "tokens were sampled by the weights they name"


def check_tokens(
    config: Config, checkpoints: Sequence[Checkpoint], samples: Mapping[Version, Sequence[Experience]]
) -> Verdict:
    """Score experiences with the weights of the checkpoint of their version, and compare the recorded logprobs; blocks.

    Args:
        config: The run's.
        checkpoints: Those with a folder ``model``.
        samples: By version, experiences all of whose tokens it is said to have sampled.
    """
    by_version = {(one.state.generation, one.state.step): one.path / "model" for one in checkpoints}
    usable = {
        version: [one for one in found if _is_comparable(one)]
        for version, found in samples.items()
        if version in by_version and (by_version[version] / "config.json").exists()
    }
    usable = {version: found for version, found in usable.items() if found}
    if not usable:
        return Verdict(NAME, "not checked", "no whole checkpoint is of a version that sampled something")
    if config.explorer.rollout_model.top_p < 1:
        return Verdict(NAME, "not checked", "explorer.rollout_model.top_p < 1: the logprobs are not the model's own")
    limit = TOLERANCE[config.model.dtype]
    violations: list[str] = []
    largest, others, count = 0.0, [], 0
    for version, found in usable.items():
        for experience, difference in zip(found, _differences(config, by_version[version], found), strict=True):
            count += 1
            largest = max(largest, difference)
            if difference > limit:
                violations.append(
                    f"experience {experience.eid.uid} names version {version[0]}.{version[1]}, whose weights differ "
                    f"from its logprobs by {difference:.3g} nats a token, wanted at most {limit:g}"
                )
        if (other := next((path for one, path in by_version.items() if one != version), None)) is not None:
            others += _differences(config, other, found)
    power = f"; under another checkpoint's weights {sum(others) / len(others):.2g} on average" if others else ""
    return judged(
        NAME,
        violations,
        lambda: (
            f"{count} experiences of {len(usable)} checkpoints' versions differ by at most {largest:.1e} nats{power}"
        ),
    )


def _is_comparable(experience: Experience) -> bool:
    return (
        experience.experience_type == "single_turn"
        and experience.logprobs is not None
        and experience.logprobs.numel() > 0
        and experience.multi_modal_inputs is None
        and (experience.temperature or 1.0) > 0
    )


def _differences(config: Config, folder: Path, found: Sequence[Experience]) -> list[float]:
    """Return the mean absolute difference of the logprobs of each experience, in nats."""
    from transformers import AutoModelForCausalLM

    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, config.model.dtype), trust_remote_code=config.model.trust_remote_code
        ).eval()
    with torch.inference_mode():
        return [_difference(model, one) for one in found]


def _difference(model: torch.nn.Module, experience: Experience) -> float:
    assert experience.logprobs is not None
    tokens, start = experience.tokens.long(), experience.prompt_length
    logits: Tensor = model(input_ids=tokens[None]).logits[0, start - 1 : -1].float()
    own = torch.log_softmax(logits / (experience.temperature or 1.0), dim=-1)
    own = own.gather(1, tokens[start:, None])[:, 0]
    return float((own - experience.logprobs.float()).abs().mean())
