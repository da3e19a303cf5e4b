"""Refuses combinations of pieces with which a run would learn nothing, or something other than configured."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_mq.config.algorithm.needs import components, needs_reference
from trinity_mq.config.algorithm.pieces import CovarianceKL, ImportanceWeight
from trinity_mq.config.algorithm.section import AlgorithmConfig

BY_TOKEN = ("discounted", "gae")
"""Estimators that give each token its own rewards."""
LONG_ANSWER = 64
"""Number of response tokens above which the product of an answer's importance ratios becomes extreme: a drift of
.02 nats per token is a factor of 3.6 over 64 tokens."""

AGAINST_SAMPLER = {"weight", "reject", "divergence", "second_moment"}
"""Corrections that use the sampler's logprob of each token."""


def algorithm_problems(config: AlgorithmConfig, staleness: int, max_response_tokens: int) -> Iterator[str]:
    """Yield one sentence for each problem: the settings, the reason and the remedy.

    Args:
        config: The algorithm.
        staleness: Maximum age of the data, in train steps.
        max_response_tokens: Maximum length of an answer, in tokens.
    """
    weighted = components(config)
    if not weighted:
        yield "algorithm.weights are all 0: nothing would be trained; give a component a weight"
        return
    if config.entropy_coef and "rl" not in weighted:
        yield (
            f"algorithm.entropy_coef is {config.entropy_coef:g}, but weights.rl is 0: the bonus belongs to sampled "
            "answers and would have no effect; remove it"
        )
    yield from _reference_problems(config)
    if "rl" in weighted:
        yield from _advantage_problems(config)
        yield from _ratio_problems(config, staleness, max_response_tokens)


def _advantage_problems(config: AlgorithmConfig) -> Iterator[str]:
    """Yield the problems of the advantages of sampled answers."""
    if config.estimator.kind == "none":
        reason, remedy = f"weights.rl is {config.weights.rl:g}", "weights: {rl: 0}"
        if config.ce_schedule is not None:
            reason, remedy = "ce_schedule gives rl a weight", "weights: {rl: 0, ce: 1} and no ce_schedule"
        yield (
            f"algorithm.estimator is none, but {reason}: sampled answers would have no advantage; choose an estimator, "
            f"or {remedy}"
        )
    if config.advantage_agent == "trainer" and {"ce", "pair"} & components(config):
        yield (
            f"algorithm.estimator is {config.estimator.kind}, in the trainer, and weights.ce, weights.pair or "
            "ce_schedule trains on answers that were not sampled: the trainer computes advantages of samples alone; "
            "take another estimator, or weights: {rl: 1}"
        )


def _ratio_problems(config: AlgorithmConfig, staleness: int, max_response_tokens: int) -> Iterator[str]:
    """Yield the problems of the pieces that compare the policy with another policy, except the reference model."""
    terms = [term for term in config.regularisers if isinstance(term, CovarianceKL)]
    if len(terms) > 1:
        yield (
            f"algorithm.regularisers has kind covariance {len(terms)} times: each would act on the tokens that any of "
            "them chooses, and not on its own share. Keep one, with the share and the coef that you want"
        )
    weighs = [rule for rule in config.correction if isinstance(rule, ImportanceWeight)]
    if config.anchor == "old" and staleness and not any(rule.kind in AGAINST_SAMPLER for rule in config.correction):
        yield (
            f"algorithm.anchor is old without a correction, and data may be {staleness} train steps old: the ratio to "
            "the recomputed policy is 1 at first, so old data would count as fresh. Add correction: [{kind: weight}], "
            "or take anchor: mu"
        )
    if config.anchor == "mu" and weighs and config.ratio.kind != "self" and config.surrogate.kind != "log_linear":
        yield (
            "algorithm.correction has kind weight with anchor mu: the ratio divides by the sampler already, so old "
            "data would be weighed twice. Take anchor: old, or surrogate: {kind: truncate}"
        )
    if config.ratio.kind in {"sequence", "geometric"} and config.reduction.kind == "token":
        yield (
            f"algorithm.ratio is {config.ratio.kind} with reduction token: the one ratio of an answer would be "
            "weighted by its length; take reduction: {kind: sequence}, or {kind: sequence_sum} where that is meant"
        )
    products = config.ratio.kind == "sequence_product" or any(rule.level == "sequence" for rule in weighs)
    if products and staleness and max_response_tokens > LONG_ANSWER:
        yield (
            "algorithm multiplies the ratios of whole answers, which may have model.max_response_tokens "
            f"{max_response_tokens} tokens and be {staleness} train steps old: for long answers the product leaves "
            "every clip range, and these answers are lost. Take ratio: {kind: sequence}, level: token or geometric, "
            "or fresh data"
        )


def _reference_problems(config: AlgorithmConfig) -> Iterator[str]:
    """Yield the problems of the reference model and of the KL terms that use it, in the loss and in the rewards."""
    if config.kl is not None and config.kl.kind == "k1" and config.kl.coef:
        yield (
            "algorithm.kl.kind is k1: as a loss its expected gradient is 0, so it would only add noise; take k2 or k3, "
            "or take it from the rewards: reward_kl: {kind: k1}"
        )
    if config.reference.update != "never" and not needs_reference(config):
        yield (
            f"algorithm.reference.update is {config.reference.update}, and nothing compares the policy with a "
            "reference: set kl: {kind: k2, coef: 0.001} to hold the policy near a reference, or remove "
            "algorithm.reference.update"
        )
    if config.reward_kl is None:
        return
    if "rl" not in components(config):
        yield "algorithm.reward_kl is set, but weights.rl is 0: no reward has a part in the loss; remove it"
    elif config.estimator.kind not in BY_TOKEN:
        yield (
            f"algorithm.reward_kl is set, and the estimator is {config.estimator.kind}, wanted discounted or gae: a "
            "KL of each token does not fit an estimator of whole runs; take algorithm_type: reinforceplusplus or ppo, "
            "or the KL in the loss: kl: {kind: k2}"
        )
