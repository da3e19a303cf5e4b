"""The critic: values at the right positions, its loss, checkpoints, warm-up, and values that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.unit.training.test_learner import Opener, batch, config, same, weights_of
from trinity_mq.config import Config
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.training.advantages import AdvantageResult, Memory, trainer_advantages
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.critic import Critic, Targets
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.packing import train_tokens


def ppo(max_tokens: int = 16384, **critic: Any) -> Config:
    return config(algorithm_type="ppo", kl=None, repeat_times=1, max_tokens=max_tokens, critic={"lr": 1e-3, **critic})


def rewarded(seed: int) -> list[Experience]:
    """Answers of different lengths; some tokens are not trained on."""
    experiences = batch(seed)
    for number, one in enumerate(experiences):
        one.advantages, one.reward = None, 0.25 * number - 1
        if one.response_length > 2:
            one.action_mask[1] = False
    return experiences


def learned(critic: Critic, experiences: list[Experience], settings: Config) -> tuple[AdvantageResult, Targets]:
    """Return the advantages of train step 1 and what the critic learns in it."""
    whole = ExperienceBatch.of(experiences)
    found = trainer_advantages(whole, settings, {"rl": 1.0}, 1, Memory(), critic)
    assert found.targets is not None
    return found, found.targets


def shaken(critic: Critic) -> Critic:
    """Give the head weights that are not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        critic.module.head.weight.copy_(torch.randn(critic.module.head.weight.shape, generator=generator))
        critic.module.head.bias.fill_(0.3)
    return critic


def plain_values(folder: Path, critic: Critic, one: Experience) -> torch.Tensor:
    """Return the values of a sequence's trained tokens from a forward pass of it alone."""
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(one.tokens.long()[None], output_hidden_states=True).hidden_states[-1][0]
        before = hidden[one.prompt_length - 1 : -1][one.action_mask.bool()]
        return before @ critic.module.head.weight[0] + critic.module.head.bias


async def test_a_token_without_a_finite_logprob_has_no_value_and_no_advantage(opened: Opener) -> None:
    found = []
    for unknown in (True, False):
        experiences = rewarded(4)
        for one in experiences:
            if unknown:
                one.logprobs[0] = float("nan")
            elif one.response_length:
                one.action_mask[0] = False
        learner = await opened(ppo())
        metrics = await learner.step(experiences, 1)
        assert metrics["critic/skipped_nonfinite"] == metrics["actor/skipped_nonfinite_loss"] == 0
        found.append((metrics["critic/vf_loss"], metrics["actor/loss"], await weights_of(learner)))
    assert found[0][:2] == found[1][:2]
    assert same(found[0][2], found[1][2])


@pytest.mark.parametrize("is_left_out", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 40, 16384])
def test_a_value_is_of_the_state_before_its_token(folder: Path, max_tokens: int, is_left_out: bool) -> None:
    settings, experiences = ppo(max_tokens), rewarded(1)
    critic = shaken(Critic(settings, folder))
    if is_left_out:
        experiences[4].reward = None
    _, targets = learned(critic, experiences, settings)
    values = [plain_values(folder, critic, one) for one in experiences if one.reward is not None]
    torch.testing.assert_close(targets.old, torch.cat(values), rtol=0, atol=1e-5)


def test_values_are_zero_at_first_and_returns_are_then_the_rewards(folder: Path) -> None:
    settings, experiences = ppo(), rewarded(1)
    experiences[4].reward = None
    found, targets = learned(Critic(settings, folder), experiences, settings)
    rest = [one for number, one in enumerate(experiences) if number != 4]
    assert len(found.batch) == len(rest)
    wanted = [float(one.reward or 0.0) for one in rest for _ in range(int(one.action_mask.sum()))]
    assert targets.returns.tolist() == pytest.approx(wanted)
    assert targets.old.abs().max() == 0
    assert found.metrics["critic/explained_variance"] == pytest.approx(0.0)
    assert found.metrics["rollout/missing_rewards"] == 1


def test_a_return_that_is_not_finite_changes_nothing(folder: Path) -> None:
    settings, critic = ppo(), Critic(ppo(), folder)
    found, targets = learned(critic, rewarded(2), settings)
    batches = train_tokens(found.batch, settings.algorithm, {"rl": 1.0}, 1).micro_batches(
        range(len(found.batch)), 16384
    )
    before = [one.detach().clone() for one in critic.parameters]
    finite, _ = critic.optimizer_step(batches, Targets(targets.old, targets.returns * float("inf")))
    assert not finite
    assert all(torch.equal(one, other) for one, other in zip(critic.parameters, before, strict=True))


def critic_of(learner: TorchLearner) -> Critic:
    assert learner.critic is not None
    return learner.critic


async def test_a_checkpoint_without_its_critic_is_damaged(tmp_path: Path, opened: Opener) -> None:
    learner = await opened(config())
    await learner.save(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"does not fit the model: it has no tensor 'critic\."):
        await opened(ppo(), checkpoint=tmp_path)


async def test_only_the_critic_learns_in_the_warm_up(opened: Opener) -> None:
    learner = await opened(ppo(warmup_steps=2))
    before = await weights_of(learner)
    for _ in range(2):  # the run's step stands still
        metrics = await learner.step(rewarded(1), 1)
        assert (metrics["actor/optimizer_steps"], metrics["critic/optimizer_steps"]) == (0, 1)
        assert same(before, await weights_of(learner))
    assert critic_of(learner).module.head.weight.abs().max() > 0
    metrics = await learner.step(rewarded(1), 1)
    assert (metrics["actor/optimizer_steps"], metrics["critic/optimizer_steps"]) == (1, 1)
    assert not same(before, await weights_of(learner))


async def test_a_batch_without_rewards_trains_nothing(opened: Opener) -> None:
    learner = await opened(ppo())
    before, experiences = await weights_of(learner), rewarded(1)
    for one in experiences:
        one.reward = None
    metrics = await learner.step(experiences, 1)
    assert (metrics["actor/optimizer_steps"], metrics["critic/optimizer_steps"]) == (0, 0)
    assert same(before, await weights_of(learner))


async def test_values_explain_rewards_that_follow_from_the_prompt(opened: Opener) -> None:
    """The reward of an answer is that of its prompt's first digit: the critic alone has to find it."""
    learner = await opened(ppo(warmup_steps=1000, lr=3e-3))
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(60):
        experiences = []
        for run in range(32):
            tokens = torch.randint(2, 12, (5,), generator=generator).int()
            experiences.append(
                Experience(
                    eid=EID(step, run, 0),
                    tokens=tokens,
                    prompt_length=2,
                    logprobs=[-2.0] * 3,
                    reward=float(tokens[0] - 2) / 9,
                    temperature=1.0,
                )
            )
        found.append((await learner.step(experiences, 1))["critic/explained_variance"])
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert min(found[-5:]) > 0.5, [round(one, 2) for one in found]
