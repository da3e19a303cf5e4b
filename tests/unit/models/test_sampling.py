from __future__ import annotations

import math

import pytest
import torch

from trinity_mq.engines.torch import sampling
from trinity_mq.engines.torch.sampling import choose


def rows(value: float, count: int) -> torch.Tensor:
    return torch.full((count,), value)


def test_frequencies_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 200_000
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = choose(logits.expand(count, 4), rows(0.7, count), rows(1.0, count), uniforms)
    wanted = (logits / 0.7).softmax(-1)
    assert torch.allclose(torch.bincount(tokens, minlength=4) / count, wanted, atol=4e-3)
    assert torch.allclose(logprobs, wanted.log()[tokens], atol=1e-6)


def test_greedy_takes_the_likeliest_and_reports_untempered_logprobs() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    tokens, logprobs = choose(logits, rows(0.0, 2), rows(1.0, 2), torch.tensor([0.99, 0.99], dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_full_logprobs() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.25, 0.15])
    logits = probabilities.log()
    uniforms = torch.linspace(0, 0.999999, 101, dtype=torch.float64)
    tokens, logprobs = choose(logits.expand(101, 4), rows(1.0, 101), rows(0.7, 101), uniforms)
    assert set(tokens.tolist()) == {1, 2}
    assert torch.allclose(logprobs.exp(), probabilities[tokens])
    only, _ = choose(logits.expand(101, 4), rows(1.0, 101), rows(0.2, 101), uniforms)
    assert set(only.tolist()) == {1}


def test_the_largest_uniform_never_points_at_an_impossible_token() -> None:
    logits = torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf], [-torch.inf, -torch.inf, 0.0, -torch.inf]])
    largest = torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    for edge in (0.0, largest.item()):
        tokens, logprobs = choose(logits, rows(1.0, 2), rows(1.0, 2), torch.tensor([edge, edge], dtype=torch.float64))
        assert tokens.tolist() == [0 if edge == 0.0 else 1, 2]
        assert torch.isfinite(logprobs).all()


def test_large_vocabularies_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(17, 50, generator=generator)
    uniforms = torch.rand(17, dtype=torch.float64, generator=generator)
    whole = choose(logits, rows(0.9, 17), rows(0.8, 17), uniforms)
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 100)
    parts = choose(logits, rows(0.9, 17), rows(0.8, 17), uniforms)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_no_row_fails_the_others() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(4, 1)
    logits[1] = math.nan
    top_p = torch.tensor([0.9, 0.9, 1e-320, 0.0])
    tokens, logprobs = choose(logits, torch.ones(4), top_p, torch.full((4,), 0.99999, dtype=torch.float64))
    assert tokens.tolist()[2:] == [0, 0], "the likeliest token, however small top_p is"
    assert [math.isnan(each) for each in logprobs.tolist()] == [False, True, False, False]
