"""How far engine and trainer are apart: exact to the vector, and the same however the tokens are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.algorithms.vectors import VECTORS, Case
from trinity_mq.algorithms.mismatch import AGES, age_mask, metrics_by, mismatch_metrics, mismatch_sums, sums_by
from trinity_mq.algorithms.view import TokenView

NAMES = {
    "kl": "kl",
    "k3_kl": "k3",
    "abs_diff_mean": "logprob_diff_mean",
    "abs_diff_max": "logprob_diff_max",
    "prob_diff_max": "prob_diff_max",
    "training_log_ppl": "log_perplexity",
    "log_ppl_diff": "log_perplexity_difference",
    "ppl_ratio": "perplexity_ratio",
    "chi2_token": "chi2",
    "chi2_seq": "chi2_sequence",
    "ess_token": "ess",
    "ess_seq": "ess_sequence",
    "frac_above_2": "above_2",
    "frac_below_half": "below_half",
    "pearson_prob": "pearson",
}


def view() -> TokenView:
    """The fixture with the trainer's logprobs as they were before the step."""
    found = Case("losses").view
    assert found.old is not None
    return replace(found, logprob=found.old)


def test_metrics_are_those_of_the_vector() -> None:
    sums, maxima = mismatch_sums(view())
    found = mismatch_metrics(
        {name: value.item() for name, value in sums.items()}, {name: value.item() for name, value in maxima.items()}
    )
    expected = VECTORS["mismatch_metrics"]["expected"]
    assert set(NAMES) == set(expected) - {"rollout_log_ppl"}
    for name, value in expected.items():
        if name in NAMES:
            assert found[f"mismatch/{NAMES[name]}"] == pytest.approx(value, abs=1e-9), name
    perplexity = found["mismatch/log_perplexity"] - found["mismatch/log_perplexity_difference"]
    assert perplexity == pytest.approx(expected["rollout_log_ppl"])


def test_sums_of_parts_are_those_of_the_whole() -> None:
    whole, maxima = mismatch_sums(view())
    parts = [mismatch_sums(view().where(view().segment == number)) for number in range(3)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part, _ in parts), value)
    for name, value in maxima.items():
        assert max(part[name] for _, part in parts) == value
    assert mismatch_metrics({}, {}) == {}


def test_the_ages_divide_the_tokens() -> None:
    staleness = torch.tensor([0, 1, 2, 3, 7, 8, 40, 0, 5])
    groups = {name: age_mask(staleness, name) for name in AGES}
    found = {name: value.item() for name, value in sums_by(view(), groups).items()}
    assert [found[f"tokens/{name}"] for name in AGES] == [2, 2, 3, 2]
    sums, _ = mismatch_sums(view())
    assert sum(found[f"k3/{name}"] for name in AGES) == pytest.approx(sums["k3"].item())
    assert set(metrics_by(found)) == {f"mismatch/k3/{name}" for name in AGES}
    assert metrics_by({"tokens/age_0": 0.0, "k3/age_0": 0.0, "tokens": 3.0}) == {}, "no token is of that age"
