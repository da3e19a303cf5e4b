"""The components of a loss, and their inputs besides tokens, engine logprobs and advantages."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_mq.config.algorithm.pieces import BY_AGE, LossConfig, Piece, SurrogatePlugin
from trinity_mq.config.algorithm.section import AlgorithmConfig


def components(config: LossConfig) -> set[str]:
    """Return the components that have a weight in some train step."""
    weighted = {name for name, weight in config.weights.model_dump().items() if weight}
    return weighted | {"rl", "ce"} if config.ce_schedule is not None else weighted


def needs(config: LossConfig, weights: Mapping[str, float]) -> set[str]:
    """Return the inputs of a train step's components besides tokens, engine logprobs and advantages; see
    :class:`Piece`.

    Args:
        config: The loss.
        weights: Weights of its components.
    """
    pieces: list[Piece] = []
    inputs: set[str] = set()
    if weights.get("rl"):
        pieces += [config.ratio, config.surrogate, *config.correction, *config.regularisers]
        pieces += [config.kl] if config.kl is not None and config.kl.coef else []
        inputs |= {"old"} if config.anchor == "old" else set()
        inputs |= {"staleness"} if config.anchor in BY_AGE else set()
    has_reference = isinstance(config.surrogate, SurrogatePlugin) and config.surrogate.reference
    inputs |= {"ref"} if has_reference or config.kl_loss is not None else set()
    pieces += [config.distillation] if weights.get("ref_kl") else []
    pieces += [config.pair] if weights.get("pair") else []
    return inputs.union(*(piece.needs for piece in pieces))


def needs_reference(config: AlgorithmConfig) -> bool:
    """Return whether some train step compares the policy with a reference model."""
    return config.reward_kl is not None or "ref" in needs(config, dict.fromkeys(components(config), 1.0))
