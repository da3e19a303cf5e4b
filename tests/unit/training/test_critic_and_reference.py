"""The critic: values at the right positions, its loss, checkpoints, warm-up, and values that it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import Qwen3ForCausalLM

from tests.unit.training.test_learner import Opener, batch, config, plain_logprobs, same, state_of, weights_of
from trinity_mq.algorithms.estimators import estimate
from trinity_mq.config import Config
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.training.advantages import AdvantageResult, Memory, trainer_advantages
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.critic import Critic, Targets
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.packing import DivisionSettings, train_tokens
from trinity_mq.training.reference import Reference


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
    tokens = train_tokens(found.batch, settings.algorithm, {"rl": 1.0}, 1)
    batches = tokens.micro_batches(range(len(found.batch)), critic.division)
    before = [one.detach().clone() for one in critic.parameters]
    finite, _ = critic.optimizer_step(batches, Targets(targets.old, targets.returns * float("inf")))
    assert not finite
    assert all(torch.equal(one, other) for one, other in zip(critic.parameters, before, strict=True))


def critic_of(learner: TorchLearner) -> Critic:
    assert learner.critic is not None
    return learner.critic


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


def test_a_resumed_critic_has_the_settings_of_the_configuration(folder: Path) -> None:
    saved = Critic(ppo(), folder).parts()
    algorithm = ppo(lr=2e-3).algorithm
    optimizer = algorithm.optimizer.model_copy(update={"betas": (0.5, 0.6)})
    settings = ppo().model_copy(update={"algorithm": algorithm.model_copy(update={"optimizer": optimizer})})
    critic = Critic(settings, folder)
    critic.restore(saved)
    assert [(group["lr"], group["betas"]) for group in critic.optimizer.param_groups] == [(2e-3, (0.5, 0.6))]


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


ROLES = ("black", "white")


def played(seed: int) -> list[Experience]:
    """Rewarded answers of two players."""
    experiences = batch(seed)
    for number, one in enumerate(experiences):
        one.advantages, one.reward = None, 0.25 * number - seed
        one.info = {"role": ROLES[number % 2]}
    return experiences


def moved_baselines(seeds: list[int]) -> dict[str, float]:
    """Return the averages after the answers of some train steps, one reward after the other (decay .95)."""
    result: dict[str, float] = {}
    for seed in seeds:
        for one in played(seed):
            role = one.info["role"]
            result[role] = 0.95 * result.get(role, 0.0) + 0.05 * float(one.reward or 0.0)
    return result


async def baselines(learner: TorchLearner) -> dict[str, float]:
    return dict((await state_of(learner))["memory"].facts["baselines"])


async def test_the_step_is_that_of_advantages_computed_by_hand(opened: Opener) -> None:
    learner, by_hand = await opened(config(algorithm_type="rae")), await opened(config(**CLIPPED))
    for step in (1, 2):
        before, experiences = moved_baselines(list(range(1, step))), played(step)
        for one in experiences:
            role, reward = one.info["role"], float(one.reward or 0.0)
            one.advantages = torch.full_like(one.logprobs, reward - before.get(role, 0.0))
            before[role] = 0.95 * before.get(role, 0.0) + 0.05 * reward
        await learner.step(played(step), step)
        await by_hand.step(experiences, step)
    assert same(await weights_of(learner), await weights_of(by_hand))


CLIPPED: dict[str, Any] = {"surrogate": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}}


async def test_a_step_that_changes_nothing_leaves_the_baselines(opened: Opener) -> None:
    learner = await opened(config(algorithm_type="rae"))
    await learner.step(played(1), 1)
    before = await baselines(learner)
    bad, without = played(2), played(2)
    for one in bad:
        one.logprobs = torch.full_like(one.logprobs, math.nan)
    metrics = await learner.step(bad, 2)
    assert metrics["actor/optimizer_steps"] == 0
    assert await baselines(learner) == before
    without[-1].info = {}
    with pytest.raises(ValueError, match=r"has info\['role'\] None, wanted the name of who acted"):
        await learner.step(without, 2)
    assert await baselines(learner) == before
    await learner.step(played(2), 2)
    assert await baselines(learner) == pytest.approx(moved_baselines([1, 2]), abs=1e-12)


async def test_a_checkpoint_of_other_contents_is_damaged(tmp_path: Path, opened: Opener) -> None:
    settings = config(algorithm_type="rae")
    learner = await opened(settings)
    await learner.step(played(1), 1)
    await learner.save(tmp_path)
    facts = json.loads((tmp_path / "learner.json").read_text())
    (tmp_path / "learner.json").write_text(json.dumps(facts | {"memory": {"basline": {}}}))
    with pytest.raises(DamagedCheckpointError, match=r"does not fit this run.*basline"):
        await opened(settings, checkpoint=tmp_path)


def penalised(algorithm: str = "reinforceplusplus", **reward_kl: Any) -> Config:
    return config(algorithm_type=algorithm, kl=None, repeat_times=2, reward_kl=reward_kl, max_tokens=50)


@torch.no_grad()
def differences(folder: Path, experiences: list[Experience]) -> list[torch.Tensor]:
    """Return ``log mu - log ref`` of the response tokens of each, the first model being the reference."""
    plain = Qwen3ForCausalLM.from_pretrained(folder).eval()
    return [one.logprobs - plain_logprobs(plain, one) for one in experiences]


@pytest.mark.parametrize(("kind", "kl"), [("k1", lambda d: d), ("k2", lambda d: d**2 / 2), ("abs", torch.abs)])
def test_the_kl_is_taken_from_the_rewards_of_trained_tokens(folder: Path, kind: str, kl: Any) -> None:
    """By forward passes of each sequence alone, at the temperature of its sample."""
    settings, experiences = penalised(kind=kind, coef=0.3), rewarded(1)
    assert len({one.temperature for one in experiences}) > 1
    experiences[4].reward = None
    whole = ExperienceBatch.of(experiences)
    found = trainer_advantages(whole, settings, {"rl": 1.0}, 1, Memory(), None, Reference.load(settings, folder, None))
    kls = [kl(one) for one in differences(folder, experiences)]
    wanted, _ = estimate(whole, settings.algorithm.estimator, token_penalty=0.3 * torch.cat(kls))
    assert len(found.batch) == len(experiences) - 1
    torch.testing.assert_close(found.batch.dense("advantages"), wanted.dense("advantages"), rtol=0, atol=1e-5)
    means = [float(one[each.action_mask.bool()].mean()) for one, each in zip(kls, experiences, strict=True)]
    assert found.metrics["actor/kl_reward"] == pytest.approx(sum(means) / len(means), abs=1e-5)
    assert found.metrics["actor/kl_reward_coef"] == 0.3
    assert found.ref is not None
    kept = [one.logprobs - each for one, each in zip(experiences, differences(folder, experiences), strict=True)]
    ref = [row[one.action_mask.bool()] for one, row in zip(experiences, kept, strict=True) if one.reward is not None]
    torch.testing.assert_close(found.ref, torch.cat(ref), rtol=0, atol=1e-5)


def test_a_critic_learns_the_rewards_less_the_kl(folder: Path) -> None:
    settings, experiences = penalised("ppo", coef=0.5), rewarded(1)
    models = Critic(settings, folder), Reference.load(settings, folder, None)
    found = trainer_advantages(ExperienceBatch.of(experiences), settings, {"rl": 1.0}, 1, Memory(), *models)
    assert found.targets is not None
    first, trained = differences(folder, experiences)[0], experiences[0].action_mask.bool()
    wanted = float(experiences[0].reward or 0.0) - 0.5 * float(first[trained].sum())
    assert float(found.targets.returns[0]) == pytest.approx(wanted, abs=1e-5), "values are 0 at first"


async def test_the_coefficient_moves_only_with_a_target(tmp_path: Path, opened: Opener) -> None:
    settings = penalised(coef=0.1, target=0.01, horizon=24)
    learner = await opened(settings)
    used = [(await learner.step(rewarded(step), step))["actor/kl_reward_coef"] for step in (1, 2, 3)]
    assert used[0] == 0.1
    assert used[1] in (pytest.approx(0.1 * (1 + 0.2 * 12 / 24)), pytest.approx(0.1 * (1 - 0.2 * 12 / 24)))
    assert len(set(used)) == 3
    await learner.save(tmp_path)
    fixed = await opened(penalised(coef=0.25), checkpoint=tmp_path)
    assert (await fixed.step(rewarded(4), 4))["actor/kl_reward_coef"] == 0.25, "without a target the setting counts"


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
    found = reference.logprobs(tokens.micro_batches(range(len(experiences)), DivisionSettings(40)), tokens.tokens)
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
