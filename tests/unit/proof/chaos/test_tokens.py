"""Experiences that name the wrong weights are found by scoring them with the right ones; tiny models, for real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from trinity_mq.config import Config, load_config
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import Version
from trinity_mq.models import ensure_model_folder
from trinity_mq.proof.chaos.tokens import MOST_KEPT, WeightArchive, check_tokens

OLD, NEW = (1, 3), (1, 4)


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config({"name": "tokens", "model": {"tiny": {"initializer_range": 0.5}}})


@pytest.fixture(scope="module")
def weights(config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[Version, Path]:
    """Two versions of one model."""
    folders = {version: tmp_path_factory.mktemp("model") / "folder" for version in (OLD, NEW)}
    return {version: ensure_model_folder(config.model, folder, version[1]) for version, folder in folders.items()}


def sampled(folder: Path, number: int, temperature: float = 0.7) -> Experience:
    """Return an experience whose logprobs are those of a model."""
    tokens = torch.tensor([3, 4, 5, 3, 2 + number % 3, 4])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens[None]).logits[0, 2:-1]
    logprobs = torch.log_softmax(logits / temperature, -1).gather(1, tokens[3:, None])[:, 0]
    return Experience(
        eid=EID(1, number), tokens=tokens, prompt_length=3, logprobs=logprobs, temperature=temperature, reward=0.0
    )


def test_tokens_of_the_weights_they_name_fit(config: Config, weights: dict[Version, Path]) -> None:
    samples = {version: [sampled(folder, n) for n in range(3)] for version, folder in weights.items()}
    verdict = check_tokens(config, weights, samples)
    assert verdict.result == "holds", verdict
    assert "6 experiences of 2 versions" in verdict.text
    assert "of another version's weights 6 would be told" in verdict.text


def test_tokens_of_other_weights_are_found(config: Config, weights: dict[Version, Path]) -> None:
    wrong = sampled(weights[OLD], 1)
    samples = {OLD: [sampled(weights[OLD], 0)], NEW: [sampled(weights[NEW], 0), wrong]}
    verdict = check_tokens(config, weights, samples)
    assert verdict.result == "violated"
    [line] = verdict.evidence
    assert wrong.eid.uid in line
    assert "names version 1.4" in line


def checkpoint(folder: Path, step: int) -> Path:
    """Write a checkpoint as far as it is looked at."""
    path = folder / f"progress-{step:06}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "config.json").write_text("{}")
    (path / "model" / "model.safetensors").write_text(f"weights of {step}")
    state = {"generation": 1, "step": step, "progress": step, "source": {}}
    (path / "trainer.json").write_text(json.dumps({"state": state, "files": {"model/config.json": 2}}))
    return path


def test_weights_are_kept_as_links_when_their_checkpoint_is_deleted(tmp_path: Path) -> None:
    kept = WeightArchive(tmp_path / "checkpoints", tmp_path / "kept")
    kept.look()  # there is no folder yet
    for step in range(1, 13):
        path = checkpoint(tmp_path / "checkpoints", step)
        kept.look()
        held = path / "model" / "model.safetensors"
        assert os.path.samefile(held, kept.folders[1, step] / "model.safetensors"), "it takes no room"
        held.unlink()
        (path / "trainer.json").unlink()
    assert len(kept.folders) == MOST_KEPT
    assert {(1, 1), (1, 2), (1, 11), (1, 12)} <= kept.folders.keys(), "the first and the newest"
    for (_, step), folder in kept.folders.items():
        assert (folder / "model.safetensors").read_text() == f"weights of {step}"
    assert len(list((tmp_path / "kept").iterdir())) == MOST_KEPT
    kept.clear()
    assert not (tmp_path / "kept").exists()
