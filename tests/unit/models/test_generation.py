import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from trinity_mq.engines.generation.request import GenerationRequest, ScoreRequest
from trinity_mq.engines.torch import generator as decoding
from trinity_mq.engines.torch.generator import SCORE_TOKENS, GenerationCancelled, TextGenerator, _batches
from trinity_mq.engines.torch.sampling import MAX_ELEMENTS, choose

Reference = Callable[..., torch.Tensor]


def request(generator: TextGenerator, text: str, **options: object) -> GenerationRequest:
    given = {"max_tokens": 12, "stop_ids": generator.codec.stop_ids, **options}
    return GenerationRequest(prompt=generator.codec.encode(text), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_a_plain_forward_pass_with_mixed_prompt_lengths(
    shared_generator: TextGenerator, plain_logprobs: Reference, temperature: float
) -> None:
    prompts = ["+", "+372=", "-1,2,3=" * 4]
    requests = [request(shared_generator, text, n=4, temperature=temperature, seed=i) for i, text in enumerate(prompts)]
    answers = shared_generator.generate(requests)
    lengths = set()
    for asked, completions in zip(requests, answers, strict=True):
        assert len(completions) == 4
        for completion in completions:
            lengths.add(len(completion.token_ids))
            wanted = plain_logprobs(shared_generator, list(asked.prompt), completion.token_ids, temperature)
            assert torch.allclose(torch.tensor(completion.logprobs), wanted, atol=1e-5, rtol=0)
    assert temperature == 0.0 or len(lengths) > 1, "rows of different length are what this is about"


@contextlib.contextmanager
def widths_of(generator: TextGenerator) -> Iterator[list[int]]:
    """Note how many sequences the model computes at each step."""
    widths: list[int] = []

    def note(model: torch.nn.Module, args: object, inputs: dict[str, torch.Tensor]) -> None:
        widths.append(len(inputs["input_ids"]))

    hook = generator.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield widths
    finally:
        hook.remove()


@pytest.mark.parametrize("runs", [2, 3, 8])
def test_logprobs_stay_right_in_whatever_order_completions_end_and_differ(
    shared_generator: TextGenerator, plain_logprobs: Reference, runs: int
) -> None:
    """One that ends may leave others behind whose sequences are not in their order."""
    for seed in range(60):
        asked = request(shared_generator, "+372=", n=runs, max_tokens=4, seed=seed, temperature=0.5)
        [completions] = shared_generator.generate([asked])
        for completion in completions:
            wanted = plain_logprobs(shared_generator, list(asked.prompt), completion.token_ids, 0.5)
            assert torch.allclose(torch.tensor(completion.logprobs), wanted, atol=1e-5, rtol=0), seed


def test_end_of_sequence_is_kept_in_the_ids_and_cut_from_the_text(shared_generator: TextGenerator) -> None:
    [completions] = shared_generator.generate([request(shared_generator, "+372=", n=64, max_tokens=8, seed=0)])
    for completion in completions:
        assert len(completion.token_ids) == len(completion.logprobs) <= 8
        body = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        assert (completion.token_ids[-1] == 1) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 8
        assert 1 not in body
        assert completion.text == shared_generator.codec.decode([body])[0]
    assert any("<pad>" in completion.text for completion in completions), "padding that was sampled must show"


@pytest.mark.parametrize("share", [1, 4])
def test_a_biased_token_is_sampled_and_logprobs_are_of_the_biased_distribution(
    shared_generator: TextGenerator, share: int
) -> None:
    """Requests of one batch keep their own biases, whichever of their completions share a sequence."""
    banned = [token for token in range(shared_generator.vocabulary) if token != 5]
    asked = [
        request(shared_generator, "+372=", n=share, max_tokens=6, seed=1, logit_bias={5: 100.0}),
        request(shared_generator, "+1=", n=share, max_tokens=6, seed=2, temperature=0.5, logit_bias={4: 3.0, 6: -2.0}),
        request(shared_generator, "+37=", n=share, max_tokens=6, seed=3),
        request(shared_generator, "-1=", n=1, max_tokens=3, logit_bias=dict.fromkeys(banned, -100.0)),
    ]
    answers = shared_generator.generate(asked)
    assert all(completion.token_ids == [5] * 6 for completion in answers[0])
    assert answers[3][0].token_ids == [5] * 3
    plain = shared_generator.generate([asked[2]])
    assert [c.token_ids for c in answers[2]] == [c.token_ids for c in plain[0]], "another request's bias changed it"
    for wanted, completions in zip(asked, answers, strict=True):
        for completion in completions:
            tokens = torch.tensor([[*wanted.prompt, *completion.token_ids]])
            with torch.no_grad():
                logits = shared_generator.model(tokens).logits[0, len(wanted.prompt) - 1 : -1].float()
            for token, bias in wanted.logit_bias.items():
                logits[:, token] += bias
            logprobs = torch.log_softmax(logits / wanted.temperature, -1)
            expected = logprobs.gather(-1, tokens[0, len(wanted.prompt) :, None])[:, 0]
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_no_stop_token_is_sampled_before_the_minimum(shared_generator: TextGenerator) -> None:
    """A biased end comes at the first place where it may."""
    end = {min(shared_generator.codec.stop_ids): 100.0}
    asked = [
        request(shared_generator, "+372=", n=8, max_tokens=9, seed=1, logit_bias=end, min_tokens=4),
        request(shared_generator, "+1=", n=2, max_tokens=9, seed=1, logit_bias=end),
        request(shared_generator, "+2=", max_tokens=9, min_tokens=9, logit_bias=end),
    ]
    early, free, whole = shared_generator.generate(asked)
    assert {(len(c.token_ids), c.finish_reason) for c in early} == {(5, "stop")}
    assert {(len(c.token_ids), c.finish_reason) for c in free} == {(1, "stop")}
    assert {(len(c.token_ids), c.finish_reason) for c in whole} == {(9, "length")}
    assert all(math.isfinite(value) for c in (*early, *whole) for value in c.logprobs)


@pytest.mark.parametrize("n", [1, 6])
def test_the_likeliest_tokens_of_each_place_are_in_order_and_hold_the_greedy_choice(
    shared_generator: TextGenerator, n: int
) -> None:
    count = shared_generator.vocabulary
    asked = [
        request(shared_generator, "+372=", n=n, max_tokens=5, seed=1, temperature=0.8, top_logprobs=count),
        request(shared_generator, "+1=", n=n, max_tokens=7, seed=2, top_logprobs=2, temperature=0.0),
        request(shared_generator, "+2=", n=n, max_tokens=6, seed=3),
    ]
    full, greedy, none = shared_generator.generate(asked)
    for completion in full:
        assert len(completion.top_logprobs) == len(completion.token_ids)
        for token, logprob, top in zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
            assert len(top) == count
            assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
            assert math.fsum(math.exp(value) for _, value in top) == pytest.approx(1, abs=1e-5)
            assert dict(top)[token] == pytest.approx(logprob, abs=1e-6)
    for completion in greedy:
        assert [top[0] for top in completion.top_logprobs] == [
            (token, pytest.approx(logprob, abs=1e-6))
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        assert {len(top) for top in completion.top_logprobs} == {2}
    assert all(not completion.top_logprobs for completion in none)


def test_seeded_requests_repeat_whatever_they_are_batched_with(shared_generator: TextGenerator) -> None:
    mine = request(shared_generator, "+372=", n=3, max_tokens=30, seed=11)
    [alone] = shared_generator.generate([mine])
    others = [request(shared_generator, "-12" * k + "=", n=5, max_tokens=20, seed=k) for k in (1, 5)]
    together = shared_generator.generate([others[0], mine, others[1]])[1]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) == 3, "the completions of one request differ"
    [unseeded] = shared_generator.generate([request(shared_generator, "+372=", n=3, max_tokens=30)])
    assert [c.token_ids for c in unseeded] != [c.token_ids for c in alone]


def test_each_request_keeps_its_own_limit_and_stop_tokens(shared_generator: TextGenerator) -> None:
    never = request(shared_generator, "+1=", n=8, max_tokens=20, stop_ids=frozenset(), seed=1)
    short = request(shared_generator, "+1=", n=8, max_tokens=3, seed=1)
    seven = request(shared_generator, "+1=", n=8, max_tokens=20, stop_ids=frozenset({9}), seed=1)
    open_ended, limited, stopped = shared_generator.generate([never, short, seven])
    assert {len(c.token_ids) for c in open_ended} == {20}
    assert max(len(c.token_ids) for c in limited) == 3
    assert any(c.finish_reason == "stop" for c in stopped)
    assert all((c.token_ids.index(9) == len(c.token_ids) - 1) if 9 in c.token_ids else True for c in stopped)


def test_stop_strings_end_a_completion_and_are_cut_from_its_text(shared_generator: TextGenerator) -> None:
    base = request(shared_generator, "+1=", n=16, max_tokens=30, stop_ids=frozenset(), seed=5)
    [plain] = shared_generator.generate([base])
    stop = plain[0].text[4:6]
    [stopped] = shared_generator.generate(
        [request(shared_generator, "+1=", n=16, max_tokens=30, stop_ids=frozenset(), seed=5, stop=(stop, "never"))]
    )
    hits = 0
    for before, after in itertools.zip_longest(plain, stopped):
        assert stop not in after.text
        if stop in before.text:
            hits += 1
            assert after.finish_reason == "stop"
            assert before.text.startswith(after.text + stop)
            assert before.token_ids[: len(after.token_ids)] == after.token_ids
            assert shared_generator.codec.decode([after.token_ids])[0] == after.text + stop
        else:
            assert after.token_ids == before.token_ids
    assert hits >= 1


def test_score_is_the_plain_forward_pass_for_every_token(
    shared_generator: TextGenerator, plain_logprobs: Reference
) -> None:
    sequences = [[3, 4], [5, 6, 7, 8, 9, 10, 11], [2] * 30]
    requests = [ScoreRequest(sequence, temperature) for sequence in sequences for temperature in (1.0, 0.7)]
    for asked, found in zip(requests, shared_generator.score(requests), strict=True):
        ids = list(asked.token_ids)
        wanted = plain_logprobs(shared_generator, ids[:1], ids[1:], asked.temperature)
        assert torch.allclose(torch.tensor(found), wanted, atol=1e-5, rtol=0)


def test_scoring_is_cut_into_passes_of_bounded_size() -> None:
    requests = [ScoreRequest([1] * length) for length in (SCORE_TOKENS + 5, 3, 3, SCORE_TOKENS // 2, SCORE_TOKENS // 2)]
    parts = _batches(requests)
    assert [request for part in parts for request in part] == requests
    assert [len(part) for part in parts] == [1, 2, 2]


def test_cancel_ends_generation_within_a_step(generator: TextGenerator) -> None:
    generator.cancel()
    with pytest.raises(GenerationCancelled):
        generator.generate([request(generator, "+1=", max_tokens=60, stop_ids=frozenset())])


def sampled(generator: TextGenerator, requests: list[GenerationRequest], *, share: bool) -> list[decoding.SampledRow]:
    return decoding.decode(
        generator.model, requests, pad_id=generator.codec.pad_id, device=generator.device, share=share
    )


@pytest.mark.parametrize("temperature", [1.0, 0.05, 0.0])
def test_completions_that_share_their_sequence_are_sampled_as_without(
    shared_generator: TextGenerator, temperature: float
) -> None:
    requests = [
        request(shared_generator, text, n=n, temperature=temperature, top_p=top_p, seed=i, max_tokens=20)
        for i, (text, n, top_p) in enumerate([("+372=", 16, 1.0), ("+", 1, 1.0), ("-1,2,3=" * 3, 9, 0.8)])
    ]
    with widths_of(shared_generator) as shared_widths:
        shared = sampled(shared_generator, requests, share=True)
    with widths_of(shared_generator) as widths:
        alone = sampled(shared_generator, requests, share=False)
    assert [(one.token_ids, one.finish_reason) for one in shared] == [
        (one.token_ids, one.finish_reason) for one in alone
    ]
    for one, other in zip(shared, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert [one.token_ids for one in sampled(shared_generator, requests, share=True)] == [
        one.token_ids for one in shared
    ], "a seed repeats itself"
    assert sum(shared_widths) < sum(widths), "the model computes fewer sequences"
    if temperature == 0.0:
        assert max(shared_widths) == 3, "one sequence a request, to the end"


def test_sequences_are_as_many_as_the_completions_that_differ(
    shared_generator: TextGenerator,
) -> None:
    asked = request(shared_generator, "+372=", n=32, max_tokens=6, seed=4, stop_ids=frozenset(), temperature=0.5)
    with widths_of(shared_generator) as widths:
        rows = sampled(shared_generator, [asked], share=True)
    assert widths == [1, *(len({tuple(row.token_ids[:step]) for row in rows}) for step in range(1, 6))]
    assert widths[1] < widths[-1] <= 32


# -- sampling


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


def test_rows_mix_greedy_truncated_and_plain() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log().expand(3, 4)
    uniforms = torch.tensor([0.999, 0.999, 0.999], dtype=torch.float64)
    tokens, _ = choose(logits, torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 0.7, 1.0]), uniforms)
    assert tokens.tolist() == [1, 2, 3]


def test_the_largest_uniform_never_points_at_an_impossible_token() -> None:
    logits = torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf], [-torch.inf, -torch.inf, 0.0, -torch.inf]])
    largest = torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    for edge in (0.0, largest.item()):
        tokens, logprobs = choose(logits, rows(1.0, 2), rows(1.0, 2), torch.tensor([edge, edge], dtype=torch.float64))
        assert tokens.tolist() == [0 if edge == 0.0 else 1, 2]
        assert torch.isfinite(logprobs).all()


def test_large_vocabularies_are_worked_on_in_parts() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, MAX_ELEMENTS // 4, generator=generator)
    uniforms = torch.rand(5, dtype=torch.float64, generator=generator)
    tokens, logprobs = choose(logits, rows(0.9, 5), rows(1.0, 5), uniforms)
    for row in range(5):
        alone = choose(logits[row : row + 1], rows(0.9, 1), rows(1.0, 1), uniforms[row : row + 1])
        assert (tokens[row], logprobs[row]) == alone


def test_no_row_fails_the_others() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(4, 1)
    logits[1] = math.nan
    top_p = torch.tensor([0.9, 0.9, 1e-320, 0.0])
    tokens, logprobs = choose(logits, torch.ones(4), top_p, torch.full((4,), 0.99999, dtype=torch.float64))
    assert tokens.tolist()[2:] == [0, 0], "the likeliest token, however small top_p is"
    assert [math.isnan(each) for each in logprobs.tolist()] == [False, True, False, False]
