"""Micro-batches hold every trained token once, at the right place, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trinity_mq.experience import EID, CustomField, Experience
from trinity_mq.training.packing import MicroBatch, pack, split


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


def listed(batch: MicroBatch) -> list[tuple[int, int, float, float, float]]:
    """Return (token, the token that predicts it, logprob, advantage, temperature) of each trained token."""
    before = batch.input_ids[batch.rows, batch.columns]
    columns = (batch.targets, before, batch.old_logprobs, batch.advantages, batch.temperature)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_each_token_is_predicted_by_the_one_before_it() -> None:
    (batch,) = pack([experience(1, 2, 3), experience(2, 1, 2)], 100)
    assert batch.input_ids.tolist() == [[100, 101, 102, 103], [200, 201, 202, 0]]
    assert listed(batch) == [
        (102, 101, -1.0, 10.0, 2.0),
        (103, 102, -2.0, 11.0, 2.0),
        (104, 103, -3.0, 12.0, 2.0),
        (201, 200, -2.0, 20.0, 3.0),
        (202, 201, -3.0, 21.0, 3.0),
    ]
    assert batch.tokens == 5


def test_only_what_the_action_mask_names_is_trained() -> None:
    (batch,) = pack([experience(1, 2, 4, action_mask=[True, False, False, True])], 100)
    assert listed(batch) == [(102, 101, -1.0, 10.0, 2.0), (105, 104, -4.0, 13.0, 2.0)]


def test_no_temperature_means_one() -> None:
    (batch,) = pack([experience(1, 2, 2, temperature=None)], 100)
    assert batch.temperature.tolist() == [1.0, 1.0]


def test_keeps_to_the_budget_longest_first_and_loses_nothing() -> None:
    lengths = [3, 9, 4, 30, 7, 3, 5, 8, 3, 6]
    experiences = [experience(run, 1, length - 1) for run, length in enumerate(lengths)]
    batches = pack(experiences, 16)
    sizes = [(batch.input_ids.shape[0], batch.input_ids.shape[1] + 1) for batch in batches]
    assert sizes[0] == (1, 30), "over the budget, so alone"
    assert all(rows * width <= 16 for rows, width in sizes[1:])
    assert [width for _, width in sizes] == sorted((width for _, width in sizes), reverse=True)
    tokens = sorted(token for batch in batches for token in batch.targets.tolist())
    assert tokens == sorted(int(token) for one in experiences for token in one.tokens[1:])


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


def test_reads_what_comes_off_the_wire() -> None:
    sent = [experience(1, 2, 3), experience(2, 1, 2)]
    received = Experience.deserialize_many(Experience.serialize_many(sent))
    assert listed(pack(received, 100)[0]) == listed(pack(sent, 100)[0])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"advantages": None}, r"1/0/1/0/s has no advantages.*operator"),
        ({"logprobs": None}, r"1/0/1/0/s has no logprobs.*engine"),
        ({"temperature": 0.0}, r"temperature 0:.*above 0"),
    ],
)
def test_says_what_an_experience_lacks(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pack([experience(1, 2, 3, **fields)], 100)


def test_fields_that_were_changed_later_must_still_agree() -> None:
    short = experience(1, 2, 3)
    short.advantages = torch.zeros(2)
    with pytest.raises(ValueError, match="advantages has 2 values, wanted one per response token"):
        pack([short], 100)
    longer = experience(1, 2, 3)
    longer.prompt_length = 3
    with pytest.raises(ValueError, match="wanted one per response token"):
        pack([longer], 100)


def test_a_pair_of_answers_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dpo"):
        pack([Experience(tokens=[1, 2], chosen=[3], rejected=[4])], 100)


def test_mini_batches_share_out_everything_evenly_and_repeatably() -> None:
    experiences = [experience(run, 1, 1) for run in range(7)]
    parts = split(experiences, 3, "0/5/0")
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert sorted(one.eid.run for part in parts for one in part) == list(range(7))
    assert split(experiences, 3, "0/5/0") == parts
    assert split(experiences, 3, "0/5/1") != parts


def test_mini_batches_are_never_empty_and_a_single_one_keeps_its_order() -> None:
    experiences = [experience(run, 1, 1) for run in range(2)]
    assert [len(part) for part in split(experiences, 4, "")] == [1, 1]
    assert [part.to_list() for part in split(experiences, 1, "")] == [experiences]
    assert split([], 1, "") == split([], 3, "") == []


def test_moves_to_a_device_whole() -> None:
    (batch,) = pack([weighted(1, 2, 3)], 100)
    moved = vars(batch.to(torch.device("meta")))
    assert {str(value.device) for value in [*moved.pop("custom").values(), *moved.values()]} == {"meta"}


def weighted(run: int, prompt: int, response: int, **fields: Any) -> Experience:
    """An experience with a custom field, its run."""
    weight = CustomField("weight", "loss_weight", torch.float32)
    return experience(run, prompt, response, info={"weight": run}, custom_fields=[weight], **fields)


def test_custom_fields_are_there_for_each_trained_token() -> None:
    mask = [True, False, True]
    given = [weighted(1, 2, 2), weighted(2, 1, 8), weighted(3, 1, 3, action_mask=mask), weighted(4, 1, 4)]
    batches = pack(given, 10)
    assert len(batches) > 1
    for batch in batches:
        assert batch.custom["loss_weight"].tolist() == (batch.targets // 100).tolist()
    assert sum(batch.tokens for batch in batches) == 16


def test_custom_fields_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="the same"):
        pack([weighted(1, 2, 2), experience(2, 2, 2)], 100)
