import math
from enum import StrEnum

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trinity_mq.experience import (
    EID,
    CustomField,
    DecodeError,
    EncodeError,
    Experience,
    ExperienceBatch,
    decode,
    encode,
)
from trinity_mq.experience.codec.documents import DocumentReader, DocumentWriter
from trinity_mq.experience.rules import DPO, TRUNCATE_STATUSES, TYPES
from trinity_mq.messages.msgpack_scan import container_bytes, measure


def endless():
    found = {}
    found["again"] = found
    return found


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

    def test_deserialize_wants_exactly_one(self, single):
        for count in (0, 2):
            with pytest.raises(DecodeError, match=f"holds {count} experiences.*deserialize_many"):
                Experience.deserialize(encode([single] * count))

    @pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
    def test_reads_any_buffer(self, single, wrap):
        assert decode(wrap(encode([single]))) == [single]

    def test_fields_assigned_later_are_normalised(self, multi):
        multi.advantages, multi.reward, multi.eid.run = [1, 2, 3], np.float32(0.5), np.int64(4)
        (back,) = decode(encode([multi]))
        assert back.advantages.dtype == torch.float32
        assert (back.advantages.tolist(), back.reward, back.eid.run) == ([1.0, 2.0, 3.0], 0.5, 4)

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
        class Colour(StrEnum):
            RED = "red"

        info = {
            "np": {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "s": np.str_("x"), "c": Colour.RED},
            "tensor": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
            "array": np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::-1],
            "none": np.array([], dtype="bool"),
            "tuple": (1, 2),
        }
        (back,) = decode(encode([Experience(tokens=[1, 2], info=info)]))
        assert [(type(value), value) for value in back.info["np"].values()] == [
            *[(float, 0.5), (int, 3), (bool, True), (str, "x"), (str, "red")]
        ]
        assert back.info["tensor"].dtype == torch.bfloat16
        assert isinstance(back.info["array"], np.ndarray)
        assert (back.info["array"].dtype, back.info["array"].tolist()) == (np.uint16, [[2, 1, 0], [5, 4, 3]])
        assert (back.info["none"].dtype, back.info["none"].shape) == (np.bool_, (0,))
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
            (endless(), ["nested deeper"]),
        ],
    )
    def test_anything_else_is_an_error_that_names_the_key(self, value, named):
        given = [Experience(tokens=[1, 2]), Experience(tokens=[1, 2], info={"outer": {"key": value}})]
        with pytest.raises(EncodeError) as error:
            encode(given)
        for part in named:
            assert part in str(error.value), str(error.value)


class TestRefusedToEncode:
    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("advantages", "high", "experience 1: advantages"),
            ("action_mask", None, "experience 1: action_mask is None"),
            ("prompt_length", None, "prompt_length is None"),
            ("experience_type", "sft", "experience_type .*sft"),
            ("index", 2**64, "index: wanted numbers that fit 64 bits"),
            ("response_text", "\ud800", "response_text .*UTF-8"),
            ("versions", [(0, 2**64, 1)], "versions holds a number that does not fit"),
            ("info", [1], r"info is \[1\], wanted a dict"),
            ("custom_fields", ["x"], "custom_fields holds 'x'"),
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

    def test_other_objects_and_too_many_at_once(self, multi):
        with pytest.raises(EncodeError, match="wanted Experience"):
            encode([{"tokens": [1]}])
        with pytest.raises(EncodeError, match=r"65537 experiences.*send several"):
            encode([multi] * 65537)


class TestLayout:
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
    found = decode(encode([Experience(tokens=[1, 2], info={"a": torch.zeros(1), "b": 1}) for _ in range(40)]))
    found[0].info["a"].fill_(1)
    found[0].info["b"] = 2
    assert [(one.info["a"].item(), one.info["b"]) for one in found] == [(1.0, 2), *[(0.0, 1)] * 39]


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


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SMALL = st.integers(0, 5)
BIG = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=32)
DTYPE = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
IDS = st.one_of(BIG, TEXT)
LEAF = st.one_of(st.none(), st.booleans(), BIG, st.floats(), TEXT, st.binary(max_size=4))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from([torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.int16]))
    return (
        torch.tensor(draw(st.lists(SMALL, min_size=math.prod(shape), max_size=math.prod(shape))))
        .reshape(shape)
        .to(dtype)
    )


ARRAYS = tensors().filter(lambda tensor: tensor.dtype != torch.bfloat16).map(lambda tensor: tensor.numpy())
TREE = st.recursive(
    LEAF | tensors() | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.none() | st.lists(st.dictionaries(TEXT, LEAF, max_size=2), max_size=3)


@st.composite
def experiences(draw):
    kind = draw(st.sampled_from(TYPES))
    status = draw(st.sampled_from(TRUNCATE_STATUSES))
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    token_ids = st.integers(-(2**31), 2**31 - 1)
    length = prompt if kind == DPO else prompt + response
    fields = {
        "eid": EID(draw(IDS), draw(IDS), draw(BIG), draw(BIG), draw(TEXT)),
        "tokens": draw(st.lists(token_ids, min_size=length, max_size=length)),
        "prompt_length": prompt,
        "experience_type": kind,
        "truncate_status": status,
        "reward": draw(st.none() | st.floats()),
        "temperature": draw(st.none() | st.floats(0, 10)),
        "info": draw(st.dictionaries(TEXT, TREE, max_size=3)),
        "metrics": draw(st.dictionaries(TEXT, st.floats() | SMALL, max_size=3)),
        "multi_modal_inputs": draw(st.none() | st.dictionaries(TEXT, tensors(), max_size=2)),
        "custom_fields": draw(st.lists(st.builds(CustomField, TEXT, TEXT, DTYPE), max_size=2)),
        "index": draw(st.none() | BIG),
    }
    fields |= {name: draw(st.none() | TEXT) for name in ("prompt_text", "response_text", "taskset")}
    fields |= {name: draw(MESSAGES) for name in ("messages", "tools", "chosen_messages", "rejected_messages")}
    if kind == DPO:
        fields |= {name: draw(st.lists(token_ids, min_size=1, max_size=4)) for name in ("chosen", "rejected")}
    else:
        fields["action_mask"] = draw(st.lists(st.booleans(), min_size=response, max_size=response))
        for name in ("logprobs", "advantages", "returns", "token_level_reward", "teacher_logprobs"):
            if draw(st.booleans()):
                values = draw(st.lists(FLOAT, min_size=response, max_size=response))
                fields[name] = torch.tensor(values, dtype=draw(DTYPE))
        starts = sorted(draw(st.sets(st.integers(1, 3).filter(lambda start: start < response))))
        fields["versions"] = draw(st.none() | st.just([(start, draw(SMALL), draw(SMALL)) for start in [0, *starts]]))
    if draw(st.booleans()):
        shape = (length - 1, draw(st.integers(1, 2)), 2)
        fields["routed_experts"] = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(
            torch.uint8
        )
    return Experience(**fields)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(experiences(), max_size=5), st.sampled_from(["none", "zstd"]))
def test_round_trip_gives_equal_experiences(given_, compression):
    body = encode(given_)
    assert decode(encode(given_, compression)) == given_
    back = decode(body)
    assert back == given_
    assert [item.experience_type for item in back] == [item.experience_type for item in given_]
    assert encode(back) == body


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.lists(experiences(), max_size=6), st.data())
def test_choosing_and_joining_columns_is_choosing_and_joining_experiences(given_, data):
    numbers = data.draw(st.lists(st.integers(0, len(given_) - 1), max_size=8)) if given_ else []
    wanted = [given_[number] for number in numbers]
    batch = ExperienceBatch.decode(encode(given_))
    assert batch.select(numbers).to_list() == wanted
    joined = ExperienceBatch.concat([batch.select(numbers), batch, ExperienceBatch.of(wanted)])
    assert joined.to_list() == wanted + given_ + wanted
    assert decode(joined.encode()) == wanted + given_ + wanted
