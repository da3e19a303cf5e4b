"""The numeric vectors of data/vectors.json: losses with exact gradients, advantages, weights, masks and values.

They were made in float64 by numpy alone, gradients by complex steps, and agree with the functions of Trinity-RFT 0.6.0,
verl 0.9.1, AReaL 1.0.4, prime-rl and TRL 1.16 where these are right; each names its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.algorithms.evaluator import step_weights
from trinity_mq.algorithms.reduction import sequence_scales
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import LossConfig, Reduction

FILE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())
VECTORS: dict[str, dict[str, Any]] = {one["name"]: one for one in FILE["vectors"]}
FIXTURES: dict[str, dict[str, Any]] = FILE["fixtures"]
PIECES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "pieces.json").read_text())
"""By kind and name: the pieces of a loss (its reduction excepted where the vector names that), a weight, a mask."""

UPSTREAM_SUFFIX = "/trinity-0.6-upstream"
UPSTREAM = [name for name in VECTORS if name.endswith(UPSTREAM_SUFFIX)]
"""Errors of Trinity-RFT 0.6.0, from which ours must differ."""

Grid = list[list[float]]

REDUCTIONS = {
    "token-mean": "token",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "sequence_constant",
    "token-sum-norm": "constant",
    "prompt-mean": "prompt",
}


def of_kind(kind: str) -> list[str]:
    """Return the names of the vectors of one kind."""
    return [name for name, vector in VECTORS.items() if vector["kind"] == kind]


def reduction_of(args: Mapping[str, Any]) -> Reduction:
    kind = REDUCTIONS[args["loss_agg_mode"]]
    return Reduction.model_validate({"kind": kind, "constant": args.get("norm")})


def grid(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Case:
    """A fixture as a flat view, and the way back to its grid of sequences x tokens."""

    def __init__(
        self, fixture: str, *, anchor: str | None = None, advantages: Grid | None = None, mask: Grid | None = None
    ) -> None:
        """``anchor`` takes the sampler's place: the functions of others divide by ``old`` alone."""
        changed = {"advantages": advantages, "mask": mask}
        given = FIXTURES[fixture] | {name: values for name, values in changed.items() if values is not None}
        self.mask = grid(given["mask"]).bool()
        self.logprob = grid(given["logprob"]).requires_grad_()
        sequences = torch.arange(self.mask.shape[0])[:, None].expand_as(self.mask)
        _, segment = torch.unique_consecutive(sequences[self.mask], return_inverse=True)
        flat = {name: grid(given[name])[self.mask] for name in given if name in COLUMNS and name in given}
        mu = flat.get(anchor or "rollout_logprob", torch.zeros(len(segment), dtype=torch.float64))
        staleness = None
        if "versions" in given:
            staleness = given["current_version"] - grid(given["versions"])[self.mask]
        self.view = TokenView(
            logprob=self.logprob[self.mask],
            mu=mu,
            advantage=flat.get("advantages", torch.zeros_like(mu)),
            scale=torch.ones_like(mu),
            segment=segment,
            old=flat.get("old_logprob"),
            ref=flat.get("ref_logprob"),
            teacher=flat.get("teacher_logprob"),
            entropy=flat.get("entropy"),
            staleness=staleness,
        )

    def scaled(self, reduction: Reduction, kept: Tensor | None = None, prompts: Any = None) -> Tensor:
        """Return the scales of a reduction over the tokens of the view, or over those ``kept``."""
        segment = self.view.segment
        counts = torch.bincount(segment if kept is None else segment[kept], minlength=self.view.segments).numpy()
        numbers = np.arange(len(counts)) if prompts is None else np.array(prompts)
        return torch.from_numpy(sequence_scales(counts, numbers, reduction))[segment]

    def full(self, values: Tensor) -> Tensor:
        """Return flat values as a grid, 0 where nothing is trained."""
        return torch.zeros(self.mask.shape, dtype=torch.float64).masked_scatter(self.mask, values.detach().double())


COLUMNS = ("rollout_logprob", "old_logprob", "advantages", "ref_logprob", "teacher_logprob", "entropy")


def with_step_weights(view: TokenView, config: LossConfig) -> TokenView:
    """Return the view with the corrections that compare the tokens of a whole optimizer step."""
    return replace(view, weight=step_weights(view, config, "seed"))
