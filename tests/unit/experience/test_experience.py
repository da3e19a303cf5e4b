"""A batch of columns is what the list of its experiences is, without the objects."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.experience import (
    EID,
    CustomField,
    DecodeError,
    EncodeError,
    Experience,
    ExperienceBatch,
    ExperienceError,
    decode,
    encode,
)
from trinity_mq.experience.codec.body import decode_frame, encode_frame
from trinity_mq.experience.eid import composed_ids
from trinity_mq.experience.ragged import Ragged


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
        ("taskset", {"c": 5}, lambda b: b.settle()),
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


def test_composed_ids_have_the_documented_form():
    eid = EID(3, 1, 2, 4, "ab")
    assert (eid.uid, eid.sid, eid.rid, eid.tid) == ("3/1/2/4/ab", "3/1/4", "3/1/2", "3/1")
    assert str(eid) == eid.uid


def test_slashes_inside_batch_or_task_do_not_make_ids_collide():
    parts = ["3", "3/a", "3%2Fa", "3%a", "a", "%", "/", "", "3/a/b", "a/b"]
    ids = [EID(batch, task, 0, 0, "s") for batch in parts for task in parts]
    for composed in ("uid", "sid", "rid", "tid"):
        assert len({getattr(eid, composed) for eid in ids}) == len(ids), composed
    assert EID("3/gsm8k", 1).tid == "3/gsm8k/1"


PARTS = st.integers(0, 3) | st.sampled_from(["", "a", "1", "a/b", "a%2Fb", "%", "3/gsm8k"])


@given(st.lists(st.builds(EID, batch=PARTS, task=PARTS, run=st.integers(0, 9), step=st.integers(0, 9)), max_size=8))
def test_ids_composed_together_are_those_composed_one_by_one(eids: list[EID]) -> None:
    parts = [[getattr(eid, name) for eid in eids] for name in ("batch", "task", "run", "step", "suffix")]

    for kind in ("uid", "sid", "rid", "tid"):
        assert composed_ids(kind, *parts) == [getattr(eid, kind) for eid in eids]


BASE = {"tokens": [1, 2, 3, 4, 5], "prompt_length": 2}


class TestType:
    def test_is_decided_in_the_documented_order(self):
        pair = {"chosen": [1], "rejected": [2]}
        assert Experience(**BASE).experience_type == "single_turn"
        assert Experience(**BASE, chosen=[1]).experience_type == "single_turn"
        assert Experience(**BASE, **pair).experience_type == "dpo"
        assert Experience(**BASE, action_mask=[1, 1, 0]).experience_type == "multi_turn"
        assert Experience(**BASE, action_mask=[1, 1, 0], **pair).experience_type == "multi_turn"

    def test_can_be_stated(self):
        stated = Experience(**BASE, action_mask=[False] * 3, experience_type="single_turn")
        assert stated.experience_type == "single_turn"
        assert stated.action_mask.tolist() == [False] * 3

    @pytest.mark.parametrize("kind", ["multi_turn", "dpo", "sft"])
    def test_stated_wrongly_is_refused(self, kind):
        with pytest.raises(ExperienceError):
            Experience(**BASE, experience_type=kind)


class TestNormalising:
    @pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "array", "tensor"])
    def test_every_form_gives_the_same_experience(self, form):
        floats = ("logprobs", "advantages", "returns", "token_level_reward", "teacher_logprobs")
        made = Experience(
            tokens=form([1, 2, 3]),
            prompt_length=1,
            action_mask=form([1, 0]),
            routed_experts=form([[[1, 2]], [[3, 255]]]),
            **{name: form([-1, 2]) for name in floats},
        )
        dtypes = {"tokens": torch.int32, "action_mask": torch.bool, "routed_experts": torch.uint8}
        dtypes |= dict.fromkeys(floats, torch.float32)
        assert {name: getattr(made, name).dtype for name in dtypes} == dtypes
        assert (made.tokens.tolist(), made.logprobs.tolist()) == ([1, 2, 3], [-1.0, 2.0])
        assert made.action_mask.tolist() == [True, False]
        assert made.routed_experts.tolist() == [[[1, 2]], [[3, 255]]]

    def test_half_precision_is_kept_and_double_is_not(self):
        for dtype, kept in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float64", "float32")):
            values = torch.ones(3, dtype=getattr(torch, dtype))
            assert Experience(**BASE, logprobs=values).logprobs.dtype == getattr(torch, kept)

    def test_scalars_become_python_numbers(self):
        made = Experience(**BASE, reward=np.float32(0.5), temperature=torch.tensor(1), index=np.int64(3))
        assert (made.reward, made.temperature, made.index) == (0.5, 1.0, 3)
        assert (type(made.reward), type(made.temperature), type(made.index)) == (float, float, int)

    def test_dicts_are_not_shared(self):
        info = {"a": 1}
        first, second = Experience(**BASE, info=info), Experience(**BASE, info=info)
        first.info["b"] = 2
        assert (second.info, info) == ({"a": 1}, {"a": 1})


class TestMask:
    def test_truncated_prompt_needs_no_logprobs_and_no_response(self):
        cut = {"truncate_status": "prompt_truncated"}
        assert Experience(tokens=[1, 2, 3], prompt_length=2, **cut).action_mask.tolist() == [False]
        assert Experience(tokens=[1, 2, 3], prompt_length=3, **cut).action_mask.tolist() == []
        assert Experience(tokens=[1, 2], prompt_length=2, logprobs=[0.0], **cut).action_mask.tolist() == [False]


class TestRefused:
    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"tokens": [1.5, 2.0, 3.0]}, ["tokens", "float32", "integer"]),
            ({"tokens": [True, False, True]}, ["tokens", "bool"]),
            ({"tokens": [1, 2, 2**31]}, ["tokens", "2147483648", "int32"]),
            ({"tokens": torch.tensor([1, -(2**31) - 1, 5])}, ["tokens", "-2147483649"]),
            ({"tokens": [[1, 2], [3, 4]]}, ["tokens", "(2, 2)", "one dimension"]),
            ({"tokens": [1, None, 3]}, ["tokens", "None"]),
            ({"tokens": None}, ["tokens", "None"]),
            ({"tokens": "abc"}, ["tokens", "abc"]),
            ({"tokens": []}, ["tokens", "empty"]),
            ({"tokens": [1, 2]}, ["tokens", "2", "prompt_length 2"]),
            ({"prompt_length": 0}, ["prompt_length", "0", "at least 1"]),
            ({"prompt_length": 1.0}, ["prompt_length", "1.0", "whole"]),
            ({"prompt_length": 0, "action_mask": [1] * 5}, ["prompt_length", "0"]),
            ({"action_mask": [1, 0]}, ["action_mask", "2", "3", "multi_turn"]),
            ({"action_mask": [1, 2, 0]}, ["action_mask", "2", "0 and 1"]),
            ({"logprobs": [0.0]}, ["logprobs", "1", "5 - 2 = 3", "single_turn"]),
            ({"logprobs": [0.0, None, 0.0]}, ["logprobs", "None"]),
            ({"logprobs": [True, False, True]}, ["logprobs", "bool"]),
            ({"advantages": [0.0] * 4}, ["advantages", "4", "3"]),
            ({"returns": [0.0] * 4}, ["returns", "4", "3"]),
            ({"token_level_reward": [0.0] * 4}, ["token_level_reward", "4", "3"]),
            ({"teacher_logprobs": [0.0] * 4}, ["teacher_logprobs", "4", "3"]),
            ({"action_mask": [1, 1, 1], "teacher_logprobs": [0.0] * 4}, ["teacher_logprobs", "4", "multi_turn"]),
            ({"routed_experts": [[1], [2]]}, ["routed_experts", "(2, 1)"]),
            ({"routed_experts": [[[1]]]}, ["routed_experts", "1 rows", "4"]),
            ({"routed_experts": [[[256]]] * 4}, ["routed_experts", "256"]),
            ({"reward": "1"}, ["reward", "'1'", "number"]),
            ({"reward": torch.ones(2)}, ["reward", "(2,)"]),
            ({"temperature": -1}, ["temperature", "-1.0"]),
            ({"temperature": float("nan")}, ["temperature", "nan"]),
            ({"truncate_status": "cut"}, ["truncate_status", "cut", "prompt_truncated"]),
            ({"eid": "3/1"}, ["eid", "3/1"]),
            ({"eid": {"batch": 1, "uid": 2}}, ["eid", "uid"]),
            ({"response_text": 5}, ["response_text", "5", "str"]),
            ({"messages": {"role": "user"}}, ["messages", "list"]),
            ({"multi_modal_inputs": {"pixels": ["a"]}}, ["multi_modal_inputs"]),
            ({"chosen": [1], "rejected": []}, ["rejected", "dpo"]),
            ({"chosen": [1], "rejected": [2], "logprobs": [0.0]}, ["logprobs", "dpo"]),
            ({"versions": [(1, 0, 0)]}, ["versions", "1"]),
            ({"versions": [(0, 0, 0), (0, 0, 1)]}, ["versions", "rising"]),
            ({"versions": [(0, 0, 0), (3, 0, 1)]}, ["versions", "3"]),
            ({"versions": [(0, 0)]}, ["versions", "(0, 0)"]),
            ({"versions": [(0, -1, 0)]}, ["versions", "-1"]),
            ({"versions": 5}, ["versions", "5"]),
        ],
    )
    def test_error_names_field_value_and_rule(self, wrong, named):
        with pytest.raises(ExperienceError) as error:
            Experience(**(BASE | wrong))
        for part in named:
            assert part in str(error.value), str(error.value)
        if "chosen" not in wrong:
            changed = Experience(**BASE)
            vars(changed).update(wrong)
            with pytest.raises(EncodeError, match="|".join(wrong)):
                encode([Experience(**BASE), changed])

    def test_truncated_prompt_still_has_to_agree_with_its_mask(self):
        with pytest.raises(ExperienceError, match="advantages"):
            Experience(**BASE, truncate_status="prompt_truncated", logprobs=[0.0] * 3, advantages=[0.0])


class TestVersions:
    def test_oldest_and_newest_compare_generation_first(self):
        made = Experience(**BASE, versions=[(0, 1, 9), (1, 2, 0), (2, 1, 10)])
        assert (made.version_min, made.version_max) == ((1, 9), (2, 0))


class TestDict:
    def test_holds_the_documented_keys_and_no_more(self):
        made = Experience(eid=EID(1, 2, 3, 4, "s"), **BASE, info={"a": 1})
        assert made.to_dict() == {
            "eid": {"batch": 1, "task": 2, "run": 3, "step": 4, "suffix": "s"},
            "type": "single_turn",
            "prompt_length": 2,
            "response_length": 3,
            "info": {"a": 1},
            "metrics": {},
        }

    def test_dpo_has_the_lengths_of_both_responses(self, dpo):
        found = dpo.to_dict()
        assert (found["type"], found["prompt_length"]) == ("dpo", 3)
        assert (found["response_length"], found["rejected_length"]) == (2, 1)
        assert found["chosen_messages"] == [{"role": "assistant", "content": "yes"}]


class TestEquality:
    @pytest.mark.parametrize(
        "change",
        [
            {"reward": 2.0},
            {"tokens": torch.tensor([1, 2, 3, 4, 6], dtype=torch.int32)},
            {"advantages": torch.zeros(3)},
            {"returns": torch.tensor([1.0, 2.0, 3.0])},
            {"logprobs": None},
            {"info": {"answer": 13}},
            {"eid": EID()},
            {"experience_type": "multi_turn"},
            {"custom_fields": []},
            {"versions": [(0, 1, 4)]},
            {"multi_modal_inputs": {"pixels": torch.zeros(2, 3, 4), "size": torch.tensor(5)}},
        ],
    )
    def test_sees_every_difference(self, single, change):
        assert single == dataclasses.replace(single)
        assert single != dataclasses.replace(single, **change)

    def test_is_about_experiences_only(self, single):
        assert single != single.to_dict()
        with pytest.raises(TypeError):
            hash(single)
        assert repr(single) == f"Experience({single.eid.uid}, single_turn, 2+3 tokens, reward=1.0)"
