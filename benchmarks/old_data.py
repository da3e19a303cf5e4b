"""Rules for old data: held-out accuracy by the age of the data, each rule at its own best learning rate.

    python benchmarks/old_data.py --out docs/curves             # the tables of docs/algorithms-measured.md
    python benchmarks/old_data.py --out docs/curves --table     # prints the rows whose runs are finished

A small network (an MLP over the tokens so far) learns to write three digits in ascending order. Its weights from
``lag`` train steps ago sample the answers. Loss, corrections, reduction and schedules are those of this project;
network, sampling and AdamW are written here, so that all runs of a rule are trained at the same time, with one call for
each operation: the study takes a few minutes on one idle core.

The study has two parts. First, each rule is trained at lag ``CHOICE`` with seed 0 and each of ``--rates``; the rate
with the highest final accuracy is its best rate. Then each rule is trained at its best rate with each of ``--lags`` and
``--seeds``. Finished runs are written to ``old-data.json`` at once, and a study that was stopped continues there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trinity_mq.algorithms.evaluator import needs_whole_step, step_weights, token_losses
from trinity_mq.algorithms.reduction import sequence_scales
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config import AlgorithmConfig
from trinity_mq.config.algorithm.section import OptimizerConfig
from trinity_mq.training.optimizers import decay_factor, learning_rate

DIGITS = 3
"""Digits of a question, and tokens of an answer."""
QUESTIONS, ANSWERS = 16, 8
"""Questions of a train step, and answers to each."""
INPUTS = 10 * DIGITS + 10 * (DIGITS - 1) + DIGITS
"""Inputs of the network: the question, the digits written so far, and the position."""
FAN_IN = {INPUTS: 2 * DIGITS}
"""Inputs of a layer that are not 0, where that is fewer than all."""
WIDTH = 64
"""Hidden units of both layers of the network."""
CHOICE = 8
"""Lag at which the learning rates are chosen, in train steps."""
EVALUATIONS = 6
"""Number of evaluations of a run, evenly spread; the last after its last step."""
CLIP = {"low": 0.2, "high": 0.28}
STEPS_4 = {"mini_batches": 4}

RULES: dict[str, dict[str, Any]] = {
    "none": {"algorithm_type": "grpo", "ratio": {"kind": "self"}},
    "grpo": {"algorithm_type": "grpo"},
    "gspo": {"algorithm_type": "gspo", "surrogate": CLIP},
    "ipo": {"algorithm_type": "ipo"},
    "m2po": {"algorithm_type": "m2po"},
    "tis": {"algorithm_type": "cispo", "surrogate": {"cap": 2.0}},
    "grpo x4": {"algorithm_type": "grpo"} | STEPS_4,
    "decoupled x4": {"algorithm_type": "decoupled"} | STEPS_4,
    "icepop x4": {"algorithm_type": "icepop"} | STEPS_4,
}
"""Settings of each rule. ``none`` ignores that older weights sampled the data. ``tis`` is truncated importance sampling
against the sampler: the policy gradient, weighted by the ratio up to 2. ``x4`` has four optimizer steps per batch: with
one step, ``decoupled`` is ``tis``."""


@dataclass
class Run:
    """One training run and its measurements."""

    rule: str
    lag: int
    """Train steps between the weights that sample and the weights that are trained."""
    rate: float
    """Peak learning rate."""
    seed: int
    steps: int
    accuracy: list[float] = field(default_factory=list)
    """Share of the held-out questions with a right likeliest answer, by evaluation."""
    kl: list[float] = field(default_factory=list)
    """KL(sampler, policy) of the answers trained on, in nats per token: means over the steps since the last
    evaluation."""
    entropy: list[float] = field(default_factory=list)
    """Entropy of the policy on these answers, in nats per token, likewise."""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, int, float, int, int]:
        return self.rule, self.lag, self.rate, self.seed, self.steps


class Networks:
    """One network for each of several runs: logits of the next digit from the question and the digits written so far.

    The weights of a run are a row of ``weights``, so that all runs are trained with the same calls.
    """

    SHAPES = ((INPUTS, WIDTH), (1, WIDTH), (WIDTH, WIDTH), (1, WIDTH), (WIDTH, 10), (1, 10))

    def __init__(self, seeds: Sequence[int]) -> None:
        sizes = [rows * columns for rows, columns in self.SHAPES]
        self._sizes = sizes
        rows = []
        for seed in seeds:
            random = torch.Generator().manual_seed(seed)
            scales = [
                torch.full((size,), 0.0 if one == 1 else (1 / FAN_IN.get(one, one)) ** 0.5)
                for size, one in zip(sizes, (shape[0] for shape in self.SHAPES), strict=True)
            ]
            rows.append(torch.randn(sum(sizes), generator=random) * torch.cat(scales))
        self.weights = torch.stack(rows).requires_grad_()

    def __call__(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the log-probabilities of the next digit, ``[runs, inputs, 10]``."""
        parts = [
            part.view(-1, *shape) for part, shape in zip(torch.split(weights, self._sizes, 1), self.SHAPES, strict=True)
        ]
        state = torch.baddbmm(parts[1], inputs, parts[0]).relu()
        state = torch.baddbmm(parts[3], state, parts[2]).relu()
        return torch.baddbmm(parts[5], state, parts[4]).log_softmax(-1)


@dataclass(frozen=True)
class Sampled:
    """Answers to questions."""

    inputs: Tensor
    """The network's inputs at each position, ``[runs, answers, DIGITS, INPUTS]``."""
    answers: Tensor
    """``[runs, answers, DIGITS]``"""
    distribution: Tensor
    """Log-probabilities of all digits under the weights that sampled, ``[runs, answers, DIGITS, 10]``."""


def encoded(questions: Tensor) -> Tensor:
    """Return the network's inputs at each position, with no digit written, ``[runs, answers, DIGITS, INPUTS]``."""
    inputs = torch.zeros(*questions.shape, INPUTS)
    inputs[..., : 10 * DIGITS] = nn.functional.one_hot(questions, 10).flatten(2)[:, :, None]
    inputs[..., -DIGITS:] = torch.eye(DIGITS)
    return inputs


@torch.no_grad()
def answered(networks: Networks, weights: Tensor, questions: Tensor, noise: Tensor | None) -> Sampled:
    """Answer questions, ``[runs, answers, DIGITS]``.

    ``noise`` is Gumbel's, as large as the log-probabilities; None takes the likeliest digits.
    """
    inputs = encoded(questions)
    digits, distributions = [], []
    for place in range(DIGITS):
        distribution = networks(weights, inputs[:, :, place])
        digit = (distribution if noise is None else distribution + noise[:, :, place]).argmax(-1)
        if place < DIGITS - 1:
            written = slice(10 * (DIGITS + place), 10 * (DIGITS + place + 1))
            inputs[:, :, place + 1 :, written] = nn.functional.one_hot(digit, 10)[:, :, None].float()
        digits.append(digit)
        distributions.append(distribution)
    return Sampled(inputs, torch.stack(digits, 2), torch.stack(distributions, 2))


@dataclass(frozen=True)
class Batch(Sampled):
    """The answers of a train step."""

    advantages: Tensor
    """``[runs, answers, DIGITS]``"""
    old: Tensor
    """Log-probabilities of the answers under the weights at the start of the train step."""

    def part(self, chosen: Tensor) -> Batch:
        """Return some of the answers of each run."""
        return Batch(*(getattr(self, each.name)[:, chosen] for each in fields(self)))

    def view(self, distribution: Tensor, config: AlgorithmConfig) -> TokenView:
        """Return the tokens of all runs, one run after the other, for the policy's log-probabilities of all digits."""
        runs, count, _ = self.answers.shape
        scales = sequence_scales(np.full(count, DIGITS), np.zeros(count, dtype=np.int64), config.reduction)
        view = TokenView(
            logprob=of(distribution, self.answers).flatten(),
            mu=of(self.distribution, self.answers).flatten(),
            advantage=self.advantages.flatten(),
            scale=torch.from_numpy(scales).float().repeat_interleave(DIGITS).repeat(runs),
            segment=torch.arange(runs * count).repeat_interleave(DIGITS),
            old=self.old.flatten(),
            entropy=-(distribution.exp() * distribution).sum(-1).flatten(),
        )
        if not any(needs_whole_step(rule) for rule in config.correction):
            return view
        run = torch.arange(runs).repeat_interleave(count * DIGITS)
        return replace(view, weight=torch.cat([_step_weights(view.where(run == each), config) for each in range(runs)]))


@torch.no_grad()
def _step_weights(view: TokenView, config: AlgorithmConfig) -> Tensor:
    """Return the corrections that compare the tokens of a whole optimizer step of one run."""
    weight = step_weights(replace(view, logprob=view.logprob.detach()), config, "old-data")
    assert weight is not None
    return weight


def of(distribution: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probabilities of the answers' digits."""
    return distribution.gather(-1, answers[..., None])[..., 0]


def configuration(rule: str) -> AlgorithmConfig:
    """Return the algorithm of a rule; all rules share estimator, entropy bonus, optimizer and schedules."""
    shared = {
        "estimator": {"kind": "group", "scale": "batch"},
        "entropy_coef": 0.01,
        "entropy_decay": True,
        "optimizer": {"lr": 1.0, "lr_warmup_steps": 10},
    }
    return AlgorithmConfig.model_validate(RULES[rule] | shared)


def train(runs: Sequence[Run]) -> None:
    """Train runs of one rule at the same time, from random weights, and fill in their measurements."""
    began = time.monotonic()
    config = configuration(runs[0].rule)
    steps = runs[0].steps
    networks = Networks([run.seed for run in runs])
    optimizer = AdamW(networks.weights, torch.tensor([[run.rate] for run in runs]))
    versions = deque([networks.weights.detach().clone()], maxlen=max(run.lag for run in runs) + 1)
    draws = Draws([run.seed for run in runs])
    recent: list[tuple[Tensor, Tensor]] = []
    for step in range(1, steps + 1):
        behind = [versions[max(0, len(versions) - 1 - run.lag)][row] for row, run in enumerate(runs)]
        batch = _batch(networks, torch.stack(behind), draws, config)
        recent.append(_train_step(networks, optimizer, batch, config, step, steps))
        versions.append(networks.weights.detach().clone())
        if step % (steps // EVALUATIONS) == 0:
            _measure(runs, networks, recent)
            recent.clear()
    for run in runs:
        run.seconds = (time.monotonic() - began) / len(runs)


class AdamW:
    """AdamW with a learning rate for each run, and each run's gradient clipped by itself."""

    def __init__(self, weights: Tensor, rates: Tensor) -> None:
        self._weights, self._rates = weights, rates
        self._first, self._second = torch.zeros_like(weights), torch.zeros_like(weights)
        self._steps = 0

    @torch.no_grad()
    def step(self, loss: Tensor, config: OptimizerConfig, factor: float) -> None:
        """Move the weights of all runs down the gradient of ``loss``; ``factor`` is the schedule's."""
        (gradient,) = torch.autograd.grad(loss, self._weights)
        gradient *= (config.clip_grad / gradient.norm(dim=1, keepdim=True).clamp_min(1e-12)).clamp_max(1.0)
        self._steps += 1
        first, second = config.betas
        self._first.lerp_(gradient, 1 - first)
        self._second.lerp_(gradient.square(), 1 - second)
        root = (self._second / (1 - second**self._steps)).sqrt_().add_(config.eps)
        self._weights -= self._rates * factor / (1 - first**self._steps) * self._first / root


class Draws:
    """Random numbers of the runs: runs of one seed get the same, whatever other runs are trained at the same time."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._random = {seed: torch.Generator().manual_seed(1000 + seed) for seed in seeds}
        self._seeds = seeds

    def questions(self) -> Tensor:
        """Return the questions of a step, each ``ANSWERS`` times, ``[runs, answers, DIGITS]``."""
        return self._each(lambda random: torch.randint(0, 10, (QUESTIONS, DIGITS), generator=random)).repeat_interleave(
            ANSWERS, 1
        )

    def noise(self) -> Tensor:
        """Return Gumbel noise, ``[runs, answers, DIGITS, 10]``."""
        shape = (QUESTIONS * ANSWERS, DIGITS, 10)
        return self._each(lambda random: -torch.empty(shape).exponential_(generator=random).log())

    def _each(self, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        drawn = {seed: draw(random) for seed, random in self._random.items()}
        return torch.stack([drawn[seed] for seed in self._seeds])


def _batch(networks: Networks, sampler: Tensor, draws: Draws, config: AlgorithmConfig) -> Batch:
    """Sample answers to new questions; the reward is the share of digits at their right place."""
    questions = draws.questions()
    sampled = answered(networks, sampler, questions, draws.noise())
    answers = sampled.answers
    rewards = (answers == questions.sort(-1).values).float().mean(-1).view(-1, QUESTIONS, ANSWERS)
    centred = (rewards - rewards.mean(-1, keepdim=True)).flatten(1)
    advantages = centred / (centred.std(-1, keepdim=True) + 1e-4)
    old = of(sampled.distribution, answers)
    if config.anchor == "old":
        with torch.no_grad():
            old = of(_distribution(networks, sampled.inputs), answers)
    return Batch(sampled.inputs, answers, sampled.distribution, advantages[..., None].expand(-1, -1, DIGITS), old)


def _distribution(networks: Networks, inputs: Tensor) -> Tensor:
    return networks(networks.weights, inputs.flatten(1, 2)).view(*inputs.shape[:3], 10)


def _train_step(
    networks: Networks, optimizer: AdamW, batch: Batch, config: AlgorithmConfig, step: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Train on a batch; return KL(sampler, policy) and the entropy before its last optimizer step, ``[runs]`` each."""
    order = torch.randperm(batch.answers.shape[1], generator=torch.Generator().manual_seed(step))
    factor = learning_rate(config.optimizer, step, steps)
    for chosen in order.chunk(config.mini_batches):
        part = batch.part(chosen) if config.mini_batches > 1 else batch
        distribution = _distribution(networks, part.inputs)
        view = part.view(distribution, config)
        assert view.entropy is not None
        losses, _ = token_losses(view, config)
        bonus = config.entropy_coef * decay_factor(config.optimizer, step, steps)
        optimizer.step(((losses - bonus * view.entropy) * view.scale).sum(), config.optimizer, factor)
    policy = distribution.detach()
    kl = (part.distribution.exp() * (part.distribution - policy)).sum(-1)
    return kl.mean((1, 2)), -(policy.exp() * policy).sum(-1).mean((1, 2))


def _measure(runs: Sequence[Run], networks: Networks, recent: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add an evaluation to each run."""
    test = torch.randint(0, 10, (500, DIGITS), generator=torch.Generator().manual_seed(999)).expand(len(runs), -1, -1)
    answers = answered(networks, networks.weights, test, None).answers
    accuracy = (answers == test.sort(-1).values).all(-1).float().mean(-1)
    kl, entropy = (torch.stack(values).mean(0) for values in zip(*recent, strict=True))
    for run, *values in zip(runs, accuracy.tolist(), kl.tolist(), entropy.tolist(), strict=True):
        for series, value in zip((run.accuracy, run.kl, run.entropy), values, strict=True):
            series.append(round(value, 5))


class Study:
    """The finished runs, written to their file after each run."""

    def __init__(self, file: Path, *, trains: bool) -> None:
        self._file, self._trains = file, trains
        file.parent.mkdir(parents=True, exist_ok=True)
        runs = [Run(**each) for each in json.loads(file.read_text())] if file.exists() else []
        self.runs = {run.key: run for run in runs}

    def of(self, planned: Sequence[Run]) -> list[Run]:
        """Return finished runs; the missing ones are trained first, those of a rule at the same time.

        A study that does not train returns no run where one is missing.
        """
        missing = {run.key: run for run in planned if run.key not in self.runs}
        if missing and not self._trains:
            return []
        for rule in dict.fromkeys(run.rule for run in missing.values()):
            together = [run for run in missing.values() if run.rule == rule]
            train(together)
            self.runs |= {run.key: run for run in together}
            rows = [asdict(self.runs[key]) for key in sorted(self.runs)]
            self._file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            for run in together:
                print(f"{run.key}: {run.accuracy} after {run.seconds:.1f} s", flush=True)
        return [self.runs[run.key] for run in planned]


def twin(rule: str, lag: int) -> str:
    """Return the rule that is run instead: on fresh data all rules with equally many optimizer steps agree."""
    if lag:
        return rule
    return "grpo x4" if "mini_batches" in RULES[rule] else "grpo"


class Plan:
    """The runs of the study, by rule."""

    def __init__(self, study: Study, options: argparse.Namespace) -> None:
        self._study, self.options = study, options

    def rules(self) -> list[str]:
        """Return the rules whose rate is chosen."""
        return [rule for rule in self.options.rules if self.choice(rule)]

    def choice(self, rule: str) -> list[Run]:
        """Return the runs from which the rate of a rule is chosen."""
        return self._study.of([Run(rule, CHOICE, rate, 0, self.options.steps) for rate in self.options.rates])

    def best_rate(self, rule: str) -> float:
        """Return the rate of the highest final accuracy; of equals, that of the highest mean accuracy."""
        return max(self.choice(rule), key=lambda run: (run.accuracy[-1], sum(run.accuracy))).rate

    def final(self, rule: str, lags: Sequence[int]) -> list[Run]:
        """Return the runs of a rule at its best rate."""
        rate = self.best_rate(rule)
        seeds, steps = self.options.seeds, self.options.steps
        return self._study.of([Run(twin(rule, lag), lag, rate, seed, steps) for lag in lags for seed in seeds])


def rates_table(plan: Plan) -> str:
    """Return a Markdown table of the choice of rates: final accuracy by rule and rate."""
    rows = []
    for rule in plan.rules():
        best = plan.best_rate(rule)
        cells = [(run.rate, f"{run.accuracy[-1]:.2f}") for run in plan.choice(rule)]
        rows.append([f"`{rule}`", *(f"**{cell}**" if rate == best else cell for rate, cell in cells)])
    return _markdown(["rule", *(f"{rate:g}" for rate in plan.options.rates)], rows)


def lags_table(plan: Plan) -> str:
    """Return a Markdown table of the rules at their best rates: a row for each lag and rule."""
    for rule in plan.rules():
        plan.final(rule, [lag for lag in plan.options.lags if lag])
    rows: list[tuple[tuple[int, float], list[str]]] = []
    for lag in plan.options.lags:
        for rule in plan.rules():
            if not (runs := plan.final(rule, [lag])):
                continue
            final = statistics.fmean(run.accuracy[-1] for run in runs)
            cells = [
                f"`{rule}`",
                str(lag),
                f"{plan.best_rate(rule):g}",
                _mean(run.accuracy[EVALUATIONS // 2 - 1] for run in runs),
                f"{final:.2f}",
                ", ".join(f"{run.accuracy[-1]:.2f}" for run in runs),
                f"{statistics.fmean(statistics.fmean(run.kl) for run in runs):.3f}",
                _mean(run.entropy[EVALUATIONS // 2 - 1] for run in runs),
                _mean(run.entropy[-1] for run in runs),
            ]
            rows.append(((lag, -final), cells))
    half, end = plan.options.steps // 2, plan.options.steps
    heads = ["rule", "lag", "rate", f"step {half}", f"step {end}", "seeds at the end", "KL to the sampler"]
    heads += [f"entropy, step {half}", f"entropy, step {end}"]
    return _markdown(heads, [cells for _, cells in sorted(rows, key=lambda row: row[0])])


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):.2f}"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run what is missing of the study and print its two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2, 3e-2], help="peak learning rates")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4, 8, 16], help="train steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=720, help="train steps of a run")
    parser.add_argument("--out", default="benchmarks/curves", help="folder of old-data.json")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(Study(Path(options.out) / "old-data.json", trains=not options.table), options)
    print(rates_table(plan), lags_table(plan), sep="\n\n")


if __name__ == "__main__":
    main()
