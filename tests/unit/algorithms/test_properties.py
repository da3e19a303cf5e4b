"""What holds for every algorithm on any batch: from experiences through the packing to a loss and its gradient.

The policy is a table of logits by the token before, so that a step takes no model. Batches are drawn at random: their
lengths, masks, logprobs, ages, advantages and tasks.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trinity_mq.algorithms.evaluator import component_weights
from trinity_mq.algorithms.scoring import entropy_baselines, token_logprobs
from trinity_mq.config import AlgorithmConfig
from trinity_mq.config.algorithm.needs import components, needs
from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.experience import EID, Experience
from trinity_mq.training.packing import MicroBatch, train_tokens
from trinity_mq.training.parallel.ranks import Ranks
from trinity_mq.training.update import StepLoss, accumulate, compared, compares_tokens, score

VOCABULARY, STEP, WHOLE = 7, 4, 1 << 14
RL = sorted(name for name in PRESETS if "rl" in components(AlgorithmConfig(algorithm_type=name)))
"""Presets that train on sampled answers by their advantages."""
over_presets = pytest.mark.parametrize("name", RL)


def over_examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


class Table:
    """A policy whose logits are those of the token before; stands in for a real one."""

    device = torch.device("cpu")
    ranks = Ranks()

    def __init__(self, seed: int, tokens: int = 0) -> None:
        """``tokens``: of the train step, where the gradient by the logprob of each of them is wanted."""
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator).requires_grad_()
        self.each = torch.zeros(tokens, requires_grad=True) if tokens else None

    def _token_logits(self, batch: MicroBatch) -> Tensor:
        return self.logits[batch.input_ids[batch.rows, batch.columns]]

    def score(self, batch: MicroBatch, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        logits = self._token_logits(batch)
        logprob, entropy = token_logprobs(logits, batch.targets, batch.temperature, entropy_gradient=entropy_gradient)
        return (logprob if self.each is None else logprob + self.each[batch.index]), entropy

    def score_with_baseline(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        baselines = entropy_baselines(self._token_logits(batch), batch.temperature)
        return *self.score(batch, entropy_gradient=False), baselines


@dataclass(frozen=True)
class Found:
    """What an optimizer step would do."""

    loss: float
    gradient: Tensor
    """By the table of logits."""
    each: Tensor
    """By the logprob of each trained token, in the order of the experiences."""
    scale: Tensor
    """What the reduction multiplies the loss of each trained token by."""
    advantage: Tensor


def step(
    algorithm: AlgorithmConfig,
    experiences: Sequence[Experience],
    *,
    budget: int = WHOLE,
    entropy: float = 0.0,
    fresh: bool = False,
) -> Found:
    """Return what an optimizer step would do. ``fresh``: the old policy is the one that is trained."""
    loss = StepLoss(algorithm, component_weights(algorithm, STEP), entropy)
    tokens = train_tokens(experiences, algorithm, loss.weights, STEP)
    batches = tokens.micro_batches(range(len(experiences)), budget, algorithm.reduction)
    policy = Table(0, tokens.tokens)
    needed = needs(algorithm, loss.weights)
    others = {"old": Table(0) if fresh else mixed(), "ref": Table(2)}
    columns = {name: score(one, batches, tokens.tokens).logprob for name, one in others.items() if name in needed}
    if compares_tokens(algorithm):
        scored = score(policy, batches, tokens.tokens, needed)
        columns |= compared(batches, scored, columns, algorithm, "seed")
    total = accumulate(policy, batches, loss, columns)
    scale, advantage = torch.zeros(tokens.tokens), torch.zeros(tokens.tokens)
    for batch in batches:
        scale[batch.index], advantage[batch.index] = batch.scale, batch.advantages
    return Found(float(total.reduced["loss"]), policy.logits.grad, policy.each.grad, scale, advantage)


def mixed() -> Table:
    """Return a policy some way from the one that is trained."""
    found, other = Table(0), Table(1)
    found.logits = (found.logits + 0.2 * other.logits).detach()
    return found


@st.composite
def batches(draw: st.DrawFn, *, least: int = 2, most: int = 6) -> list[Experience]:
    """Draw samples, each with a trained token; at least one has a masked one."""
    values = random.Random(draw(st.integers(0, 2**32)))
    result = []
    for run in range(draw(st.integers(least, most))):
        prompt, response = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        mask = draw(st.lists(st.booleans(), min_size=response, max_size=response).filter(any))
        if run == 0:
            mask, response = [*mask, False, True], response + 2
        changed = draw(st.integers(0, response - 1))
        versions = [(0, 1, draw(st.integers(0, STEP - 1)))]
        versions += [(changed, 1, draw(st.integers(0, STEP - 1)))] if changed else []
        result.append(
            Experience(
                eid=EID(1, draw(st.integers(0, 2)), run),
                tokens=[values.randrange(VOCABULARY) for _ in range(prompt + response)],
                prompt_length=prompt,
                action_mask=torch.tensor(mask),
                logprobs=[values.uniform(-4.0, -0.05) for _ in range(response)],
                advantages=[values.uniform(-2.0, 2.0) for _ in range(response)],
                temperature=values.choice([0.7, 1.0, 1.3]),
                versions=versions,
            )
        )
    return result


def with_experts(name: str, experiences: list[Experience]) -> list[Experience]:
    """Mark every second answer as one to imitate, where the algorithm does that; the first stays a sample."""
    if "ce" in components(AlgorithmConfig(algorithm_type=name)):
        for one in experiences[1::2]:
            one.info = {"is_expert": True}
    return experiences


def plain(name: str, **pieces: Any) -> AlgorithmConfig:
    """Return an algorithm without the terms that do not come from advantages."""
    return AlgorithmConfig.model_validate({"algorithm_type": name, "kl": None, "regularisers": [], **pieces})


def close(found: Tensor | float, expected: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


# -- masked tokens


@over_presets
@over_examples(8)
@given(batch=batches(), garbage=st.sampled_from([-37.0, 5.0, -1e6, math.nan, math.inf]), data=st.data())
def test_what_stands_at_masked_tokens_never_matters(
    name: str, batch: list[Experience], garbage: float, data: st.DataObject
) -> None:
    """Nor does an experience in which nothing is trained on."""
    algorithm = AlgorithmConfig(algorithm_type=name)
    experiences = with_experts(name, batch)
    before = step(algorithm, experiences, entropy=0.01)
    spoiled = copy.deepcopy(experiences)
    for one in spoiled:
        out = ~one.action_mask.bool()
        one.logprobs, one.advantages = (column.masked_fill(out, garbage) for column in (one.logprobs, one.advantages))
    unused = copy.deepcopy(spoiled[0])
    unused.action_mask = torch.zeros_like(unused.action_mask)
    spoiled.insert(data.draw(st.integers(0, len(spoiled))), unused)
    after = step(algorithm, spoiled, entropy=0.01)
    assert math.isfinite(before.loss)
    assert after.loss == before.loss
    assert torch.equal(after.gradient, before.gradient)
    assert torch.equal(after.each, before.each)


# -- answers without an advantage


@over_presets
@over_examples(6)
@given(batch=batches(least=3), data=st.data())
def test_tasks_without_advantage_have_no_gradient_and_count(
    name: str, batch: list[Experience], data: st.DataObject
) -> None:
    algorithm = plain(name)
    silent = {0} | data.draw(st.sets(st.sampled_from([one.eid.task for one in batch])))
    for one in batch:
        one.advantages = one.advantages * (one.eid.task not in silent)
    found = step(algorithm, batch)
    assert (found.each[found.advantage == 0] == 0).all()
    spoken = [one for one in batch if one.eid.task not in silent]
    if not spoken:
        assert found.loss == 0
        assert (found.gradient == 0).all()
        return
    if compares_tokens(algorithm):
        return  # which tokens are left out depends on all of them
    alone = step(algorithm, spoken)
    close((found.each / found.scale)[found.advantage != 0], alone.each / alone.scale)
    if len(spoken) < len(batch) and algorithm.reduction.kind in {"token", "sequence"}:
        heard = found.scale[found.advantage != 0]
        assert (heard < alone.scale).all(), "the silent ones count in the denominator"


# -- a preset and its pieces

PIECES = ("repeat_times", "estimator", *LossConfig.model_fields)


@pytest.mark.parametrize("name", PRESETS)
@over_examples(4)
@given(base=st.sampled_from(sorted(PRESETS)), order=st.permutations(PIECES))
def test_a_preset_is_its_pieces_over_any_other(name: str, base: str, order: list[str]) -> None:
    preset = AlgorithmConfig(algorithm_type=name).model_dump(mode="json")
    for under in (base, "grpo"):
        by_hand = {"algorithm_type": under, **{piece: preset[piece] for piece in order}}
        by_hand |= {"optimizer": {"lr": preset["optimizer"]["lr"]}}  # a preset's rate is none of its pieces
        found = AlgorithmConfig.model_validate(by_hand)
        assert found.model_dump(mode="json") | {"algorithm_type": name} == preset


# -- how a step is cut


# -- fresh data

SHARES = {"opmd": 0.5, "asymre": 0.5}
"""Of the plain gradient, where a loss has a divisor."""
MASKS = {"clip_b", "clip_v", "clip_cov"}
"""Presets that leave out tokens of fresh data too."""


@over_presets
@over_examples(6)
@given(batch=batches(), advantages=st.lists(st.sampled_from([-1.5, -0.5, 0.0, 0.75, 2.0]), min_size=6, max_size=6))
def test_on_fresh_data_the_gradient_is_minus_the_advantage(
    name: str, batch: list[Experience], advantages: list[float]
) -> None:
    """``pi = old = mu``, all tokens of an answer with its advantage: every loss has the gradient ``-A scale``."""
    for one, advantage in zip(batch, advantages, strict=False):
        one.advantages = torch.full_like(one.advantages, advantage)
        one.versions = [(0, 1, STEP - 1)]
    sampled_by(Table(0), batch)
    algorithm = plain(name)
    found = step(algorithm, batch, fresh=True)
    rl = component_weights(algorithm, STEP)["rl"]
    expected = -found.advantage * found.scale * SHARES.get(name, 1.0) * rl
    kept = torch.ones_like(expected, dtype=torch.bool)
    if name in MASKS:
        kept = (found.each != 0) | (expected == 0)
        assert kept.sum() >= len(kept) / 2
    close(found.each[kept], expected[kept])


def sampled_by(policy: Table, experiences: Iterable[Experience]) -> None:
    """Give the experiences the policy's logprobs, as an engine without any difference would."""
    for one in experiences:
        ids = one.tokens.long()
        logits = policy.logits.detach()[ids[one.prompt_length - 1 : -1]]
        heat = torch.full((one.response_length,), one.temperature)
        one.logprobs, _ = token_logprobs(logits, ids[one.prompt_length :], heat, entropy_gradient=False)
