"""Checks that tokens were sampled by the weight version that they name: the weights of this version score the tokens,
and the logprobs are compared with the recorded logprobs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trinity_mq.config import Config
from trinity_mq.experience import Experience
from trinity_mq.messages import Version
from trinity_mq.models.model_folder import no_progress_bar
from trinity_mq.proof.invariants import InvariantVerdict, verdict_of
from trinity_mq.training.checkpoints.checkpoint import find_checkpoints

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1}
"""Maximum mean difference, in nats, between recorded logprobs of an experience and logprobs of the same weights. Other
kernels and batch shapes round differently. Early train steps change logprobs by more, which is checked with the weights
of another version."""
MOST_KEPT = 8
NAME = "tokens were sampled by the weights they name"


class WeightArchive:
    """Keeps the weights of a run's first and newest versions after the trainer has deleted their checkpoints, at most
    :data:`MOST_KEPT` versions.

    Args:
        checkpoints: The run's folder of checkpoints.
        folder: Folder for hard links to the weights, which take no space while the checkpoint exists.
    """

    def __init__(self, checkpoints: Path, folder: Path) -> None:
        self._checkpoints, self._folder = checkpoints, folder
        self._known_names: set[str] = set()
        self.folders: dict[Version, Path] = {}
        """Model folder for ``transformers`` by version."""

    def look(self) -> None:
        """Keep the weights of checkpoints that are new since the last call. Checkpoints deleted during the call are
        skipped.
        """
        with contextlib.suppress(OSError):
            names = {path.name for path in self._checkpoints.iterdir()}
            new, self._known_names = names - self._known_names, names
            if not new:
                return
            for checkpoint in reversed(find_checkpoints(self._checkpoints)[0]):
                version = (checkpoint.state.generation, checkpoint.state.step)
                if version not in self.folders and (checkpoint.path / "model" / "config.json").exists():
                    self._keep(version, checkpoint.path / "model")

    def clear(self) -> None:
        """Remove the kept weights."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self.folders.clear()

    def _keep(self, version: Version, model: Path) -> None:
        target = self._folder / f"{version[0]}-{version[1]}"
        with contextlib.suppress(OSError):  # the trainer has deleted the checkpoint
            shutil.copytree(model, target, copy_function=os.link, dirs_exist_ok=True)
            self.folders[version] = target
        if len(self.folders) > MOST_KEPT:
            newest_of_middle = sorted(self.folders)[MOST_KEPT // 2]
            shutil.rmtree(self.folders.pop(newest_of_middle), ignore_errors=True)


def check_tokens(
    config: Config, weights: Mapping[Version, Path], samples: Mapping[Version, Sequence[Experience]]
) -> InvariantVerdict:
    """Score experiences with the weights of their version, compare the logprobs with the recorded values, and return
    the verdict. This call blocks.

    Args:
        config: The run's configuration.
        weights: By version, a model folder for ``transformers``.
        samples: By version, experiences whose tokens all name this version.
    """
    usable = {
        version: comparable
        for version, experiences in samples.items()
        if version in weights and (comparable := [sample for sample in experiences if _is_comparable(sample)])
    }
    if not usable:
        return InvariantVerdict(NAME, "not checked", "no version that sampled tokens has kept weights")
    if config.algorithm.allow_truncated_sampling:
        return InvariantVerdict(
            NAME, "not checked", "algorithm.allow_truncated_sampling: logprobs may not be the model's own"
        )
    limit = TOLERANCE[config.model.dtype]
    violations: list[str] = []
    named_errors: list[float] = []
    other_errors: list[float] = []
    for version, experiences in sorted(usable.items()):
        differences = _differences(config, weights[version], experiences)
        named_errors += differences
        violations += [
            f"experience {experience.eid.uid} names version {version[0]}.{version[1]}, whose weights differ from its "
            f"logprobs by {difference:.3g} nats a token, wanted at most {limit:g}"
            for experience, difference in zip(experiences, differences, strict=True)
            if difference > limit
        ]
        if (
            other_folder := next((path for candidate, path in sorted(weights.items()) if candidate != version), None)
        ) is not None:
            other_errors += _differences(config, other_folder, experiences)
    distinguished = sum(difference > limit for difference in other_errors)
    if not violations and not distinguished:
        text = f"{len(named_errors)} experiences fit, but would also fit the weights of another version"
        return InvariantVerdict(NAME, "not checked", text)
    return verdict_of(
        NAME,
        violations,
        f"{len(named_errors)} experiences of {len(usable)} versions differ by at most {max(named_errors):.1e} nats; "
        f"of another version's weights {distinguished} would be told",
    )


def _is_comparable(experience: Experience) -> bool:
    return (
        experience.experience_type == "single_turn"
        and experience.logprobs is not None
        and experience.logprobs.numel() > 0
        and experience.multi_modal_inputs is None
        and (experience.temperature or 1.0) > 0
    )


def _differences(config: Config, folder: Path, experiences: Sequence[Experience]) -> list[float]:
    """Return the mean absolute logprob difference of each experience, in nats."""
    from transformers import AutoModelForCausalLM

    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, config.model.dtype), trust_remote_code=config.model.trust_remote_code
        ).eval()
    with torch.inference_mode():
        return [_difference(model, experience) for experience in experiences]


def _difference(model: torch.nn.Module, experience: Experience) -> float:
    assert experience.logprobs is not None
    tokens, start = experience.tokens.long(), experience.prompt_length
    logits: Tensor = model(input_ids=tokens[None]).logits[0, start - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (experience.temperature or 1.0), dim=-1)
    logprobs = logprobs.gather(1, tokens[start:, None])[:, 0]
    return float((logprobs - experience.logprobs.float()).abs().mean())
