"""Losses against independent formulas: torch.distributions, values by hand, the recipe that was measured to learn."""

from __future__ import annotations

import math

import pytest
import torch

from trinity_mq.algorithms.evaluator import LossTerms, policy_terms
from trinity_mq.algorithms.scoring import token_logprobs
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config import AlgorithmConfig

CONFIG = AlgorithmConfig(clip_range_low=0.2, clip_range_high=0.28)


def clipped_policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> LossTerms:
    """The sum over tokens of the configured loss."""
    ones = torch.ones_like(advantages)
    segment = torch.zeros(len(ones), dtype=torch.int64)
    return policy_terms(TokenView(logprob=logprobs, mu=old, advantage=advantages, scale=ones, segment=segment), config)


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_logprobs_and_entropy_are_those_of_the_tempered_distribution(temperature: float) -> None:
    logits, targets = random_logits(6, 11), torch.arange(6)
    found, entropy = token_logprobs(logits, targets, torch.full((6,), temperature), entropy_gradient=False)
    expected = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(found, expected.log_prob(targets))
    torch.testing.assert_close(entropy, expected.entropy())


def test_each_token_has_its_own_temperature() -> None:
    logits, targets, temperature = random_logits(2, 5), torch.tensor([1, 4]), torch.tensor([0.5, 2.0])
    found, _ = token_logprobs(logits, targets, temperature, entropy_gradient=False)
    for row in range(2):
        torch.testing.assert_close(found[row], (logits[row] / temperature[row]).log_softmax(-1)[targets[row]])


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_logit_of_minus_infinity_has_no_part_in_the_entropy(entropy_gradient: bool) -> None:
    """As a model masks the padding of its vocabulary."""
    seen = random_logits(3, 5)
    logits = torch.cat([seen, torch.full((3, 2), -math.inf)], dim=1).requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.arange(3), torch.ones(3), entropy_gradient=entropy_gradient)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=seen).entropy())
    (logprobs.sum() + (entropy.sum() if entropy_gradient else 0.0)).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, 5:].any()


def test_half_precision_logits_are_computed_with_in_float32() -> None:
    logits = random_logits(3, 7).bfloat16()
    found, entropy = token_logprobs(logits, torch.tensor([0, 1, 2]), torch.ones(3), entropy_gradient=False)
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found, logits.float().log_softmax(-1)[torch.arange(3), torch.arange(3)])


def test_entropy_has_a_gradient_only_if_asked() -> None:
    logits = random_logits(3, 7).requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.zeros(3, dtype=torch.long), torch.ones(3), entropy_gradient=False)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    _, entropy = token_logprobs(logits, torch.zeros(3, dtype=torch.long), torch.ones(3), entropy_gradient=True)
    assert entropy.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 1.0, -1.2, False),
        (1.5, 1.0, -1.28, True),
        (0.5, 1.0, -0.5, False),
        (1.5, -1.0, 1.5, False),
        (0.5, -1.0, 0.8, True),
        (0.9, -1.0, 0.9, False),
    ],
)
def test_clips_each_side_where_it_should(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    logprobs = torch.tensor([math.log(ratio) - 1], requires_grad=True)
    terms = clipped_policy_loss(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), CONFIG)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert terms.sums["pg_clipfrac"].item() == int(clipped)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0 if clipped else -ratio * advantage)
    assert terms.sums["ppo_kl"].item() == pytest.approx(-math.log(ratio))
    assert terms.sums["ppo_kl_k3"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)
    assert terms.maxima["ratio_max"].item() == pytest.approx(ratio)


@pytest.mark.parametrize(("bound", "loss"), [(3.0, 3.0), (10.0, 10.0), (None, math.exp(15.0))])
def test_a_bad_sample_that_has_become_likely_has_no_gradient_above_the_dual_clip(
    bound: float | None, loss: float
) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    config = AlgorithmConfig(clip_ratio_c=bound)
    terms = clipped_policy_loss(logprobs, torch.tensor([-16.0]), torch.tensor([-1.0]), config)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if bound else math.exp(15.0))
    assert terms.sums["pg_clipfrac_dual"].item() == (0 if bound is None else 1)


@pytest.mark.parametrize(
    ("bound", "loss", "gradient_of_the_likely_one", "lower"),
    [(3.0, -0.25566076, 0.0, 1), (None, -0.20360435, 0.28538974, 0)],
)
def test_equals_the_dual_clip_of_trinity_rft(
    bound: float | None, loss: float, gradient_of_the_likely_one: float, lower: int
) -> None:
    """Loss and gradient as Trinity-RFT 0.6.0 computes them with clip_range 0.2 (verl's formula): one ratio above each
    bound, on both sides."""
    logprobs = torch.tensor([-0.5, -0.2, -2.0, -0.03, -0.1, -1.6, -0.6, -0.9, -0.25], requires_grad=True)
    old = torch.tensor([-0.55, -0.55, -1.6, -0.01, -1.4, -1.3, -0.7, -1.14, -0.15])
    advantages = torch.tensor([1.2] * 4 + [-0.7] * 3 + [0.5] * 2)
    config = AlgorithmConfig(clip_range_low=0.2, clip_range_high=0.2, clip_ratio_c=bound)
    terms = clipped_policy_loss(logprobs, old, advantages, config)
    (terms.loss / 9).backward()
    assert terms.loss.item() / 9 == pytest.approx(loss)
    expected = [
        -0.14016948,
        0.0,
        -0.08937601,
        -0.13069316,
        gradient_of_the_likely_one,
        0.0,
        0.08595774,
        0.0,
        -0.05026875,
    ]
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected))
    assert (terms.sums["pg_clipfrac"].item(), terms.sums["pg_clipfrac_dual"].item()) == (3, lower)


def test_an_absurd_ratio_stays_finite() -> None:
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    old = torch.tensor([-500.0, -math.inf])
    terms = clipped_policy_loss(logprobs, old, torch.tensor([1.0, -1.0]), CONFIG)
    terms.loss.backward()
    assert math.isfinite(terms.loss.item())
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_equals_the_recipe_on_a_random_batch() -> None:
    """Padded [sequences, tokens] with a mask and means, as in the probe, against flat tokens and sums."""
    sequences, length, vocabulary, weight = 8, 5, 18, 0.01
    y = torch.randint(0, vocabulary, (sequences, length), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(length) < torch.tensor([5, 1, 3, 5, 2, 4, 5, 1])[:, None]
    advantages = torch.randn(sequences, 1, generator=torch.Generator().manual_seed(2))
    old = random_logits(sequences, length, vocabulary, seed=4).log_softmax(-1).gather(2, y[:, :, None])[:, :, 0]

    logits = random_logits(sequences, length, vocabulary, seed=3).requires_grad_()
    everything, w = logits.log_softmax(-1), mask.float()
    logprobs, entropy = everything.gather(2, y[:, :, None])[:, :, 0], -(everything.exp() * everything).sum(-1)
    r = (logprobs - old).exp()
    objective = torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages)
    expected = -(objective * w).sum() / w.sum() - weight * (entropy * w).sum() / w.sum()
    (expected_gradient,) = torch.autograd.grad(expected, logits)

    flat = logits.detach()[mask].requires_grad_()
    temperature = torch.ones(int(mask.sum()))
    logprobs, entropy = token_logprobs(flat, y[mask], temperature, entropy_gradient=True)
    config = AlgorithmConfig.model_validate({"clip_range_low": 0.2, "clip_range_high": 0.28, "clip_ratio_c": None})
    terms = clipped_policy_loss(logprobs, old[mask], advantages.expand(-1, length)[mask], config)
    found = (terms.loss - weight * entropy.sum()) / mask.sum()
    (gradient,) = torch.autograd.grad(found, flat)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient[mask])
