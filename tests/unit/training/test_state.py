"""The learner's state in a checkpoint: copies, export, checksums, what is drawn at random, checkpoints of before."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from tests.unit.training.test_critic_and_reference import (
    baselines,
    critic_of,
    held,
    penalised,
    played,
    ppo,
    reference_of,
    rewarded,
)
from tests.unit.training.test_learner import Opener, batch, config, make_model, same, state_of, weights_of
from trinity_mq.config import Config, ModelConfig
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.models import ensure_model_folder
from trinity_mq.models.model_folder import has_chat_template
from trinity_mq.sync.channels.buckets import fill, plan, raw
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.checkpoints.old_checkpoint import OPTIMIZER_FILE
from trinity_mq.training.checkpoints.state import optimizer_state, read_parts
from trinity_mq.training.critic import CRITIC_OPTIMIZER
from trinity_mq.training.learner import TorchLearner


async def moments(learner: TorchLearner) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by parameter and name."""
    return (await state_of(learner))["optimizer"].tensors


async def save_as_before(learner: TorchLearner, folder: Path) -> None:
    """Write a checkpoint as the release before this format did."""
    parts, policy = await state_of(learner), learner.policy
    await learner.export(folder / "model")
    as_before = torch.optim.AdamW(policy.parameters, fused=True)  # one group, in the order of the model
    parameters = dict(policy.model.named_parameters())
    for place, tensor in parts["optimizer"].tensors.items():
        name, _, key = place.rpartition("/")
        as_before.state[parameters[name]][key] = tensor
    state: dict[str, Any] = {"optimizer": as_before.state_dict(), "rng": torch.get_rng_state()}
    state["memory"] = parts["memory"].facts
    if (reference := learner.reference) is not None:
        state |= {"reference": reference.origin, "reference_has_moved": reference.has_moved}
        if reference.has_moved:
            torch.save(reference.policy.model.state_dict(), folder / "reference.pt")
    torch.save(state, folder / "optimizer.pt")
    if (critic := learner.critic) is not None:
        one = {"backbone": critic.module.backbone.state_dict(), "head": critic.module.head.state_dict()}
        moved = {"optimizer": optimizer_state(parts[CRITIC_OPTIMIZER]), "steps": critic.steps}
        torch.save(one | moved, folder / "critic.pt")


CASES: dict[str, tuple[Config, Any]] = {
    "plain": (config(mini_batches=2, epochs=2, max_tokens=50), batch),
    "critic": (ppo(max_tokens=50, warmup_steps=1), rewarded),
    "moving reference": (held(update="ema", every_steps=1, decay=0.5), batch),
    "baselines": (config(algorithm_type="rae"), played),
    "kl in the rewards": (penalised(coef=0.1, target=0.01, horizon=24), rewarded),
}


@pytest.mark.parametrize("save", [TorchLearner.save, save_as_before])
@pytest.mark.parametrize("case", CASES)
async def test_training_continues_from_a_checkpoint_bit_for_bit(
    tmp_path: Path, opened: Opener, case: str, save: Callable[[TorchLearner, Path], Awaitable[Any]]
) -> None:
    """Also from a checkpoint of the release before this format."""
    settings, data = CASES[case]
    learner = await opened(settings, total_steps=10)
    for step in (1, 2):
        await learner.step(data(step), step)
    await save(learner, tmp_path)
    resumed = await opened(settings, checkpoint=tmp_path, total_steps=10)
    for step in (3, 4):
        metrics = [await one.step(data(step), step) for one in (learner, resumed)]
        assert metrics[0].keys() == metrics[1].keys()
        for name in metrics[0]:
            assert metrics[0][name] == metrics[1][name] or name.startswith(("time/", "perf/")), name
    assert same(await weights_of(learner), await weights_of(resumed))
    assert same(await moments(learner), await moments(resumed))
    if case == "critic":
        assert critic_of(learner).steps == critic_of(resumed).steps == 4
        assert all(map(torch.equal, critic_of(learner).parameters, critic_of(resumed).parameters))
    if case == "moving reference":
        assert same(reference_of(learner), reference_of(resumed))
    if case == "baselines":
        assert await baselines(learner) == await baselines(resumed) != {}


@pytest.mark.parametrize(
    ("file", "content"),
    [("optimizer.pt", b"no"), ("critic.pt", None), ("critic.pt", b"no"), ("model/model.safetensors", b"no")],
)
async def test_damage_in_a_checkpoint_of_the_release_before_is_named(
    tmp_path: Path, opened: Opener, file: str, content: bytes | None
) -> None:
    learner = await opened(ppo())
    await learner.step(rewarded(1), 1)
    await save_as_before(learner, tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"is damaged or missing|could be loaded from"):
        await opened(ppo(), checkpoint=tmp_path)


async def test_an_old_state_that_does_not_fit_is_damaged(tmp_path: Path, opened: Opener) -> None:
    learner = await opened()
    await save_as_before(learner, tmp_path)
    torch.save({"optimizer": {"state": {99: {"step": torch.ones(())}}}}, tmp_path / OPTIMIZER_FILE)
    with pytest.raises(DamagedCheckpointError, match=r"optimizer\.pt does not fit the model"):
        await opened(checkpoint=tmp_path)


@pytest.mark.parametrize("case", ["plain", "critic", "moving reference"])
async def test_what_is_staged_is_what_was_there_then_whatever_is_trained_while_it_is_written(
    tmp_path: Path, opened: Opener, case: str
) -> None:
    settings, data = CASES[case]
    learner = await opened(settings, total_steps=10)
    for step in (1, 2):
        await learner.step(data(step), step)
    (tmp_path / "now").mkdir()
    digest = await learner.save(tmp_path / "now")
    for number in (1, 2):  # the second copy is made into the buffers of the first
        write = await learner.stage()
        (tmp_path / f"later {number}").mkdir()
        written, _ = await asyncio.gather(write(tmp_path / f"later {number}"), learner.step(data(3), 3))
        assert (written == digest) == (number == 1)
    assert read(tmp_path / "later 1") == read(tmp_path / "now")
    assert read(tmp_path / "later 2") != read(tmp_path / "now")


def read(folder: Path) -> dict[str, Any]:
    """Return everything that a checkpoint holds, comparable."""
    parts = read_parts(folder, {})
    tensors = {
        f"{part}.{name}": (tensor.shape, tensor.numpy().tobytes())
        for part, one in parts.items()
        for name, tensor in one.tensors.items()
    }
    model = {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model/model.safetensors").items()}
    return {"tensors": tensors, "facts": json.loads((folder / "learner.json").read_text()), "model": model}


async def test_the_model_is_left_out_of_checkpoints_where_only_the_last_is_exported(
    folder: Path, tmp_path: Path, opened: Opener
) -> None:
    settings = config()
    settings = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"export": "last"})})
    learner = await opened(settings)
    await learner.step(batch(1), 1)
    await learner.save(tmp_path)
    assert not (tmp_path / "model").exists()
    resumed = await opened(settings, checkpoint=tmp_path)
    assert same(await weights_of(learner), await weights_of(resumed))
    await resumed.export(tmp_path / "final")
    fresh = await opened(settings, model=tmp_path / "final")
    assert same(await weights_of(learner), await weights_of(fresh))
    assert (tmp_path / "final/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (tmp_path / "final/generation_config.json").exists()


async def test_engines_take_the_model_of_a_checkpoint_for_the_same_model(tmp_path: Path, opened: Opener) -> None:
    settings = config()
    first = ensure_model_folder(settings.model, tmp_path / "first", 0)
    learner = await opened(settings, model=first)
    (tmp_path / "saved").mkdir()
    await learner.save(tmp_path / "saved")
    section = ModelConfig(model_path=str(tmp_path / "saved" / "model"))
    again = ensure_model_folder(section, tmp_path / "unused", 0)
    assert TextCodec.load(again).fingerprint() == TextCodec.load(first).fingerprint()
    assert has_chat_template(again)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
async def test_the_checksum_is_that_of_the_bytes_that_engines_get(
    tmp_path: Path, opened: Opener, dtype: str, tied: bool
) -> None:
    learner = await opened(config(dtype=dtype), model=make_model(tmp_path / "model", tied=tied))
    await learner.step(batch(1), 1)
    (tmp_path / "saved").mkdir()
    tensors = dict(await learner.weights())
    digest = await learner.save(tmp_path / "saved")
    for bucket_bytes in (1, 4096, 2**30):
        found = xxhash.xxh3_128()
        for bucket in plan(await learner.manifest(), bucket_bytes):
            found.update(raw(fill(bucket, tensors)))
        assert found.hexdigest() == digest


async def test_what_is_drawn_in_a_step_follows_from_its_number_alone(opened: Opener) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    found: list[tuple[float, float, float]] = []
    learner = await opened()
    learner.policy.model.register_forward_pre_hook(lambda *_: found.append(drawn()))
    for step in (3, 4, 3):
        await learner.step(batch(1), step)
    assert found[0] == found[2] != found[1]
