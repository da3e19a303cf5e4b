"""One optimizer step over micro-batches, and the metrics of a train step: of its optimizer steps and of its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from trinity_mq.algorithms.class_losses import ClassLoss, class_losses
from trinity_mq.algorithms.corrections import step_choice
from trinity_mq.algorithms.estimators.runs import is_finite, scores
from trinity_mq.algorithms.evaluator import evaluate, needs_whole_step, step_weights
from trinity_mq.algorithms.mismatch import AGES, age_mask, metrics_by, mismatch_metrics, mismatch_sums, sums_by
from trinity_mq.algorithms.plugins import has_classes
from trinity_mq.algorithms.regularisers import kl_estimate
from trinity_mq.algorithms.scoring import Scores
from trinity_mq.algorithms.view import TokenView, clamp_log_ratio
from trinity_mq.config.agents import GuardConfig
from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.config.algorithm.pieces import CovarianceKL, LossConfig
from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.ragged import Indexes
from trinity_mq.experience.rules import DPO, RESPONSE_TRUNCATED
from trinity_mq.telemetry.trace import span
from trinity_mq.training.guard import ADVICE, Guard
from trinity_mq.training.model.policy import Policy
from trinity_mq.training.optimizers import decay_factor, make_step
from trinity_mq.training.packing import IMITATED, ROLES, SAMPLED, MicroBatch, StepTokens
from trinity_mq.training.parallel.ranks import Ranks
from trinity_mq.training.parallel.sharding import gathered
from trinity_mq.training.stopwatch import Stopwatch

Columns = Mapping[str, Tensor]
"""Columns of a :class:`TokenView` that need an earlier forward pass: ``old``, ``ref``, and the columns of
:func:`step_columns`. Each has shape ``[tokens]`` of the whole train step and lies on the policy's device.
"""


def entropy_coefficient(config: AlgorithmConfig, step: int, total_steps: int | None) -> float:
    """Return the entropy weight of train step ``step``; with ``entropy_decay`` it decays like the learning rate."""
    factor = decay_factor(config.optimizer, step, total_steps) if config.entropy_decay else 1.0
    return config.entropy_coef * factor


@dataclass(frozen=True)
class StepLoss:
    """The loss of one train step."""

    config: LossConfig
    weights: Mapping[str, float]
    """Weights of the loss components."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""


@torch.no_grad()
def score(policy: Policy, batches: Sequence[MicroBatch], tokens: int, needed: Collection[str] = frozenset()) -> Scores:
    """Return the policy's logprobs and entropies of the tokens in ``batches``, float32 ``[tokens]`` each, 0 for all
    other tokens.

    Args:
        policy: Policy that scores the tokens.
        batches: Any micro-batches of the train step. For a sharded policy: this rank's share of them.
        tokens: Number of trained tokens in the train step.
        needed: Columns that the loss reads. Entropy baselines are computed only if ``needed`` contains them.
    """
    with_baseline = "entropy_baseline" in needed
    columns = [torch.zeros(tokens, device=policy.device) for _ in range(2 + with_baseline)]
    for packed in batches:
        batch = packed.to(policy.device)
        scores = policy.score(batch, entropy_gradient=False, with_baseline=with_baseline)
        for column, values in zip(columns, scores, strict=False):
            assert values is not None
            column[batch.index] = values
    policy.ranks.sum(*columns)
    return Scores(*columns)


def token_view(batch: MicroBatch, logprob: Tensor, entropy: Tensor, columns: Columns) -> TokenView:
    """Return the trained tokens of a micro-batch as a view for the parts of a loss."""
    more: dict[str, Any] = {name: column[batch.index] for name, column in columns.items()}
    return TokenView(
        logprob=logprob,
        mu=batch.mu,
        advantage=batch.advantages,
        scale=batch.scale,
        segment=batch.segment,
        entropy=entropy,
        staleness=batch.staleness,
        teacher=batch.teacher,
        custom=batch.custom,
        **more,
    )


def compares_tokens(config: LossConfig) -> bool:
    """Return whether a part of the loss compares the tokens of a whole optimizer step."""
    return any(map(needs_whole_step, config.correction)) or any(
        isinstance(term, CovarianceKL) for term in config.regularisers
    )


@torch.no_grad()
def step_columns(batch: MicroBatch, scored: Scores, columns: Columns, loss: StepLoss, seed: str) -> ClassLoss:
    """Return the columns for the parts of a loss that need all tokens of an optimizer step, and the metrics of the
    loss's classes. The columns, ``[tokens]`` of the whole train step, are ``weight`` and ``chosen`` for the parts that
    compare sampled tokens, and the columns of :class:`ClassLoss`.

    The tokens are ordered by index, so neither packing nor the division among ranks affects the result.

    Args:
        batch: All tokens of the optimizer step.
        scored: Scores of the policy before the optimizer step, ``[tokens]`` of the train step, see :func:`score`.
        columns: Contains ``old`` and ``ref`` where the loss uses them.
        loss: The loss of the train step.
        seed: Seed of the random draws.

    Raises:
        PluginError: A class cannot be called, or did not return a loss.
    """
    batch = batch.to(scored.logprob.device)
    if scored.entropy_baseline is not None:
        columns = {**columns, "entropy_baseline": scored.entropy_baseline}
    view = token_view(batch, scored.logprob[batch.index], scored.entropy[batch.index], columns)
    order = batch.index.argsort()
    result, metrics = dict[str, Tensor](), dict[str, float]()
    if has_classes(loss.config):
        classes = class_losses(view.where(order), loss.config, (batch.role == IMITATED)[order])
        result |= {name: _spread(column, batch.index[order], scored) for name, column in classes.columns.items()}
        metrics = {f"actor/{name}": value for name, value in classes.metrics.items()}
    sampled = order[batch.role[order] == SAMPLED]
    if loss.weights.get("rl") and compares_tokens(loss.config) and len(sampled):
        samples = view.where(sampled)
        compared = {
            "weight": step_weights(samples, loss.config, seed),
            "chosen": step_choice(samples, loss.config.regularisers),
        }
        result |= {
            name: _spread(column, batch.index[sampled], scored)
            for name, column in compared.items()
            if column is not None
        }
    return ClassLoss(result, metrics)


def _spread(column: Tensor, index: Tensor, scored: Scores) -> Tensor:
    """Return the values of the tokens ``index`` as a column of the whole train step, 0 for all other tokens."""
    return column.new_zeros(scored.logprob.shape).index_copy(0, index, column)


DIFFERENCE = "rollout/rollout_vs_train_logprob_diff"
DECISIONS = 0.2
"""Fraction of tokens with the largest entropy; these tokens decide an answer (arXiv 2506.01939)."""
OFF_POLICY = {
    "masked_frac": "masked_frac",
    "masked_frac_pos": "masked_frac_pos",
    "masked_frac_neg": "masked_frac_neg",
    "correction_weight": "weight_mean",
}
"""Names of evaluator sums (keys) and of their metrics ``offpolicy/<name>`` (values)."""


@dataclass
class StepSums:
    """Statistics accumulated over the micro-batches of one optimizer step; scalars, except :attr:`entropies`."""

    tokens: int = 0
    """Number of trained tokens."""
    sampled: int = 0
    """Number of trained tokens in samples."""
    positions: int = 0
    """Positions of all micro-batches that went through the model; ``padding`` counts the padding among them."""
    padding: int = 0
    micro_batches: int = 0
    sequences: int = 0
    """Number of sampled sequences."""
    entropies: list[Tensor] = field(default_factory=list)
    """Entropies of sampled tokens, ``[tokens]`` each."""
    reduced: dict[str, Tensor] = field(default_factory=dict)
    """``loss`` and its components."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over sampled tokens; ``entropy`` over all trained tokens."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)
    mismatch: dict[str, Tensor] = field(default_factory=dict)
    """Sums over fresh sampled tokens, see :func:`mismatch_sums`, and sums by age and by engine, see :func:`sums_by`."""
    mismatch_maxima: dict[str, Tensor] = field(default_factory=dict)


def accumulate(
    policy: Policy, batches: Sequence[MicroBatch], loss: StepLoss, columns: Columns, watch: Stopwatch | None = None
) -> StepSums:
    """Add the gradient of all ``batches``, this rank's share of the optimizer step, to the policy's gradient. Return
    sums over all ranks for metrics.

    Losses are only summed. Their scale comes from the counts of the whole optimizer step, so the gradient does not
    depend on the division into micro-batches or among ranks. A micro-batch without sequences takes part in the
    collective passes of the other ranks and adds nothing.
    """
    total, watch = StepSums(), watch or Stopwatch(policy.device)
    has_entropy = loss.entropy_coef > 0 or loss.config.entropy_loss is not None
    for packed in batches:
        total.micro_batches += 1
        total.positions += packed.positions
        total.padding += packed.padding
        total.sequences += int((packed.sequence[packed.role == SAMPLED].bincount() > 0).sum())
        batch = packed.to(policy.device)
        with watch.part("forward"):
            logprob, entropy, _ = policy.score(batch, entropy_gradient=has_entropy)
        if not batch.tokens:
            with watch.part("backward"):
                torch.autograd.backward(logprob.sum())
            continue
        with watch.part("forward"):
            view = token_view(batch, logprob, entropy, columns)
            masks = {role: batch.role == role for role in set(ROLES.values())}
            present = {role: view if bool(flags.all()) else view.where(flags) for role, flags in masks.items()}
            views = {name: present[role] for name, role in ROLES.items()}
            terms = evaluate(views, loss.config, loss.weights, entropy_coef=loss.entropy_coef)
        with watch.part("backward"):
            torch.autograd.backward(terms.loss)
        total.tokens += batch.tokens
        total.sampled += present[SAMPLED].tokens
        _merge(total.reduced, {"loss": terms.loss.detach(), **terms.reduced})
        with span("observe tokens"):
            _merge(total.sums, {"entropy": entropy.detach().sum(), **terms.sums})
            _merge(total.maxima, terms.maxima, torch.maximum)
            _merge(total.minima, terms.minima, torch.minimum)
            _observe(total, present[SAMPLED], {name: flags[masks[SAMPLED]] for name, flags in batch.engines.items()})
    return over_ranks(total, policy.ranks)


def over_ranks(total: StepSums, ranks: Ranks) -> StepSums:
    """Return the sums, maxima and minima over all ranks."""
    if ranks.world == 1:
        return total
    parts = {item.name: getattr(total, item.name) for item in fields(total)}
    local_parts = {name: _numbers(part) if isinstance(part, dict) else part for name, part in parts.items()}
    result = StepSums()
    for rank_parts in ranks.gather(local_parts):
        for name, part in rank_parts.items():
            if not isinstance(part, dict):
                setattr(result, name, getattr(result, name) + part)
                continue
            join = torch.maximum if name.endswith("maxima") else torch.minimum if name == "minima" else torch.add
            scalars = {key: torch.tensor(value, dtype=torch.float64) for key, value in part.items()}
            _merge(getattr(result, name), scalars, join)
    return result


def _observe(total: StepSums, samples: TokenView, engines: Mapping[str, Tensor]) -> None:
    """Add the statistics of samples that do not come from their loss: advantages, the difference between engine and
    policy logprobs, and the KL to the reference, if there is a reference.

    ``engines`` marks the tokens of each engine, bool ``[tokens]``, where several engines sampled.
    """
    if not samples.tokens:
        return
    assert samples.staleness is not None
    assert samples.entropy is not None
    total.entropies.append(samples.entropy.detach())
    difference = (samples.logprob.detach() - samples.mu).abs()
    advantage = samples.advantage.double()  # a variance is a small difference of large sums, so it needs float64
    _merge(total.sums, {"difference": difference.sum(), "advantage": advantage.sum()})
    _merge(total.sums, {"advantage_squares": advantage.square().sum(), "advantage_positive": (advantage > 0).sum()})
    _merge(total.maxima, {"difference": difference.max()}, torch.maximum)
    if samples.ref is not None:
        ref_difference = clamp_log_ratio(samples.logprob.detach() - samples.ref)
        _merge(total.sums, {f"kl_ref_{kind}": kl_estimate(ref_difference, kind).sum() for kind in ("k1", "k3")})
    sums, maxima = mismatch_sums(samples.where(samples.staleness == 0))
    groups = {age: age_mask(samples.staleness, age) for age in AGES}
    groups |= {f"engine/{name}": flags for name, flags in engines.items()}
    _merge(total.mismatch, sums | sums_by(samples, groups))
    _merge(total.mismatch_maxima, maxima, torch.maximum)


def _merge(
    total: dict[str, Tensor], values: Mapping[str, Tensor], join: Callable[[Tensor, Tensor], Tensor] = torch.add
) -> None:
    """Join each value with the total of its name."""
    for name, value in values.items():
        total[name] = join(total[name], value) if name in total else value


def optimizer_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    loss: StepLoss,
    columns: Columns,
    clip_grad: float,
    *,
    guard: Guard | None = None,
    has_moved: bool = False,
    offload: bool = False,
    watch: Stopwatch | None = None,
) -> tuple[bool, dict[str, float]]:
    """Accumulate the gradient of all ``batches``, clip it to the norm ``clip_grad`` and update the weights once.

    Args:
        policy: Policy to update.
        optimizer: Optimizer of the policy.
        batches: All micro-batches of the optimizer step, or this rank's share of them.
        loss: Loss of the train step.
        columns: Columns from earlier forward passes.
        clip_grad: Maximum norm of the gradient.
        guard: Judges the step. Default: a guard with default settings and no history.
        has_moved: Whether the train step has already changed the weights. If so, the mismatch does not measure the
            engine, and the guard ignores it.
        offload: Whether the optimizer's state lies in host memory between steps; see :func:`make_step`.
        watch: Measures the duration of the parts.

    Returns:
        Whether the step was applied (otherwise weights and optimizer do not change), and metrics. The metrics of a
        skipped step include ``actor/skipped_<reason>``.

    Raises:
        PluginError: A custom surrogate or correction raised an error, or did not return a number for each token.
        TrainingStopped: Too many steps in a row were skipped.
    """
    guard, watch = guard or Guard(GuardConfig()), watch or Stopwatch(policy.device)
    optimizer.zero_grad()
    total = accumulate(policy, batches, loss, columns, watch)
    with watch.part("optimizer"):
        norm = gathered(clip_grad_norm_(policy.parameters, clip_grad)).item()
    with span("measure step"):
        metrics = step_metrics(total) | {"actor/grad_norm": norm}
    reason = guard.judge(
        # A non-finite entropy makes the loss non-finite only if entropy has a weight, but it is always a sign of
        # damage.
        loss=metrics["actor/loss"] if math.isfinite(metrics["actor/entropy"]) else math.nan,
        norm=norm,
        mismatch=None if has_moved else metrics.get("mismatch/k3"),
    )
    if reason is not None:
        return False, metrics | {f"{SKIPPED}{reason}": 1.0}
    with watch.part("optimizer"):
        norms = make_step(optimizer, offload=offload)
    metrics["actor/grad_norm_clipped"] = min(norm, clip_grad)
    return True, metrics | {"actor/update_norm": norms.update, "actor/weight_norm": norms.weight}


def step_metrics(total: StepSums) -> dict[str, float]:
    """Return the metrics of an optimizer step.

    Parts of the loss are reduced like the loss. Fractions and means are over the sampled trained tokens, with these
    exceptions: the entropy's mean is over all trained tokens, ``masked_frac`` of an age over the tokens of this
    age, and ``seq_masked_frac`` over the sampled sequences. Without samples only the metrics of the loss, the entropy
    and the micro-batches are returned. ``advantage/std`` is the population standard deviation, not the unbiased
    estimate.
    """
    reduced, sums, maxima = _numbers(total.reduced), _numbers(total.sums), _numbers(total.maxima)
    mismatch = _numbers(total.mismatch)
    metrics = {f"actor/{name}": value for name, value in reduced.items()}
    metrics["actor/entropy"] = sums.pop("entropy") / total.tokens
    metrics["perf/padding_frac"] = total.padding / total.positions
    metrics["perf/micro_batches"] = float(total.micro_batches)
    if not total.sampled:
        return metrics
    metrics["actor/entropy_top20"] = _mean_of_largest(torch.cat(total.entropies), DECISIONS)
    metrics[f"{DIFFERENCE}/mean"] = sums.pop("difference") / total.sampled
    metrics[f"{DIFFERENCE}/max"] = maxima.pop("difference")
    mean, square = (sums.pop(name) / total.sampled for name in ("advantage", "advantage_squares"))
    metrics |= {"advantage/mean": mean, "advantage/std": math.sqrt(max(square - mean**2, 0.0))}
    metrics["advantage/pos_frac"] = sums.pop("advantage_positive") / total.sampled
    ages = {age: sums.pop(f"masked_frac/{age}", 0.0) for age in AGES}
    for age, masked in ages.items():
        if tokens := mismatch[f"tokens/{age}"]:
            metrics[f"offpolicy/masked_frac/{age}"] = masked / tokens
    if squares := sums.pop("ratio_squares", 0.0):
        metrics["actor/ess"] = sums["ratio_mean"] ** 2 / (total.sampled * squares)
    metrics["offpolicy/seq_masked_frac"] = sums.pop("masked_sequences", 0.0) / total.sequences
    metrics["offpolicy/weight_max"] = maxima.pop("correction_weight_max", 1.0)
    unweighted = {"correction_weight": float(total.sampled)}
    for name, metric in OFF_POLICY.items():
        metrics[f"offpolicy/{metric}"] = sums.pop(name, unweighted.get(name, 0.0)) / total.sampled
    metrics |= {f"actor/{name}": value / total.sampled for name, value in sums.items()}
    metrics |= {f"actor/{name}": value for name, value in (maxima | _numbers(total.minima)).items()}
    return metrics | mismatch_metrics(mismatch, _numbers(total.mismatch_maxima)) | metrics_by(mismatch)


def _mean_of_largest(values: Tensor, share: float) -> float:
    """Return the mean of the largest values: a fraction ``share`` of all values, at least one value."""
    return values.topk(max(1, round(share * len(values)))).values.mean().item()


def _numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalars as Python numbers, in one transfer from the device."""
    if not scalars:
        return {}
    values: list[float] = torch.stack([scalar.double() for scalar in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))


WRITTEN = "output/experiences"
"""Metric of a train step that wrote experiences to an output instead of training on them: their number."""

SKIPPED = "actor/skipped_"
"""Prefix of the metrics that count skipped optimizer steps, by reason."""
FIRST = (DIFFERENCE, "mismatch/")
"""Prefixes of the metrics that compare the engine with the trainer. Only the first optimizer step of a train step
reports them."""


def skipped_for(metrics: Mapping[str, float]) -> str | None:
    """Return the reason why the optimizer step with these metrics was skipped, None if it was applied."""
    return next((name.removeprefix(SKIPPED) for name in metrics if name.startswith(SKIPPED)), None)


class StepTotals:
    """Collects the reports of the optimizer steps in one train step."""

    def __init__(self) -> None:
        self._applied: list[dict[str, float]] = []
        self._first: dict[str, float] | None = None
        self._skipped = dict.fromkeys((*(f"{SKIPPED}{reason}" for reason in ADVICE), f"{SKIPPED}empty"), 0.0)

    def add(self, applied: bool, metrics: dict[str, float]) -> None:
        """Count one optimizer step."""
        if self._first is None:
            # Only the first step is sure to run on the weights from before the train step.
            self._first = {name: value for name, value in metrics.items() if name.startswith(FIRST)}
        if applied:
            self._applied.append(metrics)
        for name in metrics.keys() & self._skipped.keys():
            self._skipped[name] += metrics[name]

    def add_empty(self) -> None:
        """Count a mini-batch without a trained token."""
        self._skipped[f"{SKIPPED}empty"] += 1

    def metrics(self) -> dict[str, float]:
        """Return averages over the applied optimizer steps (for ``*_max`` the maximum, for ``*_min`` the minimum), and
        counts. All values are finite. Metrics that begin with :data:`FIRST` are values of the first optimizer step,
        whether or not it was applied.
        """
        result = {"actor/optimizer_steps": float(len(self._applied)), **self._skipped}
        for name in dict.fromkeys(name for metrics in self._applied for name in metrics):
            values = [metrics[name] for metrics in self._applied if name in metrics]
            extreme = {"_max": max, "_min": min}.get(name[-4:])
            result[name] = math.fsum(values) / len(values) if extreme is None else extreme(values)
        result |= self._first or {}
        return {name: value for name, value in result.items() if math.isfinite(value)}


def tokens_of(batch: ExperienceBatch) -> Indexes:
    """Return the token count of each experience. A pair counts both answers."""
    lengths = [np.maximum(batch.lengths(name), 0) for name in ("tokens", "chosen", "rejected")]
    total: Indexes = lengths[0] + lengths[1] + lengths[2]
    return total


def length_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """Return the lengths of prompts and answers in tokens. The answers of a pair count only in the mean.

    An answer is right if its :func:`scores` is above 0. Every other answer with a score is wrong.

    Args:
        batch: At least one experience.
    """
    sizes, prompts = tokens_of(batch), batch.prompt_lengths()
    pairs = np.array([kind == DPO for kind in batch.values("experience_type")], dtype=bool)
    metrics = {
        "prompt_length/mean": int(prompts.sum()) / len(batch),
        "response_length/mean": int(sizes.sum() - prompts.sum()) / (len(batch) + int(pairs.sum())),
    }
    if pairs.all():
        return metrics
    lengths = (sizes - prompts)[~pairs]
    cut = np.array([status == RESPONSE_TRUNCATED for status in batch.values("truncate_status")], dtype=bool)[~pairs]
    metrics |= {"response_length/max": float(lengths.max()), "response_length/clipped_frac": float(cut.mean())}
    finite_scores = [score if is_finite(score) else np.nan for score in scores(batch)]
    values = np.array(finite_scores, dtype=np.float64)[~pairs]
    for name, chosen in (("right", values > 0), ("wrong", values <= 0)):
        if chosen.any():
            metrics[f"response_length/{name}/mean"] = float(lengths[chosen].mean())
    return metrics


def token_metrics(tokens: StepTokens, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the number of trained tokens and the age of the sampled tokens in train steps. Where answers are imitated,
    also return their share of the sequences and the weight of their loss component.

    Args:
        tokens: Tokens of the train step.
        weights: Weights of the loss components.
    """
    metrics = {"data/trained_tokens": float(tokens.tokens)}
    if "ce" in weights and len(tokens.role):
        metrics |= {"data/expert_frac": float((tokens.role == IMITATED).mean()), "data/mu": weights["ce"]}
    ages = tokens.columns["staleness"][torch.from_numpy(np.repeat(tokens.role == SAMPLED, tokens.counts))]
    if len(ages):
        shares = {name: age_mask(ages, name).float().mean() for name in AGES}
        staleness = {"mean": ages.float().mean(), "max": ages.max(), **shares}
        metrics |= {f"sample/staleness/tokens/{name}": float(value) for name, value in staleness.items()}
    return metrics
