import struct
from enum import StrEnum

import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.experience import EID, DecodeError, EncodeError, Experience, decode, encode
from trinity_mq.experience.codec.documents import DocumentReader, DocumentWriter
from trinity_mq.messages.msgpack_scan import container_bytes, measure


def parts(body):
    """Return head and tail of a body, found by the documented layout alone."""
    head_length, tail_length = struct.unpack_from("<IQ", body, 12)
    tail = body[24 + head_length + (-head_length % 8) :]
    assert len(tail) == tail_length
    return msgpack.unpackb(body[24 : 24 + head_length]), tail


class TestRoundTrip:
    def test_every_field_type_and_dtype_survives(self, single, multi, dpo):
        given = [single, multi, dpo, multi, single]
        back = decode(encode(given))
        assert back == given
        assert [e.experience_type for e in back] == ["single_turn", "multi_turn", "dpo", "multi_turn", "single_turn"]
        assert back[0].returns.dtype == torch.bfloat16
        assert back[0].versions == [(0, 1, 4), (2, 1, 5)]
        assert type(back[0].versions[0]) is tuple
        assert back[0].multi_modal_inputs["size"].shape == ()
        assert decode(encode(back)) == given

    def test_documented_methods(self, single, multi):
        assert Experience.deserialize(single.serialize()) == single
        assert Experience.deserialize_many(Experience.serialize_many([single, multi])) == [single, multi]

    def test_no_experiences(self):
        assert decode(encode([])) == []

    def test_deserialize_wants_exactly_one(self, single):
        for count in (0, 2):
            with pytest.raises(DecodeError, match=f"holds {count} experiences.*deserialize_many"):
                Experience.deserialize(encode([single] * count))

    @pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
    def test_reads_any_buffer(self, single, wrap):
        assert decode(wrap(encode([single]))) == [single]

    def test_masks_changed_by_an_operator_keep_the_type(self, single):
        single.action_mask = torch.zeros(3, dtype=torch.bool)
        (back,) = decode(encode([single]))
        assert (back.experience_type, back.action_mask.tolist()) == ("single_turn", [False] * 3)

    def test_fields_assigned_later_are_normalised(self, multi):
        multi.advantages, multi.reward, multi.eid.run = [1, 2, 3], np.float32(0.5), np.int64(4)
        (back,) = decode(encode([multi]))
        assert back.advantages.dtype == torch.float32
        assert (back.advantages.tolist(), back.reward, back.eid.run) == ([1.0, 2.0, 3.0], 0.5, 4)

    def test_dtypes_mixed_within_a_field(self):
        dtypes = [torch.bfloat16, torch.float32, None, torch.float16, torch.bfloat16]
        given = [
            Experience(
                tokens=[1, 2, 3], prompt_length=1, logprobs=None if dtype is None else torch.rand(2, dtype=dtype)
            )
            for dtype in dtypes
        ]
        back = decode(encode(given))
        assert back == given
        assert [None if e.logprobs is None else e.logprobs.dtype for e in back] == dtypes

    def test_shapes_mixed_within_multi_modal_inputs_and_experts(self):
        shapes = [(2, 3), (5, 3), (2, 4), (3,), (), (0, 3), (0,)]
        given = [
            Experience(
                tokens=[1, 2],
                routed_experts=torch.ones(1, 1 + number % 2, 2, dtype=torch.uint8),
                multi_modal_inputs={"p#1": torch.rand(shape), f"only/{number}": torch.rand(2).double()},
            )
            for number, shape in enumerate(shapes)
        ]
        assert decode(encode(given)) == given

    def test_ids_keep_their_kind(self):
        ids = [EID(3, "3"), EID("3/gsm8k", 5), EID("x", ""), EID(2**63 - 1, -1)]
        given = [Experience(eid=eid, tokens=[1, 2]) for eid in ids]
        back = [e.eid for e in decode(encode(given))]
        assert back == ids
        assert [type(eid.batch) for eid in back] == [int, str, str, int]

    def test_texts_none_and_empty_are_told_apart(self):
        texts = [None, "", "a", "a", "ü\0", None]
        lists = [None, [], [{}], None, [{"a": None}], []]
        given = [
            Experience(tokens=[1, 2], prompt_text=text, messages=messages)
            for text, messages in zip(texts, lists, strict=True)
        ]
        back = decode(encode(given))
        assert [e.prompt_text for e in back] == texts
        assert [e.messages for e in back] == lists

    def test_rewards_keep_nan_none_and_the_sign_of_zero(self):
        given = [Experience(tokens=[1, 2], reward=reward) for reward in (None, float("nan"), -0.0, float("inf"))]
        assert [str(e.reward) for e in decode(encode(given))] == ["None", "nan", "-0.0", "inf"]

    def test_tensors_with_gradients_and_strides(self):
        wide = torch.arange(10, dtype=torch.float32, requires_grad=True)
        given = Experience(tokens=torch.arange(12, dtype=torch.int32)[::2], prompt_length=1, logprobs=wide[::2])
        (back,) = decode(encode([given]))
        assert back.tokens.tolist() == [0, 2, 4, 6, 8, 10]
        assert back.logprobs.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
        assert not back.logprobs.requires_grad


class TestInfo:
    def test_numpy_scalars_become_python_and_arrays_and_tensors_stay_what_they_are(self):
        info = {
            "np": {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "s": np.str_("x")},
            "tensor": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
            "flags": [torch.tensor([True, False]), torch.tensor(3)],
            "array": np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::-1],
            "tuple": (1, 2),
        }
        (back,) = decode(encode([Experience(tokens=[1, 2], info=info)]))
        assert back.info["np"] == {"f": 0.5, "i": 3, "b": True, "s": "x"}
        assert {name: type(value) for name, value in back.info["np"].items()} == {
            "f": float,
            "i": int,
            "b": bool,
            "s": str,
        }
        assert back.info["tensor"].dtype == torch.bfloat16
        assert back.info["flags"][0].tolist() == [True, False]
        assert back.info["flags"][1].item() == 3
        assert isinstance(back.info["array"], np.ndarray)
        assert (back.info["array"].dtype, back.info["array"].tolist()) == (np.uint16, [[2, 1, 0], [5, 4, 3]])
        assert back.info["tuple"] == [1, 2]

    def test_long_lists_and_deep_ones_within_the_limit(self):
        deep = []
        for _ in range(60):
            deep = [deep]
        info = {"long": list(range(5000)), "deep": deep, "many": [[i] for i in range(500)], "text": "文字" * 500}
        (back,) = decode(encode([Experience(tokens=[1, 2], info=info)]))
        assert back.info == info

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            (object(), ["info['outer']['key']", "object"]),
            ({1: 2}, ["info['outer']['key']", "key 1", "text"]),
            ({1, 2}, ["info['outer']['key']", "set"]),
            (1 + 2j, ["info['outer']['key']", "complex"]),
            (2**64, ["info['outer']['key']", "18446744073709551616"]),
            ([0, "\ud800"], ["info['outer']['key'][1]", "surrogates"]),
            (np.array(["a"]), ["info['outer']['key']", "array"]),
            (torch.ones(2, dtype=torch.complex64), ["documents", "complex64"]),
        ],
    )
    def test_anything_else_is_an_error_that_names_the_key(self, value, named):
        given = [Experience(tokens=[1, 2]), Experience(tokens=[1, 2], info={"outer": {"key": value}})]
        with pytest.raises(EncodeError) as error:
            encode(given)
        for part in named:
            assert part in str(error.value), str(error.value)

    def test_endless_nesting_is_an_error(self):
        endless = {}
        endless["again"] = endless
        with pytest.raises(EncodeError, match="nested deeper"):
            encode([Experience(tokens=[1, 2], info=endless)])

    def test_subclasses_of_text_and_numbers_are_accepted(self):
        class Colour(StrEnum):
            RED = "red"

        (back,) = decode(encode([Experience(tokens=[1, 2], info={"c": Colour.RED, "f": np.float64(0.25)})]))
        assert back.info == {"c": "red", "f": 0.25}


class TestRefusedToEncode:
    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("advantages", torch.zeros(7), "experience 1: advantages has 7 values"),
            ("advantages", "high", "experience 1: advantages"),
            ("action_mask", None, "experience 1: action_mask is None"),
            ("tokens", None, "tokens is None"),
            ("prompt_length", 5, "experience 1: tokens has 5 token ids with prompt_length 5"),
            ("prompt_length", None, "prompt_length is None"),
            ("reward", "high", "reward is 'high'"),
            ("temperature", -1.0, "temperature is -1.0"),
            ("experience_type", "sft", "experience_type .*sft"),
            ("truncate_status", "cut", "truncate_status .*cut"),
            ("index", 2**64, "index: wanted numbers that fit 64 bits"),
            ("prompt_text", 5, "prompt_text is 5"),
            ("response_text", "\ud800", "response_text .*UTF-8"),
            ("versions", [(0, 1, 1), (9, 1, 2)], "versions has a row that starts at token 9"),
            ("versions", [(0, 2**64, 1)], "versions holds a number that does not fit"),
            ("info", [1], r"info is \[1\], wanted a dict"),
            ("messages", {"role": "user"}, "messages is .*wanted a list"),
            ("custom_fields", ["x"], "custom_fields holds 'x'"),
            ("multi_modal_inputs", {"pixels": [1]}, "experience 1: multi_modal_inputs"),
            ("eid", "3/1", "eid is '3/1'"),
            ("eid", EID(1.5, 1), "eid.batch is 1.5"),
            ("eid", EID(1, 1, run="x"), "eid.run is 'x'"),
            ("eid", EID(1, 1, suffix=None), "eid.suffix is None"),
        ],
    )
    def test_error_names_the_field(self, single, field, value, named):
        wrong = decode(encode([single]))[0]
        setattr(wrong, field, value)
        with pytest.raises(EncodeError, match=named):
            encode([single, wrong])

    def test_other_objects(self):
        with pytest.raises(EncodeError, match="wanted Experience"):
            encode([{"tokens": [1]}])

    def test_too_many_at_once(self, multi):
        with pytest.raises(EncodeError, match=r"65537 experiences.*send several"):
            encode([multi] * 65537)


class TestLayout:
    def test_frame(self, single):
        body = encode([single])
        assert body[:8] == b"TMQX\x01\x00\x00\x00"
        head, _ = parts(body)
        assert head["n"] == 1
        assert set(head) == {"n", "columns", "tensors"}

    def test_tail_is_one_safetensors_entry_per_field(self, single, multi):
        body = encode([single, multi, single])
        head, tail = parts(body)
        tensors = safetensors.torch.load(tail)
        assert tensors.keys() == head["tensors"].keys()
        assert tensors["tokens"].tolist() == [1, 2, 3, 4, 5, 9, 8, 7, 6, 1, 2, 3, 4, 5]
        assert np.frombuffer(head["tensors"]["tokens"]["lengths"], "<i4").tolist() == [5, 4, 5]
        assert np.frombuffer(head["tensors"]["returns"]["lengths"], "<i4").tolist() == [3, -1, 3]

    def test_absent_fields_cost_nothing(self):
        head, tail = parts(encode([Experience(tokens=[1, 2]) for _ in range(3)]))
        assert set(head["tensors"]) == {"tokens", "action_mask"}
        assert set(safetensors.torch.load(tail)) == {"tokens", "action_mask"}
        ids = {f"eid.{part}" for part in ("batch", "task", "run", "step", "suffix")}
        assert set(head["columns"]) == ids | {"prompt_length", "experience_type"}

    def test_same_texts_are_stored_once(self):
        body = encode(
            [Experience(tokens=[1, 2], prompt_text="p" * 10_000, response_text=str(i % 3)) for i in range(50)]
        )
        assert len(body) < 13_000

    def test_decoded_tensors_are_views_of_one_private_buffer(self, single, multi):
        body = bytearray(encode([single, multi]))
        first, second = decode(body)
        storage = first.tokens.untyped_storage()
        assert second.tokens.untyped_storage().data_ptr() == storage.data_ptr()
        assert first.logprobs.data_ptr() % 4 == 0
        kept = first.tokens.tolist()
        body[:] = bytes(len(body))
        assert first.tokens.tolist() == kept
        second.tokens.zero_()
        assert first.tokens.tolist() == kept


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "bool"])
def test_an_empty_array_of_numpy_travels(dtype):
    one = Experience(tokens=[1, 2], prompt_length=1, info={"none": np.array([], dtype=dtype)})
    (back,) = Experience.deserialize_many(Experience.serialize_many([one]))
    assert back == one


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.integers(-300, 300) | st.floats() | st.text(max_size=3), max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 40),
)
def test_equal_documents_are_read_as_unequal_ones_are(documents, count):
    infos = [documents[number % len(documents)] for number in range(count)]
    experiences = [Experience(tokens=[1, 2], info=info, metrics={"n": number}) for number, info in enumerate(infos)]

    assert decode(encode(experiences)) == experiences


def test_what_is_written_to_one_of_equal_documents_is_not_seen_in_the_others():
    found = decode(encode([Experience(tokens=[1, 2], info={"a": 1}) for _ in range(40)]))
    found[0].info["a"] = 2

    assert [experience.info["a"] for experience in found] == [2] + [1] * 39


def test_equal_documents_with_tensors_keep_tensors_of_their_own():
    found = decode(encode([Experience(tokens=[1, 2], info={"a": torch.zeros(1)}) for _ in range(40)]))
    found[0].info["a"].fill_(1)

    assert [experience.info["a"].item() for experience in found] == [1.0] + [0.0] * 39


@pytest.mark.parametrize(
    "document",
    [b"\x82\xa1a\x01\xa1a\x02", b"\x81\xa1a", b"\x81\xa1a\x01\x01", b"\xc1", b""],
    ids=["a key twice", "cut short", "followed by more", "invalid", "empty"],
)
def test_equal_documents_that_are_wrong_are_refused(document):
    with pytest.raises(DecodeError):
        DocumentReader([]).read_all(document * 40, [len(document) * number for number in range(41)])


@pytest.mark.parametrize("spare", [0, 1])
def test_documents_that_are_counted_late_are_counted(spare):
    flat = {str(number): [0.1, 1e-5, -144][number % 3] for number in range(40)}  # bytes in it look like lists and maps
    packed = msgpack.packb(flat)
    assert measure(packed) == 1 < container_bytes(packed)
    writer = DocumentWriter(max_containers=8 + 1 + spare)

    assert len(writer.write_all([flat] * 8, "info")) == 8
    writer.write([], "messages")
    if spare:
        writer.write_all([flat], "metrics")
    with pytest.raises(EncodeError, match=f"metrics: more than {9 + spare} lists and maps"):
        writer.write_all([flat], "metrics")
