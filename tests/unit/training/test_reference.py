"""The reference model: how it follows the policy, and that a restart goes on with the same one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import Qwen3ForCausalLM

from tests.unit.training.test_learner import Opener, batch, config, plain_logprobs, same, weights_of
from trinity_mq.config import Config
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.packing import train_tokens
from trinity_mq.training.reference import Reference

Weights = dict[str, torch.Tensor]


def held(**reference: Any) -> Config:
    return config(kl={"kind": "k2", "coef": 0.1}, reference=reference, lr=1e-2)


def reference_of(learner: TorchLearner) -> Weights:
    assert learner.reference is not None
    return {name: tensor.clone() for name, tensor in learner.reference.policy.weights()}


def mixed(before: Weights, policy: Weights, decay: float) -> Weights:
    return {name: decay * before[name] + (1 - decay) * policy[name] for name in before}


@pytest.mark.parametrize("offload", [False, True])
def test_logprobs_are_at_the_temperature_of_the_sample(
    folder: Path, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, experiences = held(offload=offload), batch(1)
    assert len({one.temperature for one in experiences}) > 1
    reference = Reference.load(settings, folder, None)
    places: list[str] = []
    monkeypatch.setattr(reference.policy.model, "to", lambda device: places.append(str(device)))
    tokens = train_tokens(experiences, settings.algorithm, {"rl": 1.0}, 1)
    found = reference.logprobs(tokens.micro_batches(range(len(experiences)), 40), tokens.tokens)
    assert places == ["cpu", "cpu"][: 1 + offload], "to the policy's device, and away from it"
    with torch.no_grad():
        wanted = torch.cat([plain_logprobs(reference.policy.model, one) for one in experiences])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("update", "decay"), [("never", 1.0), ("copy", 0.0), ("ema", 0.75)])
async def test_it_follows_the_policy_every_so_many_steps(opened: Opener, update: str, decay: float) -> None:
    settings = held(update=update, every_steps=2, **({"decay": decay} if update == "ema" else {}))
    learner = await opened(settings)
    wanted = first = reference_of(learner)
    for step in range(1, 5):
        await learner.step(batch(step), step)
        policy = await weights_of(learner)
        assert not same(policy, first)
        if step % 2 == 0:
            wanted = mixed(wanted, policy, decay)
        for name, tensor in reference_of(learner).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-7)
        if update == "copy" and step % 2 == 0:
            assert same(reference_of(learner), policy)
    assert same(reference_of(learner), first) is (update == "never")


@pytest.mark.parametrize("offload", [False, True])
async def test_how_far_the_policy_is_from_it_is_a_metric(folder: Path, opened: Opener, offload: bool) -> None:
    """The means over all trained tokens of samples, before the optimizer step."""
    plain = [await opened(config(kl=None, lr=1e-2)), await opened(held(offload=offload))]
    names = {"actor/kl_ref_k1", "actor/kl_ref_k3"}
    for learner, known in zip(plain, (set(), names), strict=True):
        assert names & (await learner.step(batch(1), 1)).keys() == known
    experiences = batch(2)
    for one in experiences:
        if one.response_length > 2:
            one.action_mask[1] = False
    policy = plain[1].policy.model
    reference = Qwen3ForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = [plain_logprobs(policy, one) - plain_logprobs(reference, one) for one in experiences]
    apart = torch.cat([row[one.action_mask.bool()] for one, row in zip(experiences, rows, strict=True)])
    metrics = await plain[1].step(experiences, 2)
    assert metrics["actor/kl_ref_k1"] == pytest.approx(float(apart.mean()), abs=1e-5)
    assert metrics["actor/kl_ref_k3"] == pytest.approx(float(((-apart).exp() - 1 + apart).mean()), abs=1e-5)
    assert metrics["actor/kl_ref_k3"] > 1e-5


async def test_its_weights_are_in_the_checkpoint_only_if_they_moved_and_stay_where_it_is_to_move_no_more(
    tmp_path: Path, opened: Opener
) -> None:
    learner = await opened(held(update="copy", every_steps=2))
    for step, moved in ((1, False), (2, True)):
        await learner.step(batch(step), step)
        (folder := tmp_path / str(step)).mkdir()
        await learner.save(folder)
        names = FileSystemReader(folder / "state").read_metadata().state_dict_metadata
        assert any(name.startswith("reference.") for name in names) == moved
        assert (await opened(held(), checkpoint=folder)).reference.has_moved == moved
    still = await opened(held(), checkpoint=tmp_path / "2")
    await still.step(batch(3), 3)
    (tmp_path / "3").mkdir()
    await still.save(tmp_path / "3")
    assert same(reference_of(await opened(held(), checkpoint=tmp_path / "3")), reference_of(learner))
    (tmp_path / "2" / "state" / ".metadata").write_bytes((tmp_path / "1" / "state" / ".metadata").read_bytes())
    with pytest.raises(DamagedCheckpointError, match=r"does not fit the model: it has no tensor 'reference\."):
        await opened(held(), checkpoint=tmp_path / "2")


async def test_a_step_that_changes_nothing_leaves_it(opened: Opener) -> None:
    learner = await opened(held(update="copy", every_steps=1))
    await learner.step(batch(1), 1)
    before, bad = reference_of(learner), batch(2)
    for one in bad:
        one.logprobs = torch.full_like(one.logprobs, math.nan)
    await learner.step(bad, 2)
    assert same(reference_of(learner), before)
