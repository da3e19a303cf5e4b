"""``trinity-mq debug algorithm``: runs a configuration's algorithm on a small batch, and shows and checks the
result.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trinity_mq.algorithms.class_losses import class_losses
from trinity_mq.algorithms.corrections import step_choice
from trinity_mq.algorithms.estimators import estimate
from trinity_mq.algorithms.evaluator import component_weights, evaluate, step_weights
from trinity_mq.algorithms.plugins import has_classes
from trinity_mq.algorithms.reduction import sequence_scales
from trinity_mq.algorithms.regularisers import sampler_kl
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config import AlgorithmConfig
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.targets.target import load_target_configuration

TASKS, RUNS, TOKENS = 2, 4, 6
MASKED = (2, 3)
"""Positions of tool tokens, which are not trained on, in the answer of every second run."""
REWARDS = ((1.0, 0.0, 0.5, 0.0), (0.0, 1.0, 1.0, 0.25))
GARBAGE = -37.0
"""Value at masked tokens in the second evaluation: an arbitrary number that differs from every policy's value."""
SMALL = 1e-5


@dataclass(frozen=True)
class Sample:
    """A batch of answers with the values of several policies for their tokens: ``mu`` is the sampler, ``old`` the
    policy before the train step, ``ref`` the reference. ``mask`` selects the trained tokens. Each tensor is
    ``[answers, tokens]``; logprobs and entropies are in nats.
    """

    mask: Tensor
    logprob: Tensor
    mu: Tensor
    old: Tensor
    ref: Tensor
    teacher: Tensor
    entropy: Tensor
    entropy_baseline: Tensor

    def spoiled(self) -> Sample:
        """Return the sample with garbage values at the masked tokens."""
        names = ("logprob", "mu", "old", "ref", "teacher", "entropy", "entropy_baseline")
        return replace(self, **{name: getattr(self, name).where(self.mask, GARBAGE) for name in names})


def algorithm(arguments: argparse.Namespace) -> int:
    """Print losses and gradients of a small batch, then the checks. Return 1 if a check failed."""
    config = load_target_configuration(arguments)
    add_plugins(config.plugin_dirs)
    sample = make_sample(config.seed)
    advantages = advantages_of(sample, config.algorithm)
    result = losses(sample, advantages, config.algorithm)
    print(f"{config.algorithm.algorithm_type} on {TASKS} tasks x {RUNS} runs of {TOKENS} tokens\n")
    for line in table(sample, advantages, result):
        print(line)
    print(f"\nloss {result.loss:.6g}, gradient of norm {result.gradient.norm():.6g}\n")
    failed = 0
    for name, trouble in checks(sample, advantages, config.algorithm):
        print(f"{'FAILED' if trouble else 'ok':7} {name}{f': {trouble}' if trouble else ''}")
        failed += bool(trouble)
    return 1 if failed else 0


def make_sample(seed: int) -> Sample:
    """Return answers whose ratios reach every branch of a clip: ratios up to about 4 relative to the sampler."""
    generator = torch.Generator().manual_seed(seed)
    shape = (TASKS * RUNS, TOKENS)

    def near(values: Tensor, spread: float) -> Tensor:
        return (values + spread * torch.randn(shape, generator=generator)).clamp(max=-0.01)

    mu = -torch.rand(shape, generator=generator) * 2 - 0.05
    old = near(mu, 0.1)
    mask = torch.ones(shape, dtype=torch.bool)
    for place in MASKED:
        mask[::2, place] = False
    entropy = torch.rand(shape, generator=generator) + 0.2
    policies = near(old, 0.5), mu, old, near(mu, 0.3), near(mu, 0.5)
    return Sample(mask, *policies, entropy, torch.rand(shape, generator=generator) * 0.1)


def advantages_of(sample: Sample, config: AlgorithmConfig) -> Tensor:
    """Return the advantages of the estimator, ``[answers, tokens]``; 0 without an estimator. A critic's estimator gets
    values of 0.
    """
    if config.estimator.kind == "none":
        return torch.zeros(sample.mask.shape)
    experiences = [
        Experience(
            eid=EID(batch=1, task=number // RUNS, run=number % RUNS),
            tokens=list(range(TOKENS + 2)),
            prompt_length=2,
            reward=REWARDS[number // RUNS][number % RUNS],
            action_mask=sample.mask[number],
            logprobs=sample.mu[number],
            teacher_logprobs=sample.teacher[number],
            info={
                "greedy": number % RUNS == RUNS - 1,
                "role": "policy",
                "step_reward": REWARDS[number // RUNS][number % RUNS],
                "env_state_hash": "start",
            },
        )
        for number in range(len(sample.mask))
    ]
    batch = ExperienceBatch.of(experiences)
    values = torch.zeros(sample.mask.numel()) if config.estimator.kind == "gae" else None
    baselines: dict[str, float] | None = {} if getattr(config.estimator, "baseline", "") == "role_mean" else None
    penalty = None
    if config.reward_kl is not None:
        penalty = config.reward_kl.coef * sampler_kl(sample.mu, sample.ref, config.reward_kl).flatten()
    estimated, _ = estimate(
        batch, config.estimator, min_group_runs=2, values=values, baselines=baselines, token_penalty=penalty
    )
    result = torch.zeros(sample.mask.shape)
    for experience in estimated:
        assert experience.advantages is not None
        result[int(experience.eid.task) * RUNS + experience.eid.run] = experience.advantages
    return result


@dataclass(frozen=True)
class Losses:
    """The loss of a batch, and its gradient ``[answers, tokens]``."""

    loss: float
    gradient: Tensor
    """Gradient of the loss with respect to the policy's logprob of each token."""


def losses(
    sample: Sample,
    advantages: Tensor,
    config: AlgorithmConfig,
    answers: slice = slice(None),
) -> Losses:
    """Return the loss of selected answers and its gradient.

    Args:
        sample: The batch.
        advantages: Advantages, ``[answers, tokens]``.
        config: Configuration of the algorithm.
        answers: Selected answers. Their scales, and pieces that compare tokens, are computed over the whole batch.
    """
    mask = sample.mask
    logprob = sample.logprob.clone().requires_grad_()
    counts = mask.sum(1).numpy()
    scales_of_answers = sequence_scales(counts, np.arange(len(counts)) // RUNS, config.reduction)
    scale = torch.from_numpy(scales_of_answers).float()[:, None].expand_as(mask)
    rows = torch.arange(len(mask))[:, None].expand_as(mask)
    whole = TokenView(
        logprob=logprob[mask],
        mu=sample.mu[mask],
        advantage=advantages[mask],
        scale=scale[mask],
        segment=rows[mask],
        old=sample.old[mask],
        ref=sample.ref[mask],
        teacher=sample.teacher[mask],
        entropy=sample.entropy[mask],
        entropy_baseline=sample.entropy_baseline[mask],
        staleness=(rows % 3)[mask],
    )
    view = replace(whole, weight=step_weights(whole, config, "debug"), chosen=step_choice(whole, config.regularisers))
    if has_classes(config):
        columns = class_losses(whole, config, torch.zeros_like(whole.segment, dtype=torch.bool)).columns
        view = replace(view, slope=columns["slope"], entropy_slope=columns["entropy_slope"], level=columns["level"])
    selected = torch.zeros(len(mask), dtype=torch.bool)
    selected[answers] = True
    view = view.where(selected[rows][mask])
    views = dict.fromkeys(("rl", "ce", "ref_kl", "pair"), view)
    loss = evaluate(views, config, component_weights(config, 1), entropy_coef=config.entropy_coef).loss
    torch.autograd.backward(loss)
    gradient = logprob.grad if logprob.grad is not None else torch.zeros_like(logprob)
    return Losses(loss.item(), gradient)


def table(sample: Sample, advantages: Tensor, losses_of_batch: Losses) -> Iterator[str]:
    """Yield a heading, then a line for each token of the first two answers of each task. A masked token is marked."""
    yield f"{'task/run':9}{'token':>6}{'reward':>8}{'advantage':>11}{'ratio':>9}{'gradient':>12}"
    for number in range(len(sample.mask)):
        if number % RUNS > 1:
            continue
        task, run = divmod(number, RUNS)
        for place in range(TOKENS):
            at = (number, place)
            ratio = math.exp(float(sample.logprob[at] - sample.mu[at]))
            cells = f"{float(advantages[at]):11.4f}{ratio:9.3f}{float(losses_of_batch.gradient[at]):12.6f}"
            yield f"{f'{task}/{run}':9}{place:6}{REWARDS[task][run]:8g}" + (
                cells if sample.mask[at] else f"{'masked':>11}"
            )


def checks(sample: Sample, advantages: Tensor, config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of each check with its problem; an empty text means that the check passed."""
    whole = losses(sample, advantages, config)
    finite = math.isfinite(whole.loss) and bool(whole.gradient.isfinite().all())
    overflow = f"loss {whole.loss}: mask values that overflow before exp or log"
    yield "loss and gradient are finite", "" if finite else overflow
    some = bool((whole.gradient != 0).any())
    yield "something is learned", "" if some else "the gradient is 0 everywhere: is a tensor detached?"
    leak = bool((whole.gradient[~sample.mask] != 0).any())
    spoiled = sample.spoiled()
    spoiled_losses = losses(spoiled, advantages_of(spoiled, config), config)
    leak = leak or not _near(whole.gradient, spoiled_losses.gradient) or abs(whole.loss - spoiled_losses.loss) > SMALL
    yield "masked tokens do not affect the loss", "the values at masked tokens change the loss" if leak else ""
    if not config.weights.pair:
        half = len(sample.mask) // 2
        parts = [losses(sample, advantages, config, part) for part in (slice(half), slice(half, None))]
        is_sum = _near(sum((part.gradient for part in parts), torch.zeros_like(whole.gradient)), whole.gradient)
        trouble = (
            ""
            if is_sum
            else "the gradient of two halves differs from the gradient of the whole: the loss of a "
            "token must not depend on other answers"
        )
        yield "micro-batches add up", trouble
    if set(component_weights(config, 1)) == {"rl"} and config.kl is None and not config.regularisers:
        still = losses(sample, torch.zeros_like(advantages), config).gradient
        moved = bool((still.abs() > SMALL).any()) and not config.entropy_coef
        yield "without advantage nothing is learned", "tokens of advantage 0 have a gradient" if moved else ""
        yield "good tokens become likelier", _direction(whole.gradient, advantages, sample.mask)


def _direction(gradient: Tensor, advantages: Tensor, mask: Tensor) -> str:
    wrong, trained = int((mask & (gradient * advantages > SMALL)).sum()), int(mask.sum())
    return f"{wrong} of {trained} tokens are pushed against their advantage" if wrong else ""


def _near(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, atol=SMALL, rtol=1e-4)
