"""Every loss, weight and mask of the vectors: value, gradient and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from tests.unit.algorithms.vectors import (
    PIECES,
    UPSTREAM,
    UPSTREAM_SUFFIX,
    VECTORS,
    Case,
    grid,
    of_kind,
    reduction_of,
    with_step_weights,
)
from trinity_mq.algorithms.corrections import correction, covariance, step_choice
from trinity_mq.algorithms.estimators import estimate
from trinity_mq.algorithms.estimators.teacher import jsd_advantage
from trinity_mq.algorithms.evaluator import (
    LossTerms,
    anchor_logprob,
    evaluate,
    needs_whole_step,
    schedule_value,
    token_losses,
)
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import LossConfig, Schedule
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.config.estimators import (
    DiscountedEstimator,
    Estimator,
    GaeEstimator,
    GigpoEstimator,
    GroupEstimator,
    LengthPenaltyWeights,
)
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.operators.rewards import LengthPenalty

CLIP: dict[str, Any] = {"kind": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}
PLAIN: dict[str, Any] = CLIP | {"dual": None}


LOSSES, WEIGHTS, MASKS = PIECES["loss"], PIECES["weight"], PIECES["mask"]
KL, LIKELIHOODS = PIECES["kl"], PIECES["likelihood"]

OWN_REDUCTION = {"gmpo", "luspo"}
"""The vector's mode is not what the algorithm does."""

SAMPLER = ("dppo_tv/prime-rl", "ipo/", "rollout_is/", "m2po", "decoupled_ppo/", "bypass/", "areal/")
"""Vectors that read the sampler's logprobs; the others know one old policy only, which is the anchor here."""

ELSEWHERE = {"mix", "mix_chord", "dpo", "dpo/label_smoothing", "dpo/ipo", "ref_kl/prime-rl"}


def test_every_loss_of_the_file_has_its_test() -> None:
    assert set(of_kind("loss")) - set(UPSTREAM) == {*LOSSES, *KL, *LIKELIHOODS, *ELSEWHERE}


@pytest.mark.parametrize("name", UPSTREAM)
def test_errors_of_others_are_not_repeated(name: str) -> None:
    """Ours is that of the vector without the suffix."""
    ours, theirs = (VECTORS[one]["expected"] for one in (name.removesuffix(UPSTREAM_SUFFIX), name))
    compared = [key for key in ("loss", "scores", "grad_logprob", "per_token") if theirs.get(key) is not None]
    assert any(ours[key] != theirs[key] for key in compared)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), grid(expected), rtol=1e-9, atol=1e-9)


def case_of(name: str) -> Case:
    vector = VECTORS[name]
    anchor = None if name.startswith(SAMPLER) else "old_logprob"
    return Case(vector["fixture"], anchor=anchor, advantages=vector["args"].get("advantages"))


def config_of(name: str, **pieces: Any) -> LossConfig:
    reduction = {} if name in OWN_REDUCTION else {"reduction": reduction_of(VECTORS[name]["args"])}
    return LossConfig.model_validate(pieces | reduction)


def evaluated(
    name: str, case: Case, views: Mapping[str, TokenView], config: LossConfig, weights: Mapping[str, float]
) -> LossTerms:
    """Return the terms of a loss, whose value and gradient are those of the vector."""
    terms, expected = evaluate(views, config, weights), VECTORS[name]["expected"]
    close(terms.loss.detach(), expected["loss"])
    terms.loss.backward()
    close(case.logprob.grad, expected["grad_logprob"])
    return terms


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name: str) -> None:
    expected, case = VECTORS[name]["expected"], case_of(name)
    config = config_of(name, **LOSSES[name])
    view = replace(case.view, scale=case.scaled(config.reduction))
    view = with_step_weights(view, config)
    view = replace(view, chosen=step_choice(view, config.regularisers))
    terms = evaluated(name, case, {"rl": view}, config, {"rl": 1.0})
    if expected["per_token"] is not None and not config.regularisers:
        losses, _ = token_losses(view, config)
        close(case.full(losses), expected["per_token"])
    found = {metric: value.item() / view.tokens for metric, value in terms.sums.items()}
    names = {"is_masked": "masked_frac"}
    for metric, value in (expected["metrics"] or {}).items():
        if names.get(metric, metric) in found:
            assert found[names.get(metric, metric)] == pytest.approx(value, abs=1e-9), metric


@pytest.mark.parametrize("name", KL)
def test_estimates_of_the_kl_to_a_reference(name: str) -> None:
    case, config = case_of(name), config_of(name, kl={"kind": KL[name], "coef": 1.0})
    view = replace(case.view, scale=case.scaled(config.reduction), advantage=torch.zeros_like(case.view.mu))
    terms = evaluated(name, case, {"rl": view}, config, {"rl": 1.0})
    close(terms.reduced["kl_loss"], VECTORS[name]["expected"]["loss"])


@pytest.mark.parametrize("name", [*LIKELIHOODS, "ref_kl/prime-rl"])
def test_likelihoods_and_distillation_as_a_component(name: str) -> None:
    component = "ce" if name in LIKELIHOODS else "ref_kl"
    case = case_of(name) if name in LIKELIHOODS else Case("losses")
    config = config_of(name, **({"imitation": {"weight": LIKELIHOODS[name]}} if name in LIKELIHOODS else {}))
    view = replace(case.view, scale=case.scaled(config.reduction))
    evaluated(name, case, {component: view}, config, {component: 1.0})


@pytest.mark.parametrize(("name", "weight"), [("mix", "none"), ("mix_chord", "uncertainty")])
def test_a_mixture_reduces_each_component_over_its_own_tokens(name: str, weight: str) -> None:
    case = case_of(name)
    config = config_of(name, surrogate=CLIP, imitation={"weight": weight}, weights={"rl": 0.9, "ce": 0.1})
    expert = torch.tensor([False, False, True])[case.view.segment]
    views = {
        component: replace(case.view, scale=case.scaled(config.reduction, kept)).where(kept)
        for component, kept in (("rl", ~expert), ("ce", expert))
    }
    evaluated(name, case, views, config, config.weights.model_dump())


@pytest.mark.parametrize(
    ("name", "args"), [("dpo", {}), ("dpo/label_smoothing", {"label_smoothing": 0.1}), ("dpo/ipo", {"form": "ipo"})]
)
def test_pairs(name: str, args: dict[str, Any]) -> None:
    case, config = Case("pairs"), LossConfig.model_validate({"pair": args})
    view = replace(case.view, scale=torch.full_like(case.view.mu, 2 / case.view.segments))
    terms = evaluated(name, case, {"pair": view}, config, {"pair": 1.0})
    for metric, value in VECTORS[name]["expected"]["metrics"].items():
        close(terms.reduced[f"pair_{metric}"], value)


def test_every_weight_and_mask_of_the_file_has_its_test() -> None:
    assert (set(of_kind("weight")), set(of_kind("mask"))) == (set(WEIGHTS), set(MASKS))


@pytest.mark.parametrize("name", [*WEIGHTS, *MASKS])
def test_corrections(name: str) -> None:
    args = dict(WEIGHTS[name] if name in WEIGHTS else MASKS[name])
    kind = args.pop("kind", "weight" if name in WEIGHTS else "reject")
    bypass = args.pop("bypass", False)
    (rule,) = LossConfig.model_validate({"correction": [{"kind": kind, **args}]}).correction
    view = Case("losses").view
    anchor = anchor_logprob(view, "old")
    log_weight = (view.logprob.detach() if bypass else anchor) - view.mu
    close(Case("losses").full(correction(view, anchor, log_weight, rule, "seed")), VECTORS[name]["expected"])
    assert needs_whole_step(rule) is (kind == "second_moment" or "normalize" in args)


def test_anchor_between_sampler_and_policy() -> None:
    case, expected = Case("losses"), VECTORS["prox_approx/loglinear"]["expected"]
    close(case.full(anchor_logprob(case.view, "loglinear")), expected["prox_logprob"])


def test_anchor_between_the_probabilities_of_sampler_and_policy() -> None:
    case = Case("losses")
    found = case.full(anchor_logprob(case.view, "linear"))
    # AReaL adds 1e-10 to the probability before its logarithm
    torch.testing.assert_close(found, grid(VECTORS["prox_approx/linear"]["expected"]), rtol=0, atol=1e-9)


def test_covariance() -> None:
    case = Case("losses", anchor="old_logprob")
    close(case.full(covariance(case.view)), VECTORS["clip_cov/covariance"]["expected"])


def test_the_weight_of_imitation_follows_its_schedule() -> None:
    vector = VECTORS["mix_chord/mu_schedule"]
    schedule = Schedule(warmup_steps=10, decay_steps=20, peak=0.9, valley=0.05)
    close([schedule_value(schedule, step) for step in vector["inputs"]["steps"]], vector["expected"])


@pytest.mark.parametrize("mode", list(VECTORS["normalisation/modes"]["expected"]))
def test_reductions(mode: str) -> None:
    args, case = VECTORS["normalisation/modes"]["args"], Case("losses", anchor="old_logprob")
    norm = args["norm"] if mode.endswith("norm") else None
    reduction = reduction_of({"loss_agg_mode": mode, "norm": norm})
    losses, _ = token_losses(case.view, LossConfig.model_validate({"surrogate": PLAIN}))
    total = (losses.detach() * case.scaled(reduction, prompts=args["prompt_groups"])).sum()
    close(total, VECTORS["normalisation/modes"]["expected"][mode])


@pytest.mark.parametrize("mode", list(VECTORS["normalisation/fully-masked-sequence"]["expected"]))
def test_a_sequence_without_a_trained_token_counts_nowhere(mode: str) -> None:
    vector = VECTORS["normalisation/fully-masked-sequence"]
    case = Case("losses", anchor="old_logprob", mask=vector["inputs"]["mask"])
    losses, _ = token_losses(case.view, LossConfig.model_validate({"surrogate": PLAIN}))
    reduction = reduction_of({"loss_agg_mode": mode})
    close((losses.detach() * case.scaled(reduction)).sum(), vector["expected"][mode])


def preset(name: str) -> Estimator:
    """Return the estimator of an algorithm."""
    return TypeAdapter[Estimator](Estimator).validate_python(PRESETS[name].estimator)


ROLES = preset("rae")
BY_REWARD: dict[str, Estimator] = {
    "advantage/grpo": GroupEstimator(),
    "advantage/grpo/eps_1e-4": preset("grpo"),
    "advantage/dr_grpo": preset("dr_grpo"),
    "advantage/rloo": preset("rloo"),
    "advantage/reinforce": preset("topr"),
    "advantage/opmd/mean": preset("opmd"),
    "advantage/opmd/logavgexp": GroupEstimator(baseline="logavgexp", scale="none"),
    "advantage/opmd/logavgexp_tau0.5": GroupEstimator(baseline="logavgexp", tau=0.5, scale="none"),
    "advantage/asymre": preset("asymre"),
    "advantage/rec": preset("rec"),
    "advantage/rec/std_normalize": GroupEstimator(scale="population"),
    "advantage/max_rl": preset("max_rl"),
    "advantage/grpo_passk": preset("passk"),
    "advantage/opo": preset("opo"),
    "advantage/gpg": preset("gpg"),
    "advantage/reinforceplusplus": preset("reinforceplusplus"),
    "advantage/reinforceplusplus/gamma0.9": DiscountedEstimator(gamma=0.9),
    "advantage/reinforceplusplus_baseline": preset("reinforceplusplus_baseline"),
    "advantage/groups/grpo": GroupEstimator(),
    "advantage/groups/grpo/std_batch_raw": GroupEstimator(scale="batch_raw"),
    "advantage/groups/grpo/std_batch_centred": GroupEstimator(scale="batch", epsilon=1e-4),
    "advantage/groups/grpo/std_threshold_0": GroupEstimator(std_threshold=0.0),
    "advantage/grpo/rank_penalty": GroupEstimator(rank_penalty=0.25),
}
"""Vectors whose inputs are a reward for each of some sequences."""
BY_TEACHER: dict[str, Estimator] = {
    "advantage/on_policy_distill": preset("on_policy_distill"),
    "advantage/jsd": preset("jsd"),
}
BY_VALUES: dict[str, Estimator] = {
    "advantage/gae": preset("ppo"),
    "advantage/gae/0.99_0.95": GaeEstimator(gamma=0.99, lam=0.95),
}
BY_STEP: dict[str, Estimator] = {
    "advantage/multi_step_grpo": GroupEstimator(),
    "advantage/multi_step_grpo/step_norm": GroupEstimator(step_norm=True),
    "advantage/gigpo": preset("gigpo"),
    "advantage/gigpo/std_0.9_0.5": GigpoEstimator(omega=0.5, gamma=0.9, scale="group"),
}
ALONE = ("advantage/remax", "advantage/reinforceplusplus/kl_in_reward", "advantage/rae")
"""Vectors with a test of their own."""
TOKEN_MASKS = ("advantage/clipb", "advantage/clipv")
"""Masks of tokens by their entropy, for the loss: no estimators."""


def test_every_advantage_of_the_file_has_its_test() -> None:
    tested = [*BY_REWARD, *BY_TEACHER, *BY_VALUES, *BY_STEP, *ALONE, *TOKEN_MASKS]
    assert len(tested) == len(set(tested))
    assert sorted(tested) == sorted(set(of_kind("advantage")) - set(UPSTREAM))


def experience(run: int, mask: Sequence[float], task: str = "a", step: int = 0, **fields: Any) -> Experience:
    return Experience(
        eid=EID(7, task, run, step),
        tokens=[3] * (1 + len(mask)),
        prompt_length=1,
        action_mask=[bool(flag) for flag in mask],
        **fields,
    )


def sequences(inputs: Mapping[str, Any], **columns: str) -> ExperienceBatch:
    """Return an experience for each sequence of a vector; ``columns`` name inputs by the field that they fill."""
    count = len(next(value for value in inputs.values() if isinstance(value, list)))
    masks = inputs.get("mask", [[1.0, 1.0]] * count)
    rows = [
        experience(
            run, masks[run], inputs.get("groups", ["a"] * count)[run], **{k: inputs[v][run] for k, v in columns.items()}
        )
        for run in range(count)
    ]
    return ExperienceBatch.of(rows)


def by_run(batch: ExperienceBatch) -> dict[int, Tensor]:
    return {one.eid.run: one.advantages.double() for one in batch if one.advantages is not None}


def near(found: Tensor, wanted: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-6)


def same(found: dict[int, Tensor], expected: Mapping[str, Any]) -> None:
    """Compare advantages by run with those expected by token, else with the scores of the runs."""
    if expected["per_token"] is not None:
        near(torch.stack([found[run] for run in sorted(found)]), expected["per_token"])
        return
    for run, score in enumerate(expected["scores"]):
        assert (run in found) is (score is not None)
        if score is not None:
            near(found[run], [score] * 2)


def of_rewards(name: str, args: Estimator) -> tuple[dict[int, Tensor], dict[str, float]]:
    inputs = VECTORS[name]["inputs"]
    columns = {"reward": "rewards"} if "rewards" in inputs else {}
    if "teacher_logprob" in inputs:
        columns = {"logprobs": "old_logprob", "teacher_logprobs": "teacher_logprob"}
    if "mean_old_logprob" in inputs:
        mask = VECTORS["advantage/grpo"]["inputs"]["mask"]
        inputs = inputs | {"mask": mask, "logprobs": [[mean] * 4 for mean in inputs["mean_old_logprob"]]}
        columns |= {"logprobs": "logprobs"}
    kept, metrics = estimate(sequences(inputs, **columns), args)
    return by_run(kept), metrics


@pytest.mark.parametrize("name", [*BY_REWARD, *BY_TEACHER])
def test_advantages_from_rewards_or_a_teacher(name: str) -> None:
    found, metrics = of_rewards(name, (BY_REWARD | BY_TEACHER)[name])
    same(found, VECTORS[name]["expected"])
    if "filtered_count" in VECTORS[name]["expected"]:
        assert len(VECTORS[name]["inputs"]["rewards"]) - len(found) == VECTORS[name]["expected"]["filtered_count"]
        assert metrics["rollout/low_variance_groups"] == 2


@pytest.mark.parametrize("name", ["advantage/reinforceplusplus", "advantage/reinforceplusplus/gamma0.9"])
def test_returns_from_the_rewards_of_tokens(name: str) -> None:
    vector, args = VECTORS[name], BY_REWARD[name]
    batch = sequences(vector["inputs"], token_level_reward="token_rewards")
    same(by_run(estimate(batch, args)[0]), vector["expected"])
    raw, _ = estimate(batch, args.model_copy(update={"whiten": False}))
    mask = torch.tensor(vector["inputs"]["mask"], dtype=torch.float64)
    near(torch.stack(list(by_run(raw).values())), (torch.tensor(vector["expected"]["returns"]) * mask).tolist())


def test_a_kl_penalty_is_taken_from_the_rewards_of_tokens() -> None:
    vector = VECTORS["advantage/reinforceplusplus/kl_in_reward"]
    inputs, args = vector["inputs"], preset("reinforceplusplus")
    penalty = vector["args"]["kl_coef"] * (torch.tensor(inputs["logprob"]) - torch.tensor(inputs["ref_logprob"]))
    batch = sequences(inputs, token_level_reward="token_rewards")
    kept, metrics = estimate(batch, args, token_penalty=penalty.flatten())
    same(by_run(kept), vector["expected"])
    assert metrics["group_advantages/reward_mean/mean"] == 0.5, "rewards are counted without it"


@pytest.mark.parametrize("name", BY_VALUES)
def test_advantages_from_a_critic(name: str) -> None:
    vector, args = VECTORS[name], BY_VALUES[name]
    batch = sequences(vector["inputs"], token_level_reward="token_rewards")
    values = torch.tensor(vector["inputs"]["values"]).flatten()
    kept, _ = estimate(batch, args, values=values)
    same(by_run(kept), vector["expected"])
    near(torch.stack([one.returns.double() for one in kept if one.returns is not None]), vector["expected"]["returns"])
    raw, _ = estimate(batch, args.model_copy(update={"whiten": False}), values=values)
    near(torch.stack(list(by_run(raw).values())), vector["expected"]["raw"])


@pytest.mark.parametrize("name", BY_STEP)
def test_advantages_of_steps(name: str) -> None:
    inputs, expected = VECTORS[name]["inputs"], VECTORS[name]["expected"]
    rows = []
    for run, given in enumerate(inputs["runs"].values()):
        rewards = given["step_rewards"] if isinstance(given, dict) else given
        for step, reward in enumerate(rewards):
            info = {"env_state_hash": given["states"][step], "step_reward": reward} if isinstance(given, dict) else {}
            rows.append(experience(run, [1.0], step=step, reward=reward, info=info))
    kept, _ = estimate(ExperienceBatch.of(rows), BY_STEP[name])
    found: dict[str, list[float]] = {}
    for one in kept:
        assert one.advantages is not None
        found.setdefault(f"r{one.eid.run}", []).append(float(one.advantages[0]))
    assert {run: pytest.approx(steps, abs=1e-6) for run, steps in expected["steps"].items()} == found


def test_the_greedy_run_is_the_baseline_and_is_not_trained_on() -> None:
    inputs, expected = VECTORS["advantage/remax"]["inputs"], VECTORS["advantage/remax"]["expected"]
    rows = []
    for task, (reward, greedy) in enumerate(zip(inputs["rewards"], inputs["greedy_rewards"], strict=True)):
        rows += [
            experience(task, inputs["mask"][task], str(task), reward=reward),
            experience(100, [1.0], str(task), reward=greedy, info={"greedy": True}),
        ]
    kept, metrics = estimate(ExperienceBatch.of(rows), preset("remax"))
    same(by_run(kept), expected)
    assert metrics["rollout/partial_groups"] == 0


def test_the_baseline_of_a_role_moves_on_after_each_reward() -> None:
    vector = VECTORS["advantage/rae"]
    rewards = vector["inputs"]["rewards_in_order"]
    baselines: dict[str, float] = {}
    found: dict[int, Tensor] = {}
    for half in ([0, 1], [2, 3]):  # two batches, in any order of runs
        rows = [experience(run, [1.0], reward=rewards[run], info={"role": "x"}) for run in reversed(half)]
        found |= by_run(estimate(ExperienceBatch.of(rows), ROLES, baselines=baselines)[0])
    near(torch.cat([found[run] for run in range(4)]), vector["expected"]["scores"])
    assert baselines == {"x": pytest.approx(vector["expected"]["baseline_after"], abs=1e-12)}


def test_the_soft_penalty_of_overlong_answers() -> None:
    vector = VECTORS["reward/overlong_soft"]
    args, lengths = vector["args"], vector["inputs"]["lengths"]
    rows = [experience(run, [1.0] * length, reward=0.5) for run, length in enumerate(lengths)]
    operator = LengthPenalty(args["max_length"], args["cache"], args["penalty_factor"])
    shaped, _ = operator.apply(ExperienceBatch.of(rows))
    assert [reward - 0.5 for reward in shaped.values("reward")] == pytest.approx(vector["expected"], abs=1e-12)


def test_the_penalty_of_long_runs() -> None:
    vector = VECTORS["reward/prime-rl_length_penalty"]
    inputs = {name: [int(count) for count in counts] for name, counts in vector["inputs"].items() if name != "rewards"}
    rows = []
    for run, reward in enumerate(vector["inputs"]["rewards"]):
        output, other, turns = (inputs[name][run] for name in ("output_tokens", "input_tokens", "turns"))
        # a tool result of one token between two turns; the prompt is one token too
        mask = [1.0] * (output - turns + 1) + [0.0, 1.0] * (turns - 1) + [0.0] * (other - turns)
        rows.append(experience(run, mask, reward=reward))
    args = GroupEstimator(scale="none", length_penalty=LengthPenaltyWeights())
    found = by_run(estimate(ExperienceBatch.of(rows), args)[0])
    near(torch.stack([found[run][0] for run in range(3)]), vector["expected"]["advantages"])


def test_the_gradient_of_the_jensen_shannon_divergence() -> None:
    """Exactly: the expectation over a policy of four tokens, with its gradient by autograd."""
    vector = VECTORS["proof/jsd_gradient"]
    inputs, expected = vector["inputs"], vector["expected"]
    logits = torch.tensor(inputs["student_logits"], dtype=torch.float64, requires_grad=True)
    student = logits.log_softmax(-1)
    advantage = jsd_advantage(student.detach(), torch.tensor(inputs["teacher"]).double().log(), inputs["beta"], 1.0)
    (-(student.detach().exp() * advantage * student).sum()).backward()
    assert logits.grad is not None
    near(logits.grad, expected["exact_gradient"])
    upstream = torch.tensor(expected["upstream"], dtype=torch.float64)
    assert torch.cosine_similarity(logits.grad, upstream, dim=0) < 0
