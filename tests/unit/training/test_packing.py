"""Micro-batches hold every trained token once, at the right place, within the budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.algorithms.evaluator import component_weights
from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.experience import EID, CustomField, Experience
from trinity_mq.experience.ragged import Indexes
from trinity_mq.training.packing import IMITATED, PAIRED, SAMPLED, MicroBatch, split, train_tokens
from trinity_mq.training.parallel.division import balance, costs, divide
from trinity_mq.training.parallel.division import pack as filled


def pack(experiences: list[Experience], max_tokens: int, **pieces: Any) -> list[MicroBatch]:
    """Return the micro-batches of one optimizer step over all experiences, in train step 1."""
    config = LossConfig.model_validate(pieces)
    tokens = train_tokens(experiences, config, component_weights(config, 1), 1)
    return tokens.micro_batches(range(len(experiences)), max_tokens, config.reduction)


def experience(run: int, prompt: int, response: int, **fields: Any) -> Experience:
    """Token values say whose they are and where: 100 * run + position."""
    values = torch.arange(response, dtype=torch.float32)
    return Experience(
        **{
            "eid": EID(1, 0, run, suffix="s"),
            "tokens": torch.arange(prompt + response, dtype=torch.int32) + 100 * run,
            "prompt_length": prompt,
            "logprobs": -values - run,
            "advantages": values + 10 * run,
            "temperature": 1.0 + run,
            **fields,
        }
    )


def weighted(run: int, prompt: int, response: int, **fields: Any) -> Experience:
    """An experience with a custom field, its run."""
    weight = CustomField("weight", "loss_weight", torch.float32)
    return experience(run, prompt, response, info={"weight": run}, custom_fields=[weight], **fields)


def listed(batch: MicroBatch) -> list[tuple[int, int, float, float, float]]:
    """Return (token, the token that predicts it, logprob, advantage, temperature) of each trained token."""
    before = batch.input_ids[batch.rows, batch.columns]
    columns = (batch.targets, before, batch.mu, batch.advantages, batch.temperature)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_each_token_is_predicted_by_the_one_before_it() -> None:
    (batch,) = pack([experience(1, 2, 3), experience(2, 1, 2)], 100)
    assert batch.input_ids.tolist() == [[100, 101, 102, 103], [200, 201, 0, 0]]
    assert listed(batch) == [
        (102, 101, -1.0, 10.0, 2.0),
        (103, 102, -2.0, 11.0, 2.0),
        (104, 103, -3.0, 12.0, 2.0),
        (201, 200, -2.0, 20.0, 3.0),
        (202, 201, -3.0, 21.0, 3.0),
    ]
    assert batch.tokens == 5
    (masked,) = pack([experience(1, 2, 4, action_mask=[True, False, False, True], temperature=None)], 100)
    assert listed(masked) == [(102, 101, -1.0, 10.0, 1.0), (105, 104, -4.0, 13.0, 1.0)]


def test_is_deterministic_for_equal_lengths() -> None:
    batches = pack([experience(run, 2, 2) for run in range(5)], 8)
    assert [batch.input_ids[:, 0].tolist() for batch in batches] == [[0, 100], [200, 300], [400]]


def test_leaves_out_experiences_without_a_trained_token() -> None:
    masked = experience(1, 3, 2, action_mask=[False, False])
    truncated = Experience(
        tokens=[1, 2, 3], prompt_length=3, logprobs=[0.0], truncate_status="prompt_truncated", reward=0.0
    )
    (batch,) = pack([masked, experience(2, 1, 1), truncated], 100)
    assert batch.targets.tolist() == [201]
    assert pack([masked, truncated], 100) == []
    assert pack([], 100) == []


def changed(**fields: Any) -> Experience:
    """An experience whose fields were changed later."""
    found = experience(1, 2, 3)
    vars(found).update(fields)
    return found


@pytest.mark.parametrize(
    ("experiences", "match"),
    [
        ([experience(1, 2, 3, advantages=None)], r"1/0/1/0/s has no advantages.*operator"),
        ([experience(1, 2, 3, logprobs=None)], r"1/0/1/0/s has no logprobs.*engine"),
        ([experience(1, 2, 3, temperature=0.0)], r"temperature 0:.*above 0"),
        ([changed(advantages=torch.zeros(2))], "advantages has 2 values, wanted one per response token"),
        ([changed(prompt_length=3)], "wanted one per response token"),
        ([Experience(tokens=[1, 2], chosen=[3], rejected=[4])], "dpo"),
        ([weighted(1, 2, 2), experience(2, 2, 2)], "the same"),
        (
            [Experience(tokens=[1, 2, 3], prompt_length=1, info={"is_expert": True})],
            r"is an answer to imitate.*algorithm\.weights\.ce",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(experiences: list[Experience], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pack(experiences, 100)


def test_distillation_needs_the_teachers_logprobs() -> None:
    with pytest.raises(ValueError, match=r"has no teacher_logprobs"):
        pack([experience(1, 1, 2)], 100, weights={"rl": 0.0, "ref_kl": 1.0})


def test_mini_batches_share_out_everything_evenly_and_repeatably() -> None:
    parts = split(7, 3, "0/5/0")
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert sorted(number for part in parts for number in part) == list(range(7))
    assert split(7, 3, "0/5/0") == parts
    assert split(7, 3, "0/5/1") != parts


def test_mini_batches_are_never_empty_and_a_single_one_keeps_its_order() -> None:
    assert [len(part) for part in split(2, 4, "")] == [1, 1]
    assert split(2, 1, "") == [[0, 1]]
    assert split(0, 1, "") == split(0, 3, "") == []


def test_moves_to_a_device_whole() -> None:
    both = [weighted(run, 2, 3) for run in (1, 2)]
    for one in both:
        one.info["engine"] = f"engine-{one.eid.run}"
    (batch,) = pack(both, 100)
    moved = vars(batch.to(torch.device("meta")))
    assert moved.pop("longest_packed") == 0
    columns = [*moved.pop("custom").values(), *moved.pop("engines").values()]
    columns += [value for value in moved.values() if value is not None]
    assert {str(column.device) for column in columns} == {"meta"}


def test_custom_fields_are_there_for_each_trained_token() -> None:
    mask = [True, False, True]
    given = [weighted(1, 2, 2), weighted(2, 1, 8), weighted(3, 1, 3, action_mask=mask), weighted(4, 1, 4)]
    batches = pack(given, 10)
    assert len(batches) > 1
    for batch in batches:
        assert batch.custom["loss_weight"].tolist() == (batch.targets // 100).tolist()
    assert sum(batch.tokens for batch in batches) == 16


def test_the_engine_of_each_trained_token_is_known_where_there_are_several() -> None:
    given = [experience(run, 1, run, info={"engine": "ab"[run % 2]} if run < 4 else {}) for run in range(1, 5)]
    batches = pack(given, 6)
    assert len(batches) > 1
    for batch in batches:
        run = batch.targets // 100
        assert batch.engines["b"].tolist() == ((run == 1) | (run == 3)).tolist()
        assert batch.engines["a"].tolist() == (run == 2).tolist(), "run 4 does not say"
    (batch,) = pack([given[0], given[2]], 100)
    assert batch.engines == {}, "one engine is all there is"


def test_answers_to_imitate_and_pairs_are_reduced_by_themselves() -> None:
    expert = Experience(eid=EID(1, 1, 0), tokens=[1, 2, 3, 4], prompt_length=1, info={"is_expert": True})
    pairs = [Experience(eid=EID(1, 2, run), tokens=[1, 2], chosen=[3, 4], rejected=[5]) for run in range(2)]
    weights = {"rl": 1.0, "ce": 1.0, "pair": 1.0}
    batches = pack([experience(1, 2, 5), expert, *pairs], 8, weights=weights)
    scales: dict[int, set[float]] = {}
    for batch in batches:
        for role, scale in zip(batch.role.tolist(), batch.scale.tolist(), strict=True):
            scales.setdefault(role, set()).add(round(scale, 6))
        paired = batch.sequence[batch.role == PAIRED].unique().tolist()
        assert len(paired) % 2 == 0, "the answers of a pair stay together"
    assert scales == {SAMPLED: {0.2}, IMITATED: {round(1 / 3, 6)}, PAIRED: {0.5}}


def test_tokens_know_how_old_the_weights_were_that_sampled_them() -> None:
    config = LossConfig()
    given = [experience(1, 1, 4, versions=[(0, 1, 3), (2, 1, 5)]), experience(2, 1, 2)]
    tokens = train_tokens(given, config, {"rl": 1.0}, 8)
    (batch,) = tokens.micro_batches([0, 1], 100)
    assert batch.staleness.tolist() == [4, 4, 2, 2, 0, 0]


UNITS = st.lists(st.tuples(st.integers(2, 300), st.one_of(st.just(0), st.integers(2, 300))), max_size=60)
"""Lengths of single sequences, and of pairs."""


def table(units: list[tuple[int, int]]) -> Indexes:
    return np.array(units, dtype=np.int64).reshape(-1, 2)


@given(UNITS, st.integers(1, 5), st.integers(1, 700), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_every_unit_is_in_one_micro_batch_within_the_budget(
    units: list[tuple[int, int]], ranks: int, budget: int, packed: bool
) -> None:
    lengths = table(units)
    parts = divide(lengths, budget, packed=packed, ranks=ranks)
    assert len(parts) == ranks
    assert len(set(map(len, parts))) == 1, "ranks take part in each other's passes"
    batches = [batch for part in parts for batch in part]
    assert sorted(unit for batch in batches for unit in batch.tolist()) == list(range(len(units)))
    for batch in batches:
        mine = lengths[batch]
        tokens = mine.sum() if packed else (mine > 0).sum() * mine.max(initial=0)
        assert tokens <= budget or len(batch) == 1
    for part in parts:
        sizes = [len(batch) for batch in part]
        assert sizes == sorted(sizes, key=lambda size: size == 0), "empty ones come last"
    busiest = max(sum(len(batch) > 0 for batch in part) for part in parts)
    assert len(parts[0]) == busiest, "no more empty ones than it takes"


@given(UNITS, st.integers(1, 5), st.integers(16, 4096))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_ranks_differ_by_at_most_one_unit(units: list[tuple[int, int]], ranks: int, hidden_size: int) -> None:
    each = costs(table(units), hidden_size)
    loads = [each[part].sum() for part in balance(each, ranks)]
    largest = each.max(initial=0.0)
    assert max(loads) - min(loads) <= largest * (1 + 1e-9)
    assert max(loads) <= (each.sum() / ranks + largest) * (1 + 1e-9)


def test_attention_makes_a_long_sequence_cost_more_than_its_tokens() -> None:
    each = costs(table([(12000, 0), (6000, 6000)]), 1000)
    assert each.tolist() == [12000 + 12000**2 / 12000, 12000 + 2 * 6000**2 / 12000]
    (alone, others) = balance(costs(table([(8000, 0), *[(100, 0)] * 160]), 64), 2)
    assert alone.tolist() == [0], "160 sequences of 100 tokens cost less than one of 8000"
    assert len(others) == 160


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 200))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_rows_are_packed_tightly(lengths: list[int], budget: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    rows = filled(sizes, budget)
    loads = [int(sizes[row].sum()) for row in rows]
    small = sorted(load for load in loads if load <= budget)
    assert sum(small[:2]) > budget or len(small) < 2, "two rows that fit into one would have been one"
    assert max(lengths) == sizes[rows[0]].max(), "if memory is short, the first row shows it"
