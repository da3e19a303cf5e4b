"""Advantages per token along a run: discounted returns, and generalised advantage estimation with a critic's values.

The trajectory of a run is the trained tokens of its steps, in the order of the steps. Tokens that are not trained on
(tool results, padding) are skipped: they neither discount nor contribute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trinity_mq.algorithms.estimators.runs import (
    LARGEST,
    Counts,
    Flags,
    Numbers,
    mask_lengths,
    numbered,
    per_token,
    response_field,
    reward_metrics,
    run_values,
    trained_tokens,
    with_advantages,
)
from trinity_mq.config.estimators import DiscountedEstimator, GaeEstimator
from trinity_mq.experience import ExperienceBatch


@dataclass(frozen=True)
class Trajectories:
    """The positions of the trained tokens of each run among the response tokens of a batch."""

    tokens: Counts
    """Positions, run by run and in sampling order within each run: int64 ``[trained tokens]``."""
    lengths: Counts
    """Number of trained tokens of each run that has any: int64 ``[runs]``."""
    rids: tuple[str, ...]
    """Ids of the runs in :attr:`lengths`."""

    @property
    def ends(self) -> Counts:
        """Index of the last token of each run in :attr:`tokens`."""
        return self.lengths.cumsum() - 1


def trajectories(batch: ExperienceBatch) -> Trajectories:
    """Return the trajectories of a batch, with runs in the order of their appearance."""
    steps, runs, rids = batch.values("eid.step"), numbered(batch.ids("rid")), dict.fromkeys(batch.ids("rid"))
    places = np.empty(len(batch), dtype=np.int64)
    places[np.lexsort((np.array(steps, dtype=np.int64), runs))] = np.arange(len(batch))
    tokens = np.flatnonzero(trained_tokens(batch))
    owner = np.repeat(np.arange(len(batch)), mask_lengths(batch))[tokens]
    counts = np.bincount(runs[owner], minlength=len(rids))
    acting = tuple(rid for rid, count in zip(rids, counts, strict=True) if count)
    return Trajectories(tokens[np.argsort(places[owner], kind="stable")], counts[counts > 0], acting)


def discounted_sums(values: Numbers, lengths: Counts, factor: float) -> Numbers:
    """Return ``S_t = v_t + factor * S_{t+1}`` along each of several rows, which are concatenated in ``values``.

    Args:
        values: Float64 ``[sum of lengths]``.
        lengths: Length of each row, at least 1, int64 ``[rows]``.
        factor: 0 to 1.
    """
    order = np.argsort(-lengths, kind="stable")
    ends, remaining = (lengths.cumsum() - 1)[order], lengths[order]
    result, sums = np.empty(len(values)), np.zeros(len(lengths))
    for back in range(int(lengths.max(initial=0))):
        rows = int(np.searchsorted(-remaining, -back))  # rows longer than ``back``
        at = ends[:rows] - back
        sums[:rows] = values[at] + factor * sums[:rows]
        result[at] = sums[:rows]
    return result


def gae(rewards: Numbers, values: Numbers, lengths: Counts, gamma: float, lam: float) -> Numbers:
    """Return ``A_t = d_t + gamma lam A_{t+1}`` with ``d_t = r_t + gamma V_{t+1} - V_t`` (arXiv 1506.02438, equations 11
    and 16). The value after the last token of a row is 0.

    Args:
        rewards: Float64 ``[tokens]``, of several concatenated rows.
        values: Critic values of the state before each token, ``[tokens]``.
        lengths: Length of each row, at least 1, int64 ``[rows]``.
        gamma: Discount per token.
        lam: Weight of longer lookahead.
    """
    following = np.append(values[1:], 0.0)[: len(values)]
    following[lengths.cumsum() - 1] = 0.0
    return discounted_sums(rewards + gamma * following - values, lengths, gamma * lam)


def discounted_advantages(
    batch: ExperienceBatch, args: DiscountedEstimator, token_penalty: Tensor | None = None
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every token the discounted sum of its run's rewards from this token on, ``G_t = r_t + gamma G_{t+1}``
    (REINFORCE++, arXiv 2501.03262). With ``args.whiten`` the sums are whitened over the batch.

    The rewards of tokens are ``token_level_reward`` if an experience of the run has it. Otherwise the reward of the
    run, taken from its last step, is assigned to the last trained token.

    Args:
        batch: A whole batch, in any order.
        args: Discount and whitening.
        token_penalty: Subtracted from the rewards, such as a KL term: ``[response tokens of the batch]``.

    Returns:
        The remaining experiences, in the given order, with ``advantages`` as float32 ``[response]``, 0 where the action
        mask is False; and the metrics. Runs without a finite reward, or with a trained token whose reward is not
        finite, are dropped with all their experiences.

    Raises:
        ValueError: An experience has no action mask (dpo), or the penalty has a wrong length or is not finite for a
            trained token.
    """
    rewarded = _rewarded(batch, token_penalty)
    paths, flat = rewarded.paths, np.zeros(len(rewarded.rewards))
    flat[paths.tokens] = discounted_sums(rewarded.rewards[paths.tokens], paths.lengths, args.gamma)
    return with_advantages(rewarded.batch, flat, whitened=args.whiten), rewarded.metrics


def gae_advantages(
    batch: ExperienceBatch, args: GaeEstimator, values: Tensor, token_penalty: Tensor | None = None
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every token its generalised advantage (:func:`gae`) for PPO (arXiv 1707.06347). With ``args.whiten`` the
    advantages are whitened over the batch.

    Args:
        batch: A whole batch, in any order.
        args: Discount, lambda and whitening.
        values: Critic values of the state before each token: ``[response tokens of the batch]``.
        token_penalty: As in :func:`discounted_advantages`, which also says how the rewards are computed.

    Returns:
        As in :func:`discounted_advantages`. The experiences also have ``returns``, float32 ``[response]``: the
        advantage before whitening plus the value, the target of the critic.

    Raises:
        ValueError: As in :func:`discounted_advantages`. Or values have a wrong length, or are not finite for a trained
            token.
    """
    states = _per_token_input(batch, values, "values")
    rewarded = _rewarded(batch, token_penalty)
    paths, states = rewarded.paths, states[rewarded.tokens][rewarded.paths.tokens]
    flat, returns = np.zeros(len(rewarded.rewards)), np.zeros(len(rewarded.rewards))
    flat[paths.tokens] = gae(rewarded.rewards[paths.tokens], states, paths.lengths, args.gamma, args.lam)
    returns[paths.tokens] = flat[paths.tokens] + states
    estimated = with_advantages(rewarded.batch, flat, whitened=args.whiten)
    return (estimated.replace(returns=per_token(estimated, returns)) if len(estimated) else estimated), rewarded.metrics


@dataclass(frozen=True)
class _Rewarded:
    """The experiences of the runs with rewards, and a reward for each of their tokens."""

    batch: ExperienceBatch
    tokens: Flags
    """Mask of the experiences' tokens among the response tokens of the whole batch."""
    rewards: Numbers
    """Float64 ``[response tokens]``; 0 for tokens that are not trained."""
    paths: Trajectories
    metrics: dict[str, float]


def _rewarded(batch: ExperienceBatch, token_penalty: Tensor | None) -> _Rewarded:
    masks, trained, rids = mask_lengths(batch), trained_tokens(batch), batch.ids("rid")
    owner = np.repeat(np.arange(len(batch)), masks)
    whole, _ = run_values(batch, batch.values("reward"))
    finished = {rid: reward for group in whole.values() for rid, reward in group.items()}
    shaped = {rids[number] for number in np.flatnonzero(batch.lengths("token_level_reward") >= 0)}
    rewards = np.zeros(len(trained))
    if shaped:
        token_rewards = (
            response_field(batch, "token_level_reward", np.zeros(len(batch), dtype=np.bool_), "").double().numpy()
        )
        rewards = np.where(trained, token_rewards, 0.0)
    nonfinite_rids = {rids[number] for number in owner[~np.isfinite(rewards)]}
    staying = np.array(
        [rid not in nonfinite_rids and (rid in shaped or rid in finished) for rid in rids], dtype=np.bool_
    )
    remaining, tokens = batch.select(staying), staying[owner]
    paths, rewards = trajectories(remaining), rewards[tokens].clip(-LARGEST, LARGEST)
    last = paths.tokens[paths.ends]
    rewards[last] += [0.0 if rid in shaped else finished[rid] for rid in paths.rids]
    metrics = {
        "rollout/missing_rewards": float(len(set(rids)) - len(set(remaining.ids("rid")))),
        **reward_metrics(_by_task(remaining, paths, rewards)),
    }
    if token_penalty is not None:
        rewards = rewards - np.where(trained, _per_token_input(batch, token_penalty, "token_penalty"), 0.0)[tokens]
    return _Rewarded(remaining, tokens, rewards, paths, metrics)


def _by_task(batch: ExperienceBatch, paths: Trajectories, rewards: Numbers) -> list[list[float]]:
    """Return the sum of each run's rewards, in a list for each task."""
    tasks = dict(zip(batch.ids("rid"), batch.ids("tid"), strict=True))
    result: dict[str, list[float]] = {}
    if paths.rids:
        sums = np.add.reduceat(rewards[paths.tokens], paths.lengths.cumsum() - paths.lengths)
        for rid, total in zip(paths.rids, sums.tolist(), strict=True):
            result.setdefault(tasks[rid], []).append(total)
    return list(result.values())


def _per_token_input(batch: ExperienceBatch, values: Tensor, name: str) -> Numbers:
    """Return the caller's values for each response token, float64.

    Raises:
        ValueError: The number of values is wrong, or the value of a trained token is not finite.
    """
    trained = trained_tokens(batch)
    numbers: Numbers = values.detach().double().cpu().numpy()
    if numbers.shape != trained.shape:
        raise ValueError(
            f"{name} has shape {list(numbers.shape)}, wanted [{len(trained)}]: one number for each response token of "
            "the batch, trained or not, in the order of its action masks"
        )
    nonfinite = trained & ~np.isfinite(numbers)
    if nonfinite.any():
        raise ValueError(
            f"{name} is {numbers[nonfinite.argmax()]} at response token {int(nonfinite.argmax())} of the batch, wanted "
            "a finite number wherever a token is trained; look at the model that computed it"
        )
    return numbers
