"""A batch of columns is what the list of its experiences is, without the objects."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.experience import (
    EID,
    CustomField,
    DecodeError,
    Experience,
    ExperienceBatch,
    ExperienceError,
    decode,
    encode,
)
from trinity_mq.experience.codec.body import decode_frame, encode_frame
from trinity_mq.experience.codec.column_rules import first_bad
from trinity_mq.experience.eid import composed_ids
from trinity_mq.experience.ragged import Ragged
from trinity_mq.experience.rules import TYPES, check_lengths


def one(number: int, **fields) -> Experience:
    return Experience(
        **{
            "eid": EID(7, f"t{number // 4}", number % 4, suffix=f"s{number}"),
            "tokens": list(range(number, number + 3 + number % 5)),
            "prompt_length": 2,
            "logprobs": [-0.5] * (1 + number % 5),
            "reward": float(number % 3),
            "info": {"n": number, "half": number / 2 + 0.1},
            "metrics": {"accuracy": 0.1 * number},
            "versions": [(0, 1, number)],
            **fields,
        }
    )


@pytest.fixture
def mixed(single, multi, dpo) -> list[Experience]:
    return [one(1), single, multi, one(2, logprobs=None), dpo, one(3, logprobs=torch.zeros(4, dtype=torch.bfloat16))]


def test_holds_what_its_list_holds(mixed):
    batch = ExperienceBatch.of(mixed)
    assert len(batch) == 6
    assert batch.to_list() == mixed
    assert list(batch) == mixed
    assert [batch[number] for number in range(-6, 6)] == mixed + mixed
    assert batch[1:5:2].to_list() == mixed[1:5:2]
    assert batch[4:1].to_list() == []
    assert ExperienceBatch.of(batch) is batch
    with pytest.raises(IndexError, match="experience 6 of 6"):
        batch[6]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_travels_as_its_list_does(mixed, compression):
    body = ExperienceBatch.of(mixed).encode(compression)
    assert body == encode(mixed, compression)
    assert decode(body) == mixed
    assert ExperienceBatch.decode(body) == ExperienceBatch.of(mixed)
    assert ExperienceBatch.decode(body).settle().encode(compression) == body


def test_nothing_is_a_batch_too():
    empty = ExperienceBatch.of([])
    assert not empty
    assert empty.to_list() == []
    assert empty.select([]).ids("tid") == []
    assert empty.encode() == encode([])
    assert ExperienceBatch.decode(encode([])) == empty
    assert ExperienceBatch.concat([]) == empty == ExperienceBatch.concat([empty, empty])
    assert empty.replace(reward=[]) == empty


def test_choosing_is_by_number_or_by_truth(mixed):
    batch = ExperienceBatch.decode(encode(mixed))
    assert batch.select([5, 0, 0, -2]).to_list() == [mixed[5], mixed[0], mixed[0], mixed[4]]
    uids = batch.ids("uid")
    assert uids == [experience.eid.uid for experience in mixed]
    assert batch.select([4, 0]).ids("uid") == [uids[4], uids[0]]
    assert batch.select([1, 1]).ids("tid") == [mixed[1].eid.tid] * 2
    assert batch.replace(reward=[1.0] * 6)[2:4].ids("uid") == uids[2:4]
    assert batch.select(np.array([True, False] * 3)).to_list() == mixed[::2]
    assert decode(batch.select([3, 1, 5]).encode()) == [mixed[3], mixed[1], mixed[5]]
    for wrong in ([6], [-7], np.array([True])):
        with pytest.raises(IndexError):
            batch.select(wrong)


def test_choosing_copies_no_tensor():
    batch = ExperienceBatch.decode(encode([one(number) for number in range(8)]))
    (before,) = batch.column("tokens")
    (after,) = batch.select([6, 1]).column("tokens")
    assert after.flat.data_ptr() == before.flat.data_ptr()
    assert batch[2:5].dense("tokens").untyped_storage().data_ptr() == before.flat.untyped_storage().data_ptr()


def test_objects_are_free_to_change():
    body = encode(
        [one(1, info={"kept": torch.zeros(2), "list": [1]}, custom_fields=[CustomField("n", "m", torch.int8)])]
    )
    for make in (ExperienceBatch.decode, lambda data: ExperienceBatch.of(decode(data))):
        batch = make(bytes(body))
        (first,) = batch.to_list()
        first.tokens.zero_()
        first.logprobs += 1
        first.info["new"] = first.info["kept"].add_(1)
        first.metrics.clear()
        first.custom_fields.clear()
        assert batch.to_list()[0].tokens.tolist() == one(1).tokens.tolist()
        assert batch.to_list()[0].metrics == one(1).metrics
        assert "new" not in batch.to_list()[0].info
    (mine,) = decode(body)
    mine.tokens.zero_()
    assert decode(body)[0].tokens.tolist() == one(1).tokens.tolist()


def test_other_values_give_another_batch(mixed):
    plain = [one(number) for number in range(4)]
    batch = ExperienceBatch.decode(encode(plain))
    lengths = batch.lengths("action_mask")
    ones = Ragged.packed(torch.ones(int(lengths.sum())), lengths)
    changed = batch.replace(reward=[1.0, None, 2, 3], advantages=ones, info=[{}, None, {"a": 1}, {}], taskset=["x"] * 4)
    wanted = [one(number, reward=reward, taskset="x") for number, reward in enumerate((1.0, None, 2.0, 3.0))]
    for experience, info in zip(wanted, ({}, {}, {"a": 1}, {}), strict=True):
        experience.info = info
        experience.advantages = torch.ones(len(experience.action_mask))
    assert changed.to_list() == wanted
    assert decode(changed.encode()) == wanted
    assert batch.to_list() == plain, "the batch itself is as it was"
    assert changed.replace(advantages=[None] * 4, logprobs=[e.logprobs for e in plain]).column("advantages") == ()


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"nonsense": [1, 2]}, "'nonsense' is not a field that can be replaced"),
        ({"eid": [EID(), EID()]}, "'eid' is not a field that can be replaced"),
        ({"reward": [1.0]}, "reward has 1 values, wanted one for each of 2"),
        ({"reward": ["a", 1.0]}, "wanted one number or None"),
        ({"advantages": [[1.0], [1.0, 2.0, 3.0]]}, "experience 0: advantages has 1 values"),
        ({"prompt_length": [9, 2]}, "experience 0: tokens has 4 token ids with prompt_length 9"),
        ({"versions": [[(1, 0, 0)], None]}, "versions has a row that starts at token 1"),
        ({"temperature": [-1.0, 0.0]}, "temperature is -1.0"),
        ({"taskset": [3, "x"]}, "taskset is 3, wanted text"),
        ({"tokens": [None, None]}, "tokens is None"),
        ({"logprobs": Ragged.packed(torch.zeros(5, dtype=torch.int64), np.array([2, 3]))}, "wanted 1 dimensions"),
        ({"reward": Ragged.packed(torch.zeros(2), np.array([1, 1]))}, "wanted 0 dimensions"),
        ({"advantages": Ragged.packed(torch.zeros(4), np.array([2, 2]))}, "experience 1: advantages has 2 values"),
    ],
)
def test_other_values_are_checked_as_always(columns, match):
    with pytest.raises(ExperienceError, match=match):
        ExperienceBatch.of([one(1), one(2)]).replace(**columns)


def test_unknown_names_say_what_there_is():
    batch = ExperienceBatch.of([one(1)])
    for ask in (batch.values, batch.column, batch.lengths, batch.dense):
        with pytest.raises(KeyError, match="wanted one of"):
            ask("nonsense")
    with pytest.raises(KeyError, match="no experience has advantages"):
        batch.dense("advantages")
    assert batch.lengths("advantages").tolist() == [-1]
    assert batch.values("taskset") == [None]


@pytest.mark.parametrize(
    ("name", "column", "opens"),
    [
        ("info", {"d": b"\xc1", "l": np.array([1], np.int32).tobytes()}, lambda b: b.values("info")),
        ("metrics", {"d": b"\x93\x01\x02\x03", "l": np.array([4], np.int32).tobytes()}, lambda b: b.to_list()),
        ("response_text", {"s": b"\xff", "l": np.array([1], np.int32).tobytes()}, lambda b: b.values("response_text")),
        ("versions", {"i": b"", "l": np.array([2], np.int32).tobytes()}, lambda b: b.values("versions")),
        ("eid.task", {"d": b"\xc0", "l": np.array([1], np.int32).tobytes()}, lambda b: b.ids("tid")),
        ("taskset", 5, lambda b: b.settle()),
    ],
)
def test_what_is_opened_later_fails_then_and_all_at_once_on_request(name, column, opens):
    head, tail = decode_frame(encode([one(1)]))
    head["columns"][name] = column
    body = encode_frame(head, [bytes(tail)])
    batch = ExperienceBatch.decode(body)
    assert batch.dense("tokens").tolist() == one(1).tokens.tolist()
    with pytest.raises(DecodeError, match=name):
        opens(batch)
    with pytest.raises(DecodeError, match=name):
        ExperienceBatch.decode(body).settle()
    with pytest.raises(DecodeError, match=name):
        ExperienceBatch.concat([batch, batch])[1:].select([0]).settle()
    with pytest.raises(DecodeError, match=name):
        decode(body)


FIELDS = ("tokens", "action_mask", "logprobs", "chosen", "rejected", "routed_experts")


def breaks(kind, status, prompt, lengths):
    try:
        check_lengths(kind, status, prompt, {name: length for name, length in lengths.items() if length >= 0})
    except ExperienceError:
        return True
    return False


def columns_of(rows):
    return {name: np.array([lengths[name] for *_, lengths in rows]) for name in FIELDS}


def first_of(rows):
    kinds, statuses, prompts, _ = zip(*rows, strict=True)
    return first_bad(kinds, statuses, np.array(prompts), columns_of(rows))


def test_columns_and_single_experiences_are_judged_alike():
    good, bad = [], 0
    lengths = itertools.product(range(3), range(-1, 3), range(-1, 3), range(-1, 2), range(-1, 2), range(-1, 2))
    for sizes, kind, status, prompt in itertools.product(lengths, TYPES, (None, "prompt_truncated"), range(2)):
        row = (kind, status, prompt, dict(zip(FIELDS, sizes, strict=True)))
        if breaks(*row):
            bad += 1
            assert first_of([row]) == 0, row
        else:
            good.append(row)
    assert first_of(good) is None
    assert {row[:2] for row in good} == set(itertools.product(TYPES, (None, "prompt_truncated")))
    assert bad > len(good)


def test_composed_ids_have_the_documented_form():
    eid = EID(3, 1, 2, 4, "ab")
    assert (eid.uid, eid.sid, eid.rid, eid.tid) == ("3/1/2/4/ab", "3/1/4", "3/1/2", "3/1")
    assert str(eid) == eid.uid


def test_slashes_inside_batch_or_task_do_not_make_ids_collide():
    parts = ["3", "3/a", "3%2Fa", "3%a", "a", "%", "/", "", "3/a/b", "a/b"]
    ids = [EID(batch, task, 0, 0, "s") for batch in parts for task in parts]
    for composed in ("uid", "sid", "rid", "tid"):
        assert len({getattr(eid, composed) for eid in ids}) == len(ids), composed
    assert EID("3/gsm8k", 1).tid == "3%2Fgsm8k/1"


PARTS = st.integers(0, 3) | st.sampled_from(["", "a", "1", "a/b", "a%2Fb", "%", "3/gsm8k"])


@given(st.lists(st.builds(EID, batch=PARTS, task=PARTS, run=st.integers(0, 9), step=st.integers(0, 9)), max_size=8))
def test_ids_composed_together_are_those_composed_one_by_one(eids: list[EID]) -> None:
    parts = [[getattr(eid, name) for eid in eids] for name in ("batch", "task", "run", "step", "suffix")]

    for kind in ("uid", "sid", "rid", "tid"):
        assert composed_ids(kind, *parts) == [getattr(eid, kind) for eid in eids]


def test_an_unknown_kind_of_id_is_refused() -> None:
    with pytest.raises(ValueError, match="'xid' is not a kind of id"):
        composed_ids("xid", [1], [2], [3], [4], ["a"])
