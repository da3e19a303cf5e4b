"""Vectors that are neither loss nor advantage: value loss, age of sequences, parts of an optimizer step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.algorithms.vectors import FIXTURES, PIECES, VECTORS, Case, grid, of_kind
from trinity_agents.trainer.sources.replay import linear_decay
from trinity_mq.algorithms.corrections import correction
from trinity_mq.algorithms.evaluator import evaluate, policy_terms
from trinity_mq.algorithms.mismatch import mismatch_metrics, mismatch_sums
from trinity_mq.algorithms.regularisers import adapt_coefficient, kl_estimate, sampler_kl
from trinity_mq.algorithms.scoring import HeadOperation, Scores, entropy_baselines, head_scores, token_logprobs
from trinity_mq.algorithms.surrogates import clipped_value_loss, likelihood, surrogate
from trinity_mq.algorithms.view import TokenView, segment_maxima
from trinity_mq.config.algorithm.pieces import Likelihood, LogLinear, LossConfig, Truncate
from trinity_mq.config.algorithm.reference import RewardKL
from trinity_mq.training.memory.measure import LiveBytes


def close(found: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(found.double(), grid(expected), rtol=1e-9, atol=1e-9)


def test_the_clipped_value_loss() -> None:
    vector, fixture = VECTORS["value_loss/clipped"], FIXTURES["values"]
    mask = grid(fixture["mask"]).bool()
    values = grid(fixture["values"]).requires_grad_()
    old, returns = grid(fixture["old_values"])[mask], grid(fixture["returns"])[mask]
    losses, cut = clipped_value_loss(values[mask], old, returns, vector["args"]["cliprange_value"])
    close(losses.mean().detach(), vector["expected"]["loss"])
    close(cut.double().mean(), vector["expected"]["clipfrac"])
    losses.mean().backward()
    assert values.grad is not None
    close(values.grad, vector["expected"]["grad_values"])


def test_only_truncated_weights_are_counted() -> None:
    ratio, advantage = torch.tensor([1.01, 2.0, 1.01, 2.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    terms = surrogate(ratio.log(), ratio.log(), advantage, Truncate(cap=1.28, only="negative"))
    assert terms.counts["clipped_frac"].tolist() == [False, False, False, True]


def test_the_age_of_tokens_and_of_the_oldest_of_a_sequence() -> None:
    case, expected = Case("losses"), VECTORS["staleness"]["expected"]
    age = case.view.staleness
    assert age is not None
    close(age, grid(expected["token"])[case.mask].tolist())
    oldest = segment_maxima(age, case.view)
    close(oldest, [expected["oldest"][sequence] for sequence in case.view.segment])
    close(age.mean(), expected["mean"])
    close(age.max(), expected["max"])


def test_micro_batches_and_ranks_add_up() -> None:
    vector, case = VECTORS["normalisation/token-mean"], Case("losses", anchor="old_logprob")
    config = LossConfig.model_validate({"surrogate": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None}})
    view = replace(case.view, scale=case.scaled(config.reduction))
    parts = []
    for sequences in vector["inputs"]["micro_batches"]:
        part = view.where(torch.isin(view.segment, torch.tensor(sequences)))
        parts.append(evaluate({"rl": part}, config, {"rl": 1.0}).loss.detach())
    expected = vector["expected"]
    close(torch.stack(parts).sum(), expected["correct"])
    close(torch.stack(parts) * view.tokens, expected["numerators"])
    close(torch.stack(parts) * 2, expected["two_ranks_local_times_dp"])


def test_the_tokens_that_lower_the_entropy_most() -> None:
    vector = VECTORS["advantage/clipb"]
    inputs = vector["inputs"]
    mask = grid(inputs["mask"]).bool()
    case = Case("losses", advantages=inputs["advantages"])
    view = replace(case.view, logprob=grid(inputs["logprob"])[mask], entropy=grid(inputs["entropy"])[mask])
    rules = [{"kind": "entropy_clip", "bound": vector["args"]["mu"]}]
    (rule,) = LossConfig.model_validate({"correction": rules}).correction
    close(case.full(correction(view, view.mu, view.mu, rule, "seed")), vector["expected"]["per_token"])


@pytest.mark.parametrize(("share", "left_out"), [(1.0, 2), (0.2, 1), (0.001, 1)])
def test_the_few_tokens_that_lower_the_entropy_most_by_the_vocabulary(share: float, left_out: int) -> None:
    """With share 1 and the vector's bound, the vector; with half the bound two tokens, then no more than the share."""
    vector = VECTORS["advantage/clipv"]
    inputs, mask = vector["inputs"], grid(vector["inputs"]["mask"]).bool()
    case = Case("losses", advantages=inputs["advantages"])
    columns = {"logprob": "logprob", "entropy": "entropy", "entropy_baseline": "necs"}
    given: dict[str, Any] = {column: grid(inputs[name])[mask] for column, name in columns.items()}
    view = replace(case.view, **given)

    def kept(bound: float, share: float) -> torch.Tensor:
        rules = [{"kind": "vocabulary_clip", "bound": bound, "share": share}]
        (rule,) = LossConfig.model_validate({"correction": rules}).correction
        return case.full(correction(view, view.mu, view.mu, rule, "seed"))

    close(kept(vector["args"]["mu"], vector["args"]["max_frac"]), vector["expected"]["per_token"])
    fewer = kept(1.0, share)
    assert int((fewer[mask] == 0).sum()) == left_out
    assert fewer[1, 0] == 0
    assert (kept(100.0, share)[mask] == 1).all()


def test_the_entropys_baseline_makes_the_first_order_change_of_a_policy_gradient_step() -> None:
    """``dH = -a (S_k - baseline)`` of the step ``a (onehot_k - p)`` on the logits, for every ``k``."""
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    temperature, targets = torch.linspace(0.5, 1.5, 7), torch.arange(7) % 5
    logprob, entropy = token_logprobs(logits, targets, temperature, entropy_gradient=False)
    leaf = (logits / temperature[:, None]).double().requires_grad_()
    distribution = leaf.log_softmax(-1)
    (slope,) = torch.autograd.grad(-(distribution.exp() * distribution).sum(), leaf)
    direction = torch.nn.functional.one_hot(targets, 5) - distribution.detach().exp()
    baseline = entropy_baselines(logits, temperature)
    found = -(logprob.exp() * (entropy + logprob) - baseline)
    torch.testing.assert_close(found.double(), (slope * direction).sum(-1), rtol=1e-4, atol=1e-6)


def test_a_step_whose_weights_are_all_0_has_no_gradient_and_no_nan() -> None:
    case = Case("losses")
    rules = [{"kind": "weight", "high": 1e-9, "beyond": "mask", "normalize": True}]
    config = LossConfig.model_validate({"anchor": "old", "correction": rules})
    anchor = case.view.old
    assert anchor is not None
    weight = correction(case.view, anchor, anchor - case.view.mu, config.correction[0], "seed")
    close(weight, [0.0] * case.view.tokens)
    evaluate({"rl": replace(case.view, weight=weight)}, replace_rules(config), {"rl": 1.0}).loss.backward()
    assert case.logprob.grad is not None
    assert not case.logprob.grad.any()


def replace_rules(config: LossConfig) -> LossConfig:
    """Return the loss without its corrections, which the view holds."""
    return config.model_copy(update={"correction": ()})


@pytest.mark.parametrize("kind", ["k3", "k3_clamped", "k3_weighted", "k3_k2"])
@pytest.mark.parametrize("difference", [-200.0, 200.0])
def test_a_policy_far_from_its_reference_has_a_finite_term(kind: str, difference: float) -> None:
    away = torch.tensor([difference], requires_grad=True)
    found = kl_estimate(away, kind, torch.ones(1))
    found.sum().backward()
    assert found.isfinite().all()
    assert away.grad is not None
    assert away.grad.isfinite().all()


def test_a_weight_by_advantage_is_bounded() -> None:
    args = LogLinear(weight="advantage")
    found = surrogate(torch.zeros(1), torch.tensor([-1.0]), torch.tensor([100.0]), args).loss
    assert found.isfinite().all()


@pytest.mark.parametrize("weight", ["none", "probability", "uncertainty"])
def test_sure_tokens_have_no_gradient_above_the_cutoff(weight: Any) -> None:
    logprob = torch.tensor([0.99, 0.4]).log().requires_grad_()
    likelihood(logprob, Likelihood(weight=weight, cutoff=0.5)).loss.sum().backward()
    assert logprob.grad is not None
    assert logprob.grad[0] == 0
    assert logprob.grad[1] < 0


def test_logprobs_and_entropy_of_logits() -> None:
    vector = VECTORS["logits/logprob_entropy"]
    inputs, expected = vector["inputs"], vector["expected"]
    logits = torch.tensor(inputs["logits"], requires_grad=True)
    logprobs, entropy = token_logprobs(
        logits, torch.tensor(inputs["targets"]), torch.tensor(inputs["temperature"]), entropy_gradient=True
    )
    for found, name in ((logprobs, "logprob"), (entropy, "entropy")):
        torch.testing.assert_close(found, torch.tensor(expected[name]), rtol=1e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, torch.tensor(expected[f"grad_{name}_logits"]), rtol=1e-6, atol=1e-6)


def test_the_entropy_of_a_step_is_the_mean_over_its_tokens() -> None:
    case = Case("losses")
    config = LossConfig()
    view = replace(case.view, scale=case.scaled(config.reduction))
    found = policy_terms(view, config, entropy_coef=0.5).reduced["entropy_loss"]
    close(found, -0.5 * VECTORS["entropy/token-mean"]["expected"])


def test_the_coefficient_of_a_kl_in_the_rewards_follows_its_target() -> None:
    vector = VECTORS["kl/adaptive_controller"]
    args, coef, found = vector["args"], vector["args"]["kl_coef"], []
    section = RewardKL(coef=coef, target=args["target_kl"], horizon=args["horizon"])
    for kl in vector["inputs"]["current_kl"]:
        coef = adapt_coefficient(coef, kl, args["batch_size"], section)
        found.append(coef)
    assert found == pytest.approx(vector["expected"], rel=1e-12)
    assert adapt_coefficient(0.1, 5.0, 64, RewardKL()) == 0.1, "without a target it stays"
    assert adapt_coefficient(1.0, 0.0, 10**9, section) == pytest.approx(0.8), "it never changes its sign"


def test_the_kl_in_the_rewards_is_finite_and_that_of_the_sampler() -> None:
    mu = torch.tensor([-1.0, -1.0, float("nan"), -1.0])
    ref = torch.tensor([-1.5, -float("inf"), -1.0, -200.0])
    found = {kind: sampler_kl(mu, ref, RewardKL(kind=kind)).tolist() for kind in ("k1", "k2", "abs")}
    assert found == {"k1": [0.5, 20, 0, 20], "k2": [0.125, 200, 0, 200], "abs": [0.5, 20, 0, 20]}


BANDIT = PIECES["bandit"]


@pytest.mark.parametrize("rule", BANDIT)
def test_the_direction_of_each_rule_on_a_bandit(rule: str) -> None:
    """The expected gradient under the sampler against that of the policy's own expected reward, over four arms."""
    vector = VECTORS["proof/bandit_bias"]
    rewards, policy, sampler = (grid(vector["inputs"][name]) for name in ("rewards", "pi", "mu"))
    logits = policy.log().requires_grad_()
    view = TokenView(
        logprob=logits.log_softmax(0),
        mu=sampler.log(),
        advantage=rewards - (policy * rewards).sum(),
        scale=sampler,
        segment=torch.arange(4),
    )
    loss = evaluate({"rl": view}, LossConfig.model_validate(BANDIT[rule]), {"rl": 1.0}).loss
    (found,) = torch.autograd.grad(-loss, logits)
    (exact,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    close(torch.cosine_similarity(found, exact, dim=0), vector["expected"]["cosine_to_true_gradient"][rule])


def test_each_rule_of_the_bandit_is_tried() -> None:
    assert set(BANDIT) == set(VECTORS["proof/bandit_bias"]["expected"]["cosine_to_true_gradient"])


def test_the_priority_of_replayed_groups() -> None:
    vector = VECTORS["replay/linear_decay"]
    given = zip(vector["inputs"]["model_version"], vector["inputs"]["use_count"], strict=True)
    assert [linear_decay(born, uses, vector["args"]["decay"]) for born, uses in given] == vector["expected"]


UNTESTED: dict[str, str] = {}
"""Vectors without a test, and why."""


def test_every_vector_has_a_test_or_a_reason() -> None:
    sources = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
    tables = {*of_kind("loss"), *of_kind("weight"), *of_kind("mask"), *of_kind("advantage")}  # each asserted elsewhere
    named = {name for name in of_kind("value") if f'"{name}"' in sources}
    assert (tables | named | set(UNTESTED)) == set(VECTORS)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_logit_of_minus_infinity_has_no_part_in_the_entropy(entropy_gradient: bool) -> None:
    """As a model masks the padding of its vocabulary."""
    seen = 3 * torch.randn(3, 5)
    logits = torch.cat([seen, torch.full((3, 2), -math.inf)], dim=1).requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.arange(3), torch.ones(3), entropy_gradient=entropy_gradient)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=seen).entropy())
    (logprobs.sum() + (entropy.sum() if entropy_gradient else 0.0)).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, 5:].any()


def test_an_absurd_ratio_stays_finite() -> None:
    view = TokenView(
        logprob=torch.tensor([0.0, -1.0], requires_grad=True),
        mu=torch.tensor([-500.0, -math.inf]),
        advantage=torch.tensor([1.0, -1.0]),
        scale=torch.ones(2),
        segment=torch.zeros(2, dtype=torch.int64),
    )
    loss = policy_terms(view, LossConfig()).loss
    loss.backward()
    assert loss.isfinite()
    assert view.logprob.grad is not None
    assert view.logprob.grad.isfinite().all()


NAMES = {
    "kl": "kl",
    "k3_kl": "k3",
    "abs_diff_mean": "logprob_diff_mean",
    "abs_diff_max": "logprob_diff_max",
    "prob_diff_max": "prob_diff_max",
    "training_log_ppl": "log_perplexity",
    "log_ppl_diff": "log_perplexity_difference",
    "ppl_ratio": "perplexity_ratio",
    "chi2_token": "chi2",
    "chi2_seq": "chi2_sequence",
    "ess_token": "ess",
    "ess_seq": "ess_sequence",
    "frac_above_2": "above_2",
    "frac_below_half": "below_half",
    "pearson_prob": "pearson",
}


def sampled_view() -> TokenView:
    """The fixture with the trainer's logprobs as they were before the step."""
    found = Case("losses").view
    assert found.old is not None
    return replace(found, logprob=found.old)


def test_metrics_of_the_mismatch_are_those_of_the_vector() -> None:
    sums, maxima = mismatch_sums(sampled_view())
    found = mismatch_metrics(
        {name: value.item() for name, value in sums.items()}, {name: value.item() for name, value in maxima.items()}
    )
    expected = VECTORS["mismatch_metrics"]["expected"]
    assert set(NAMES) == set(expected) - {"rollout_log_ppl"}
    for name, value in expected.items():
        if name in NAMES:
            assert found[f"mismatch/{NAMES[name]}"] == pytest.approx(value, abs=1e-9), name
    perplexity = found["mismatch/log_perplexity"] - found["mismatch/log_perplexity_difference"]
    assert perplexity == pytest.approx(expected["rollout_log_ppl"])


TOKENS, WIDTH, VOCABULARY = 23, 8, 37
TRANSFORMS = {
    "plain": HeadOperation(),
    "scaled": HeadOperation(scale=0.25),
    "capped": HeadOperation(softcap=3.0),
    "both": HeadOperation(scale=1.5, softcap=2.0),
}


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = False) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Return hidden states, a head, targets and temperatures."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype).requires_grad_()
    return hidden, head, torch.randint(0, VOCABULARY, (TOKENS,)), torch.rand(TOKENS) + 0.5


def from_logits(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: Tensor,
    after: HeadOperation,
    *,
    entropy_gradient: bool,
) -> Scores:
    logits = after(head(hidden))
    found = token_logprobs(logits, targets, temperature, entropy_gradient=entropy_gradient)
    return Scores(*found, entropy_baselines(logits, temperature))


def gradients(scores: Scores, leaves: list[Tensor], *, entropy: bool) -> list[Tensor]:
    """Return the gradients of a sum in which each token has another weight."""
    weights = torch.linspace(-1, 1, len(scores.logprob), dtype=scores.logprob.dtype)
    total = (weights * scores.logprob).sum() + ((weights.square() * scores.entropy).sum() if entropy else 0.0)
    return list(torch.autograd.grad(total, leaves))


class Adapted(nn.Module):
    """A head with a low-rank adapter beside it, as LoRA puts one there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, VOCABULARY, bias=False, dtype=base.weight.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.base(hidden) + self.up(self.down(hidden))
        return found


@pytest.mark.parametrize("chunk", [1, 5 * VOCABULARY, 2**20])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("kind", ["plain", "with a bias", "adapted"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_scores_and_gradients_are_those_of_all_logits(
    dtype: torch.dtype, tolerance: float, transform: str, kind: str, entropy_gradient: bool, chunk: int
) -> None:
    """Of a head of another kind too, which is called for each chunk."""
    hidden, base, targets, temperature = inputs(dtype, bias=kind == "with a bias")
    head = Adapted(base) if kind == "adapted" else base
    sizes: list[int] = []
    head.register_forward_hook(lambda module, arguments, output: sizes.append(len(output)))
    after, leaves = TRANSFORMS[transform], [hidden, *head.parameters()]
    wanted = from_logits(hidden, head, targets, temperature, after, entropy_gradient=entropy_gradient)
    found = head_scores(
        hidden, head, targets, temperature, after, entropy_gradient=entropy_gradient, with_baseline=True, chunk=chunk
    )
    assert kind != "adapted" or max(sizes[1:]) <= max(chunk // VOCABULARY, 1)
    assert found.logprob.dtype == found.entropy.dtype == dtype
    assert found.entropy.requires_grad == entropy_gradient
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    slopes = [gradients(one, leaves, entropy=entropy_gradient) for one in (found, wanted)]
    assert all(one.abs().max() > 0.01 for one in slopes[1])
    torch.testing.assert_close(*slopes, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["linear", "adapted"])
def test_under_autocast_inputs_are_rounded_and_nothing_else(kind: str) -> None:
    """The products of bfloat16 factors, in float32; a head of another kind rounds its logits too."""
    hidden, base, targets, temperature = inputs(torch.float32)
    head = base if kind == "linear" else Adapted(base)
    with torch.autocast("cpu", torch.bfloat16):
        found = head_scores(hidden, head, targets, temperature, entropy_gradient=True, chunk=200)
    assert found.logprob.dtype == torch.float32
    slopes = gradients(found, [hidden, base.weight], entropy=True)
    assert {one.dtype for one in slopes} == {torch.float32}
    if kind == "linear":
        exact = nn.Linear(WIDTH, VOCABULARY, bias=False)
        exact.weight = nn.Parameter(base.weight.detach().bfloat16().float())
        states = hidden.detach().bfloat16().float().requires_grad_()
        leaves, close = [states, exact.weight], {"rtol": 1e-5, "atol": 1e-6}
    else:
        exact, states, leaves, close = head, hidden, [hidden, base.weight], {"rtol": 0.05, "atol": 0.05}
    wanted = from_logits(states, exact, targets, temperature, HeadOperation(), entropy_gradient=True)
    torch.testing.assert_close(found[:2], wanted[:2], **close)
    torch.testing.assert_close(slopes, gradients(wanted, leaves, entropy=True), **close)


def test_the_gradient_of_a_narrow_weight_is_summed_in_float32() -> None:
    """Each of 1000 chunks adds a half; in bfloat16 the sum would end at 128, where a half is lost by rounding."""
    tokens = 1000
    head = nn.Linear(1, 2, bias=False).bfloat16()
    nn.init.zeros_(head.weight)
    hidden = torch.full((tokens, 1), 1.0, dtype=torch.bfloat16)
    found = head_scores(
        hidden, head, torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens), entropy_gradient=False, chunk=2
    )
    found.logprob.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad[:, 0].tolist() == [500, -500]


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_logit_of_minus_infinity_of_a_head_has_no_part_in_the_entropy(entropy_gradient: bool) -> None:
    hidden, head, targets, temperature = inputs(bias=True)
    masked = torch.arange(VOCABULARY) >= VOCABULARY - 4
    targets = targets % (VOCABULARY - 4)
    shorter = nn.Linear(WIDTH, VOCABULARY - 4, dtype=torch.float64)
    shorter.load_state_dict({name: value[~masked] for name, value in head.state_dict().items()})
    with torch.no_grad():
        head.bias[masked] = -math.inf
    found = head_scores(
        hidden, head, targets, temperature, entropy_gradient=entropy_gradient, with_baseline=True, chunk=100
    )
    wanted = from_logits(hidden, shorter, targets, temperature, HeadOperation(), entropy_gradient=entropy_gradient)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    slopes = [
        gradients(one, [hidden, *layer.parameters()], entropy=entropy_gradient)
        for one, layer in ((found, head), (wanted, shorter))
    ]
    torch.testing.assert_close(slopes[0][0], slopes[1][0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slopes[0][1][~masked], slopes[1][1], rtol=1e-9, atol=1e-9)
    assert not slopes[0][1][masked].any()


class Sizes(LiveBytes):
    """Notes the number of elements of the results of all operations, also in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        results = output if isinstance(output, tuple | list) else (output,)
        self.noted.extend(one.numel() for one in results if isinstance(one, Tensor))
        return output


def test_no_more_than_a_chunk_of_logits_is_kept() -> None:
    """Of what the backward pass keeps and of what is computed, nothing has more elements than the inputs or a chunk."""
    sizes = Sizes()
    hidden, head, targets, temperature = inputs()
    chunk = 10 * VOCABULARY
    for entropy_gradient in (False, True):
        with sizes:
            found = head_scores(
                hidden, head, targets, temperature, entropy_gradient=entropy_gradient, with_baseline=True, chunk=chunk
            )
            (found.logprob.sum() + found.entropy.sum()).backward()
    assert max(sizes.noted) == chunk < TOKENS * VOCABULARY
