"""Train steps with composed losses: passes before the step, a reference, components, and how a step may be cut."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.unit.training.test_learner import Opener, batch, config, same, state_of, weights_of
from trinity_mq.algorithms.evaluator import component_weights
from trinity_mq.config import AlgorithmConfig, Config, TrainerConfig
from trinity_mq.config.agents import GuardConfig
from trinity_mq.config.algorithm.needs import needs
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.training.guard import HISTORY, LEAST_HISTORY, Guard, TrainingStopped, skip_reason
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.model.attention import Packing
from trinity_mq.training.model.policy import LearnerError, Policy
from trinity_mq.training.packing import SAMPLED, DivisionSettings, train_tokens
from trinity_mq.training.update import StepLoss, accumulate, compares_tokens, length_metrics, score, step_columns

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"algorithm_type": "gspo"},
    "prompt": {"reduction": {"kind": "prompt"}},
    "decoupled": {"algorithm_type": "decoupled"},
    "m2po": {"algorithm_type": "m2po"},
    "kl_cov": {"algorithm_type": "kl_cov", "regularisers": [{"kind": "covariance", "share": 0.1}]},
    "clip_v": {"correction": [{"kind": "vocabulary_clip", "bound": 0.5, "share": 0.1}]},
    "kl": {"kl": {"kind": "k3", "coef": 0.1}},
    "mix": {"algorithm_type": "mix"},
    "dpo": {"algorithm_type": "dpo"},
}


def with_algorithm(base: Config, **algorithm: Any) -> Config:
    """Return a configuration with another algorithm and the same optimizer."""
    kept = {name: getattr(base.algorithm, name) for name in ("optimizer", "mini_batches", "epochs", "entropy_coef")}
    return base.model_copy(update={"algorithm": AlgorithmConfig.model_validate(kept | algorithm)})


def rows(name: str, size: int = 9) -> list[Experience]:
    """Return what an algorithm trains on: samples of several ages, some answers to imitate, or pairs."""
    samples = batch(3, size)
    for number, one in enumerate(samples):
        one.versions = [(0, 1, number % 3)]
    if name == "mix":
        for one in samples[::3]:
            one.info = {"is_expert": True}
    if name == "dpo":
        return [
            Experience(
                eid=EID(1, number, 0, suffix="s"),
                tokens=one.tokens[: one.prompt_length],
                chosen=one.tokens[one.prompt_length :],
                rejected=other.tokens[other.prompt_length :],
            )
            for number, (one, other) in enumerate(itertools.pairwise(samples))
        ]
    return samples


def gradient(
    folder: Path,
    algorithm: AlgorithmConfig,
    experiences: list[Experience],
    budget: int,
    ranks: int = 1,
    entropy: float = 0.01,
    packing: Packing = "padded",
) -> torch.Tensor:
    """Return the gradient of an optimizer step, summed over ``ranks`` that share its micro-batches out."""
    policy, other = (Policy(config().model, folder, 0, TrainerConfig(packing=packing)) for _ in range(2))
    with torch.no_grad():  # a reference that is not the policy
        for number, parameter in enumerate(other.parameters):
            parameter.mul_(1 + 0.01 * (number % 3))
    loss = StepLoss(algorithm, component_weights(algorithm, 4), entropy)
    tokens = train_tokens(experiences, algorithm, loss.weights, 4)
    every, division = range(len(experiences)), DivisionSettings(budget, packed=policy.packs)
    batches = tokens.micro_batches(every, division, algorithm.reduction)
    columns = {"ref": score(other, batches, tokens.tokens)[0], "old": score(other, batches, tokens.tokens)[0]}
    if compares_tokens(algorithm):
        scored = score(policy, batches, tokens.tokens, needs(algorithm, loss.weights))
        columns |= step_columns(tokens.whole_step(every, algorithm.reduction), scored, columns, loss, "seed").columns
    assert len(batches) >= ranks
    for rank in range(ranks):
        accumulate(policy, batches[rank::ranks], loss, columns)
    return torch.cat([one.grad.flatten() for one in policy.parameters if one.grad is not None])


@pytest.mark.parametrize("name", SETTINGS)
def test_how_a_step_is_cut_does_not_change_its_gradient(folder: Path, name: str) -> None:
    algorithm = AlgorithmConfig.model_validate(SETTINGS[name])
    experiences = rows(name)
    whole = gradient(folder, algorithm, experiences, 16384)
    assert whole.abs().max() > 1e-6
    for found in (
        gradient(folder, algorithm, experiences, 40),
        gradient(folder, algorithm, experiences[::-1], 40),
        gradient(folder, algorithm, experiences, 40, ranks=2),
        gradient(folder, algorithm, experiences, 16384, packing="packed"),
        gradient(folder, algorithm, experiences, 24, packing="packed"),
        gradient(folder, algorithm, experiences[::-1], 24, packing="packed", ranks=2),
    ):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "distill"])
async def test_every_preset_makes_a_train_step(opened: Opener, name: str) -> None:
    base = config()
    settings = with_algorithm(base, algorithm_type=name)
    learner = await opened(settings)
    before = await weights_of(learner)
    kind = {"pair": "dpo", "ce": "mix"}.get(next(iter(component_weights(settings.algorithm, 1))), "grpo")
    experiences = rows(kind if "mix" not in name else "mix")
    if settings.algorithm.advantage_agent == "trainer":
        for number, one in enumerate(experiences):
            one.advantages, one.reward, one.info = None, float(number), {"role": "player"}
    metrics = await learner.step(experiences, 4)
    assert metrics["actor/optimizer_steps"] == 1
    assert metrics["actor/grad_norm"] > 0
    assert not same(before, await weights_of(learner))


CLASSES = """
import torch
from torch.nn.functional import logsigmoid

from trinity_mq.algorithms import EntropyLossFn, KLFn, PolicyLossFn, aggregate_loss


class Clip(PolicyLossFn):
    def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs):
        ratio = torch.exp(logprob - old_logprob)
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * 3.0), loss)
        return aggregate_loss(loss, action_mask), {"clip_mean": aggregate_loss(ratio, action_mask).item()}


class K2(KLFn):
    def calculate_kl(self, logprob, ref_logprob, old_logprob=None):
        return (logprob - ref_logprob) ** 2 / 2


class Bonus(EntropyLossFn):
    def __init__(self, entropy_coef=0.0):
        self.entropy_coef = entropy_coef

    def __call__(self, entropy, action_mask, loss_agg_mode, **kwargs):
        return aggregate_loss(entropy, action_mask, loss_agg_mode) * self.entropy_coef, {}


class Imitate(PolicyLossFn):
    def __call__(self, logprob, action_mask, **kwargs):
        return aggregate_loss(-logprob, action_mask), {}


class Mix(PolicyLossFn):
    def __call__(self, logprob, old_logprob, action_mask, advantages, expert_mask, **kwargs):
        clip, _ = Clip().__call__(
            logprob[~expert_mask], old_logprob[~expert_mask], action_mask[~expert_mask], advantages[~expert_mask]
        )
        return 0.9 * clip + 0.1 * aggregate_loss(-logprob[expert_mask], action_mask[expert_mask]), {}


class Pairs(PolicyLossFn):
    def __call__(self, logprob, ref_logprob, action_mask, **kwargs):
        ratio = ((logprob - ref_logprob) * action_mask).sum(1)
        return -logsigmoid(0.1 * (ratio[::2] - ratio[1::2])).mean(), {}
"""
CLASS_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (
        {"surrogate": {"kind": "clip", "low": 0.2, "high": 0.28, "dual": 3.0}, "kl": {"kind": "k2", "coef": 0.1}},
        {
            "surrogate": {"kind": "learner_class_forms.Clip"},
            "kl_loss": {"kind": "learner_class_forms.K2", "args": {"kl_coef": 0.1}},
            "entropy_loss": {"kind": "learner_class_forms.Bonus", "args": {"entropy_coef": 0.02}},
        },
    ),
    "sft": ({"algorithm_type": "sft"}, {"algorithm_type": "sft", "surrogate": {"kind": "learner_class_forms.Imitate"}}),
    "mix": (
        {
            "algorithm_type": "mix",
            "surrogate": {"kind": "clip", "low": 0.2, "high": 0.28, "dual": 3.0},
            "weights": {"rl": 0.9, "ce": 0.1},
            "reduction": {"kind": "token"},
        },
        {"algorithm_type": "mix", "surrogate": {"kind": "learner_class_forms.Mix"}},
    ),
    "dpo": (
        {"algorithm_type": "dpo"},
        {"algorithm_type": "dpo", "surrogate": {"kind": "learner_class_forms.Pairs", "reference": True}},
    ),
}


@pytest.mark.usefixtures("fresh_imports")
@pytest.mark.parametrize("name", CLASS_FORMS)
async def test_losses_in_class_form_train_as_the_built_in_losses(tmp_path: Path, opened: Opener, name: str) -> None:
    (tmp_path / "learner_class_forms.py").write_text(CLASSES)
    add_plugins([str(tmp_path)])
    built_in, classes = CLASS_FORMS[name]
    shared: dict[str, Any] = {"mini_batches": 2, "epochs": 2}
    entropy = 0.02 if name == "grpo" else 0.0
    weights, metrics = [], []
    for algorithm in (built_in | {"entropy_coef": entropy}, classes | {"entropy_coef": 0.0}):
        learner = await opened(with_algorithm(config(max_tokens=40), **shared, **algorithm))
        start = await weights_of(learner)
        for step in (1, 2):
            metrics.append(await learner.step(rows(name), step))
        weights.append(await weights_of(learner))
        assert not same(start, weights[-1])
    for key, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][key], tensor, rtol=1e-3, atol=2e-5)
    for first, second in zip(metrics[:2], metrics[2:], strict=True):
        assert second["actor/loss"] == pytest.approx(first["actor/loss"], rel=1e-4, abs=1e-6)
        assert second["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=1e-4)
    if name == "grpo":
        for key in ("actor/pg_loss", "actor/kl_loss", "actor/entropy_loss"):
            assert metrics[2][key] == pytest.approx(metrics[0][key], rel=1e-3, abs=1e-6), key
        assert metrics[2]["actor/clip_mean"] == pytest.approx(metrics[2]["actor/ratio_mean"], rel=1e-4)


async def sampled_by(learner: Any, experiences: list[Experience]) -> list[Experience]:
    """Return the experiences with the learner's own logprobs, as an engine without any difference would give them."""
    policy = learner.policy
    tokens = train_tokens(experiences, AlgorithmConfig(), {"rl": 1.0}, 1)
    batches = tokens.micro_batches(tokens.experiences({SAMPLED}), policy.division)
    logprobs = score(policy, batches, tokens.tokens).logprob
    start = 0
    for one in experiences:
        size = int(one.action_mask.sum()) if one.action_mask is not None else 0
        assert one.logprobs is not None
        one.logprobs = one.logprobs.clone()
        one.logprobs[one.action_mask] = logprobs[start : start + size]
        start += size
    return experiences


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_not_trained_on_never_matters(folder: Path, name: str) -> None:
    """Logprobs and advantages of masked tokens may be anything, experiences without a trained token too."""
    algorithm = AlgorithmConfig.model_validate(SETTINGS[name])

    def given(value: float) -> list[Experience]:
        experiences = rows(name)
        for one in experiences:
            if one.logprobs is None or one.advantages is None or one.response_length < 3:
                continue
            out = torch.arange(one.response_length) % 3 == 1
            one.action_mask = ~out
            one.logprobs = torch.where(out, value, one.logprobs)
            one.advantages = torch.where(out, -value, one.advantages)
        return experiences

    plain = gradient(folder, algorithm, given(-1.0), 40)
    more = given(-1000.0)
    if name != "dpo":
        unused = batch(5, 1)[0]
        unused.action_mask = torch.zeros(unused.response_length, dtype=torch.bool)
        more.insert(4, unused)
    torch.testing.assert_close(gradient(folder, algorithm, more, 40), plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("pieces", "passes"),
    [
        ({}, 0),
        ({"algorithm_type": "decoupled"}, 2),
        ({"algorithm_type": "m2po"}, 4),
        ({"algorithm_type": "m2po", "anchor": "old"}, 2 + 3),
        ({"algorithm_type": "clip_b", "anchor": "old"}, 2 + 3),
        ({"kl": {"kind": "k2", "coef": 0.1}}, 0),
        ({"kl": {"kind": "k2", "coef": 0.0}}, 0),
    ],
)
async def test_the_policy_is_scored_only_where_a_piece_needs_it(
    opened: Opener, pieces: dict[str, Any], passes: int
) -> None:
    """``passes``: what is scored without a gradient, in mini-batches. ``old`` takes the two of the train step once, a
    piece that compares tokens one for each of the four optimizer steps, the first of which has ``old``'s.
    """
    base = config(mini_batches=2, epochs=2)
    learner = await opened(with_algorithm(base, **pieces))
    scored: list[int] = []

    def watch(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            scored.append(named["input_ids"].numel())

    learner.policy.model.register_forward_pre_hook(watch, with_kwargs=True)
    experiences = [batch(3, 1)[0] for _ in range(8)]
    for one in experiences:
        one.versions = [(0, 1, 0)]
    metrics = await learner.step(experiences, 1)
    assert metrics["actor/optimizer_steps"] == 4
    assert sum(scored) == passes * 4 * experiences[0].response_length
    kl = pieces.get("kl")
    assert (learner.reference is not None) is bool(kl and kl["coef"])


async def test_a_reference_is_kept_over_a_restart_and_never_exchanged(
    folder: Path, tmp_path: Path, opened: Opener
) -> None:
    settings = with_algorithm(config(), kl={"kind": "k2", "coef": 0.1})
    learner = await opened(settings)
    first = await learner.step(rows("grpo"), 1)
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    await learner.save(tmp_path)
    then = await learner.step(rows("grpo"), 2)
    assert then["actor/kl_loss"] > 0
    resumed = await opened(settings, checkpoint=tmp_path)
    assert (await resumed.step(rows("grpo"), 2))["actor/kl_loss"] == then["actor/kl_loss"]
    facts = json.loads((tmp_path / "learner.json").read_text())
    facts["reference"]["origin"] = "0" * 16
    (tmp_path / "learner.json").write_text(json.dumps(facts))
    with pytest.raises(LearnerError, match=r"reference model in .* was trained with 0000000000000000"):
        await opened(settings, checkpoint=tmp_path)


async def test_one_engine_that_differs_from_the_trainer_is_seen(opened: Opener) -> None:
    learner = await opened(with_algorithm(config(), algorithm_type="grpo"))
    experiences = await sampled_by(learner, rows("grpo"))
    for number, one in enumerate(experiences):
        one.info["engine"] = f"engine-{number % 2}"
        if number % 2:
            one.logprobs -= 0.5
    metrics = await learner.step(experiences, 1)
    assert metrics["mismatch/k3/engine/engine-0"] < 1e-6
    assert metrics["mismatch/k3/engine/engine-1"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-3)


@pytest.mark.parametrize("name", ["grpo", "gspo", "m2po", "mix"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
async def test_a_token_without_a_finite_logprob_is_as_one_that_is_masked(
    opened: Opener, name: str, value: float
) -> None:
    async def stepped(unknown: bool) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        experiences = rows(name)
        for one in experiences:
            if one.logprobs is None or one.info.get("is_expert"):
                continue
            out = torch.arange(one.response_length) % 3 == 1
            one.logprobs = torch.where(out, value, one.logprobs) if unknown else one.logprobs
            one.action_mask = torch.ones_like(out) if unknown else ~out
        learner = await opened(with_algorithm(config(), **SETTINGS[name]))
        return await learner.step(experiences, 4), await weights_of(learner)

    (found, weights), (expected, wanted) = [await stepped(unknown) for unknown in (True, False)]
    assert found.pop("mismatch/unknown_logprobs") > expected.pop("mismatch/unknown_logprobs") == 0
    assert same(weights, wanted)
    speeds = {"perf/tokens_per_second", "perf/trained_tokens_per_second", "perf/tflops"}
    untimed = [{k: v for k, v in one.items() if k not in speeds and "time/" not in k} for one in (found, expected)]
    assert untimed[0] == untimed[1]


async def test_ratios_advantages_and_padding_are_measured(opened: Opener) -> None:
    """Over two micro-batches and two optimizer steps, against numbers of each token."""
    settings = with_algorithm(config(max_tokens=40, lr=1e-2, epochs=2), epochs=2)
    learner, experiences = await opened(settings), rows("grpo")
    tokens = train_tokens(experiences, settings.algorithm, {"rl": 1.0}, 4)
    batches = tokens.micro_batches(range(len(experiences)), DivisionSettings(40))
    assert len(batches) > 1
    logprob = score(learner.policy, batches, tokens.tokens)[0]
    before = (logprob - tokens.columns["mu"]).exp()
    metrics = await learner.step(experiences, 4)
    assert metrics["actor/ratio_min"] < metrics["actor/ratio_mean"] < metrics["actor/ratio_max"]
    assert metrics["actor/ratio_min"] <= before.min() * (1 + 1e-5)
    assert metrics["actor/ratio_max"] >= before.max() * (1 - 1e-5)
    advantages = torch.cat([one.advantages for one in experiences if one.advantages is not None])
    assert metrics["advantage/mean"] == pytest.approx(advantages.mean().item())
    assert metrics["advantage/std"] == pytest.approx(advantages.std(unbiased=False).item())
    assert metrics["advantage/pos_frac"] == pytest.approx((advantages > 0).float().mean().item())
    real = sum(len(one.tokens) - 1 for one in experiences)
    assert metrics["perf/padding_frac"] == pytest.approx(1 - real / sum(one.input_ids.numel() for one in batches))
    assert metrics["perf/padding_frac"] > 0


async def test_weights_left_out_sequences_and_decisions_are_measured(opened: Opener) -> None:
    """Over several micro-batches of one optimizer step, against numbers of each token."""
    rules = [
        {"kind": "weight", "high": 1.05},
        {"kind": "reject", "estimate": "k1", "level": "sequence_mean", "low": 0.95, "high": 1.5},
    ]
    settings = with_algorithm(config(max_tokens=40), anchor="old", correction=rules)
    learner, experiences = await opened(settings), rows("grpo")
    tokens = train_tokens(experiences, settings.algorithm, {"rl": 1.0}, 4)
    batches = tokens.micro_batches(range(len(experiences)), DivisionSettings(40))
    assert len(batches) > 1
    logprob, entropy, _ = score(learner.policy, batches, tokens.tokens)
    apart = logprob - tokens.columns["mu"]
    means = (-torch.stack([one.mean() for one in apart.split(tokens.counts.tolist())])).exp()
    out = (means < 0.95) | (means > 1.5)
    assert 0 < out.sum() < len(out)
    kept = torch.repeat_interleave(~out, torch.from_numpy(tokens.counts))
    weights = apart.exp().clamp(max=1.05).where(kept, 0.0)
    metrics = await learner.step(experiences, 4)
    assert metrics["offpolicy/seq_masked_frac"] == pytest.approx(out.float().mean().item())
    assert metrics["offpolicy/masked_frac"] == pytest.approx((~kept).float().mean().item())
    assert metrics["offpolicy/weight_max"] == pytest.approx(weights.max().item())
    assert metrics["offpolicy/weight_mean"] == pytest.approx(weights.mean().item())
    assert metrics["actor/ess"] == pytest.approx(1.0), "of ratios to the policy before the step"
    top = entropy.sort(descending=True).values[: round(0.2 * len(entropy))]
    assert metrics["actor/entropy_top20"] == pytest.approx(top.mean().item(), rel=1e-4)
    bypass = await opened(with_algorithm(config(max_tokens=40), anchor="mu"))
    metrics = await bypass.step(rows("grpo"), 4)
    ratio = apart.exp()
    assert metrics["actor/ess"] == pytest.approx((ratio.sum() ** 2 / len(ratio) / ratio.square().sum()).item())
    assert (metrics["offpolicy/weight_max"], metrics["offpolicy/seq_masked_frac"]) == (1.0, 0.0)


def answer(length: int, reward: float | None, **more: Any) -> Experience:
    return Experience(eid=EID(), tokens=[1] * (2 + length), prompt_length=2, reward=reward, **more)


def a_pair() -> Experience:
    return Experience(
        eid=EID(), experience_type="dpo", tokens=[1, 1], prompt_length=2, chosen=[1] * 3, rejected=[1] * 9
    )


def test_lengths_of_right_and_wrong_answers() -> None:
    found = length_metrics(
        ExperienceBatch.of(
            [
                answer(2, 1.0),
                answer(4, 0.5, metrics={"accuracy": 0.0}),
                answer(6, 0.0, truncate_status="response_truncated"),
                answer(8, None),
            ]
        )
    )
    assert found == {
        "prompt_length/mean": 2.0,
        "response_length/mean": 5.0,
        "response_length/max": 8.0,
        "response_length/clipped_frac": 0.25,
        "response_length/right/mean": 2.0,
        "response_length/wrong/mean": 5.0,
    }


def test_pairs_count_in_the_mean_alone() -> None:
    assert length_metrics(ExperienceBatch.of([a_pair()])) == {"prompt_length/mean": 2.0, "response_length/mean": 6.0}
    mixed = length_metrics(ExperienceBatch.of([a_pair(), answer(3, 1.0)]))
    assert (mixed["response_length/mean"], mixed["response_length/max"]) == (5.0, 3.0)


async def test_how_old_the_tokens_are_and_how_often_experiences_are_used(opened: Opener) -> None:
    experiences = batch(1)
    for number, one in enumerate(experiences):
        one.versions = [(0, 1, 8 - number % 3)]
    ages = torch.cat([torch.full((one.response_length,), number % 3) for number, one in enumerate(experiences)]).float()
    metrics = await (await opened(config(epochs=2, mini_batches=3))).step(experiences, 9)
    assert metrics["sample/staleness/tokens/mean"] == pytest.approx(ages.mean().item())
    assert metrics["sample/staleness/tokens/max"] == 2.0
    assert metrics["sample/staleness/tokens/age_0"] == pytest.approx((ages == 0).float().mean().item())
    assert metrics["sample/staleness/tokens/age_1_2"] == pytest.approx((ages > 0).float().mean().item())
    assert metrics["sample/staleness/tokens/age_8"] == 0.0
    assert metrics["data/trained_tokens"] == len(ages)
    assert metrics["data/reuse_mean"] == 2.0
    assert metrics["perf/micro_batches"] == 1.0
    experiences[0].advantages = torch.full_like(experiences[0].advantages, math.nan)
    spoiled = await (await opened(config(mini_batches=3))).step(experiences, 9)
    assert spoiled["data/reuse_mean"] == pytest.approx(2 / 3), "of three mini-batches one was skipped"


async def test_what_is_imitated_and_what_it_weighs(opened: Opener) -> None:
    experiences = batch(1)
    for one in experiences[:3]:
        one.info["is_expert"] = True
    metrics = await (await opened(config(algorithm_type="mix"))).step(experiences, 1)
    assert (metrics["data/expert_frac"], metrics["data/mu"]) == (0.25, pytest.approx(0.1))
    assert "data/mu" not in await (await opened(config())).step(batch(1), 1)


async def test_a_step_tells_how_long_its_parts_took_and_how_far_it_moved_the_weights(opened: Opener) -> None:
    plain = config(algorithm_type="decoupled", lr=1e-2)
    settings = plain.model_copy(update={"trainer": plain.trainer.model_copy(update={"peak_tflops": 0.5})})
    learner = await opened(settings)
    before = torch.cat([one.clone().flatten() for _, one in await learner.weights()])
    packed = learner.policy.parameters[0]
    packed.quant_state = SimpleNamespace(shape=torch.Size([2, packed.numel()]))  # 4-bit weights, two in a byte
    metrics = await learner.step(batch(1), 1)
    after = torch.cat([one.flatten() for _, one in await learner.weights()])
    assert metrics["actor/update_norm"] == pytest.approx((after - before).norm().item(), rel=1e-4)
    assert metrics["actor/weight_norm"] == pytest.approx(after.norm().item(), rel=1e-4)
    assert metrics["actor/grad_norm_clipped"] == min(metrics["actor/grad_norm"], 1.0)
    parts = [metrics[f"time/{part}"] for part in ("score", "forward", "backward", "optimizer")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) < metrics["time/train_step"]
    model = sum(one.numel() for one in learner.policy.parameters) + packed.numel()
    flops = 6 * model * metrics["perf/tokens_per_second"]
    assert metrics["perf/tflops"] == pytest.approx(flops / 1e12)
    assert metrics["perf/mfu"] == pytest.approx(metrics["perf/tflops"] / 0.5)
    trained = metrics["perf/trained_tokens_per_second"] / metrics["perf/tokens_per_second"]
    experiences = batch(1)
    assert trained == pytest.approx(
        sum(one.response_length for one in experiences) / sum(len(one.tokens) for one in experiences)
    )


WATCHFUL = GuardConfig(max_norm_ratio=10.0, max_mismatch=0.5)
USUAL = [1.0] * LEAST_HISTORY


@pytest.mark.parametrize(
    ("loss", "norm", "mismatch", "reason"),
    [
        (1.0, 1.0, 0.1, None),
        (math.nan, math.nan, 9.0, "nonfinite_loss"),
        (-math.inf, 1.0, None, "nonfinite_loss"),
        (1.0, math.inf, 9.0, "nonfinite_norm"),
        (1.0, math.nan, None, "nonfinite_norm"),
        (1.0, 10.1, 9.0, "norm_spike"),
        (1.0, 10.0, None, None),
        (1.0, 1.0, 0.6, "mismatch"),
        (1.0, 1.0, 0.5, None),
        (1.0, 1.0, None, None),
    ],
)
def test_the_first_thing_that_is_wrong_is_the_reason(
    loss: float, norm: float, mismatch: float | None, reason: str | None
) -> None:
    assert skip_reason(WATCHFUL, USUAL, loss=loss, norm=norm, mismatch=mismatch) == reason


def test_limits_are_off_by_default_and_norms_need_a_history() -> None:
    assert skip_reason(GuardConfig(), USUAL, loss=1.0, norm=1e9, mismatch=1e9) is None
    assert skip_reason(WATCHFUL, USUAL[:-1], loss=1.0, norm=1e9, mismatch=None) is None


def test_a_norm_is_compared_with_the_median_of_the_last_hundred_applied_ones() -> None:
    guard = Guard(WATCHFUL.model_copy(update={"max_consecutive_skips": None}))
    for norm in [100.0] * HISTORY:
        assert guard.judge(loss=1.0, norm=norm) is None
    assert guard.judge(loss=1.0, norm=1001.0) == "norm_spike"
    for _ in range(HISTORY):
        assert guard.judge(loss=1.0, norm=1.0) is None
    assert guard.state()["norms"] == [1.0] * HISTORY, "neither the old ones nor the spike"
    assert guard.judge(loss=1.0, norm=10.1) == "norm_spike"


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 6))
def test_it_stops_at_the_first_so_many_in_a_row(fates: list[bool], most: int) -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=most))
    in_a_row = 0
    for fine in fates:
        guard = Guard(guard.settings, guard.state())  # a restart in between changes nothing
        in_a_row = 0 if fine else in_a_row + 1
        if in_a_row == most:
            with pytest.raises(TrainingStopped, match=f"{most} optimizer steps in a row were skipped"):
                guard.judge(loss=1.0, norm=math.nan)
            return
        assert (guard.judge(loss=1.0, norm=1.0 if fine else math.nan) is None) == fine


def test_a_limit_beyond_the_history_of_norms_holds_too() -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=HISTORY + 50))
    for _ in range(HISTORY + 49):
        assert guard.judge(loss=math.nan, norm=1.0) == "nonfinite_loss"
    with pytest.raises(TrainingStopped, match="150 optimizer steps in a row"):
        guard.judge(loss=math.nan, norm=1.0)


def test_the_error_says_what_was_seen_and_what_to_do() -> None:
    guard = Guard(WATCHFUL, {"norms": USUAL, "skipped": ["nonfinite_loss", "norm_spike", "norm_spike", "norm_spike"]})
    with pytest.raises(TrainingStopped) as caught:
        guard.judge(loss=0.25, norm=300.0, mismatch=0.01)
    for words in (
        "5 optimizer steps in a row",
        "nonfinite_loss 1, norm_spike 4",
        "trainer.guard.max_consecutive_skips is 5",
        "gradient norm 300",
        "last 20 applied ones 1",
        "mismatch/k3 0.01",
        "trainer.guard.max_norm_ratio",
        "trainer.guard.max_consecutive_skips=null",
    ):
        assert words in str(caught.value)


# -- in the learner


def guarded(**guard: Any) -> Config:
    plain = config()
    return plain.model_copy(
        update={"trainer": plain.trainer.model_copy(update={"guard": GuardConfig.model_validate(guard)})}
    )


def loud(seed: int) -> list[Experience]:
    """A batch whose gradient is a thousand times as large as usual."""
    experiences = batch(seed)
    for one in experiences:
        one.advantages = one.advantages * 1000
    return experiences


async def test_a_spike_is_skipped_and_leaves_weights_moments_and_history_as_they_were(
    opened: Opener, tmp_path: Path
) -> None:
    learner = await opened(guarded(max_norm_ratio=10.0))
    for step in range(1, LEAST_HISTORY + 1):
        metrics = await learner.step(batch(step), step)
        assert metrics["actor/optimizer_steps"] == 1
    await learner.save(tmp_path)
    with capture_logs() as logs:
        metrics = await learner.step(loud(50), 21)
    assert (metrics["actor/optimizer_steps"], metrics["actor/skipped_norm_spike"]) == (0, 1)
    assert sum(value for name, value in metrics.items() if name.startswith("actor/skipped_")) == 1
    assert [(one["event"], one["reason"]) for one in logs] == [("optimizer_step_skipped", "norm_spike")]
    untouched = await opened(guarded(max_norm_ratio=10.0), checkpoint=tmp_path)
    norms = [(await state_of(one))["memory"].facts["guard"]["norms"] for one in (learner, untouched)]
    assert norms[0] == norms[1] != [], "the checkpoint has them"
    for one in (learner, untouched):
        metrics = await one.step(batch(60), 22)
        assert metrics["actor/optimizer_steps"] == 1
    assert same(await weights_of(learner), await weights_of(untouched))
    unguarded = await opened(guarded(), checkpoint=tmp_path)
    metrics = await unguarded.step(loud(50), 21)
    assert metrics["actor/optimizer_steps"] == 1, "off by default"
    assert metrics["actor/grad_norm"] > 10 > metrics["actor/grad_norm_clipped"] == 1.0


def with_a_weight_that_is_no_number(learner: TorchLearner, experiences: list[Experience]) -> None:
    with torch.no_grad():
        learner.policy.parameters[0][5] = math.nan


def with_a_gradient_that_overflows(learner: TorchLearner, experiences: list[Experience]) -> None:
    learner.policy.parameters[0].register_hook(lambda gradient: gradient * math.inf)


def sampled_by_other_weights(learner: TorchLearner, experiences: list[Experience]) -> None:
    for one in experiences:
        one.logprobs = one.logprobs - 3


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (with_a_weight_that_is_no_number, "nonfinite_loss"),
        (with_a_gradient_that_overflows, "nonfinite_norm"),
        (sampled_by_other_weights, "mismatch"),
    ],
)
async def test_a_step_is_skipped_for_its_reason(opened: Opener, spoil: Any, reason: str) -> None:
    learner, experiences = await opened(guarded(max_mismatch=0.5)), batch(1)
    spoil(learner, experiences)
    metrics = await learner.step(experiences, 1)
    assert (metrics["actor/optimizer_steps"], metrics[f"actor/skipped_{reason}"]) == (0, 1)
    assert all(map(math.isfinite, metrics.values()))
    if reason == "mismatch":
        assert metrics["mismatch/k3"] > 0.5, "what was wrong is told"
        metrics = await learner.step(batch(1), 2)
        assert (metrics["actor/optimizer_steps"], metrics["actor/skipped_mismatch"]) == (1, 0)
