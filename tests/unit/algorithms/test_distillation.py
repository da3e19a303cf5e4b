"""Advantages of on-policy distillation: values by hand, what has a part in them and what has not, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trinity_mq.algorithms.estimators.teacher import distillation_advantages
from trinity_mq.config.estimators import DistillEstimator
from trinity_mq.experience import EID, Experience, ExperienceBatch

ARGS = DistillEstimator()


def experience(
    run: int,
    student: Sequence[float] | None,
    teacher: Sequence[float] | None,
    *,
    mask: Sequence[bool] = (True, True, True),
    step: int = 0,
    **fields: Any,
) -> Experience:
    tokens = list(range(3, 4 + len(mask)))
    given = {"logprobs": student, "teacher_logprobs": teacher, "action_mask": list(mask), "prompt_length": 1, **fields}
    return Experience(eid=EID(7, 0, run, step), tokens=tokens, **given)


def listed(experiences: Sequence[Experience]) -> list[list[float]]:
    return [one.advantages.tolist() for one in experiences]


def test_metrics_are_over_runs_and_no_other_run_changes_an_advantage():
    alone = experience(0, [-1.0] * 3, [-2.0] * 3)
    long = [experience(1, [-1.0] * 3, [-4.0] * 3, step=step) for step in range(20)]
    kept, metrics = distillation_advantages(ExperienceBatch.of([alone, *long]), DistillEstimator(kl_coef=0.25))
    assert listed(kept) == [[-0.25] * 3] + [[-0.75] * 3] * 20
    assert metrics["advantage/kl/mean"] == 2.0, "the distance itself; a run of twenty steps weighs as one of one"
    assert (metrics["advantage/kl/min"], metrics["advantage/kl/max"]) == (1.0, 3.0)
    by_itself, _ = distillation_advantages(ExperienceBatch.of([alone]), ARGS)
    assert listed(by_itself) == [[-1.0] * 3]


@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_run_with_a_number_that_is_none_is_dropped_whole(who, value):
    odd = {"student": [-1.0] * 3, "teacher": [-1.0] * 3, who: [-1.0, value, -1.0]}
    given = [
        experience(0, [-1.0] * 3, [-1.5] * 3),
        experience(1, [-1.0] * 3, [-1.5] * 3, step=0),
        experience(1, odd["student"], odd["teacher"], step=1),
        experience(2, odd["student"], odd["teacher"], mask=(True, False, True)),
    ]
    kept, metrics = distillation_advantages(ExperienceBatch.of(given), ARGS)
    assert [one.eid.run for one in kept] == [0, 2], "what is not trained on may be anything"
    assert listed(kept) == [[-0.5] * 3, [0.0] * 3]
    assert metrics["rollout/nonfinite_logprobs"] == 1
    assert metrics["advantage/kl/mean"] == 0.25


def test_where_nothing_is_trained_on_no_teacher_is_needed():
    given = [experience(0, None, None, mask=(False,) * 3), experience(1, [-1.0] * 3, [-2.0] * 3)]
    kept, metrics = distillation_advantages(ExperienceBatch.of(given), ARGS)
    assert listed(kept) == [[0.0] * 3, [-1.0] * 3]
    assert metrics["advantage/kl/mean"] == 1.0
    alone, metrics = distillation_advantages(ExperienceBatch.of(given[:1]), ARGS)
    assert listed(alone) == [[0.0] * 3]
    assert metrics == {"rollout/nonfinite_logprobs": 0.0}


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"teacher": None}, r"7/0/1/0\S* \(.*\) has no teacher_logprobs.*on_policy_distill_workflow.*auxiliary_models"),
        ({"student": None}, r"has no logprobs, wanted one per response token; the engine returns them"),
        (None, r"\(dpo\) has no action_mask"),
    ],
)
def test_what_is_missing_is_named_with_what_brings_it(lacks, said):
    whole = {"student": [-1.0] * 3, "teacher": [-1.0] * 3}
    pair = Experience(eid=EID(7, 0, 0), tokens=[1, 2], chosen=[3], rejected=[4], prompt_length=2)
    other = pair if lacks is None else experience(1, **{**whole, **lacks})
    with pytest.raises(ValueError, match=said):
        distillation_advantages(ExperienceBatch.of([experience(0, **whole), other]), ARGS)


def test_the_gradient_leads_to_the_teacher():
    """Over all samples of a one-token policy the expected gradient is that of KL(student || teacher)."""
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    teacher = torch.tensor([0.1, 0.6, 0.3]).log()
    student = logits.log_softmax(-1)
    torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="sum").backward()
    wanted = logits.grad.clone()
    logits.grad = None
    found = torch.zeros(3)
    for token in range(3):
        old = student.detach()[token : token + 1]
        one = experience(token, old.tolist(), teacher[token : token + 1].tolist(), mask=(True,))
        ((kept,), _) = distillation_advantages(ExperienceBatch.of([one]), ARGS)
        loss = -(kept.advantages * (logits.log_softmax(-1)[token : token + 1] - old).exp()).sum()
        found += old.exp() * torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(found, wanted)
