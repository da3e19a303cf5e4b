import json
import math
import struct
import tracemalloc
from enum import StrEnum

import msgpack
import numpy as np
import pytest
import torch
from crc32c import crc32c
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
from trinity_mq.messages.msgpack_scan import MAX_NESTING, container_bytes, measure, scan


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

            def __str__(self) -> str:  # as of an enum of (str, Enum)
                return "Colour.RED"

        info = {
            "np": {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "s": np.str_("x"), "c": Colour.RED},
            "tensor": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
            "array": np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::-1],
            "none": np.array([], dtype="bool"),
            "tuple": (1, 2),
            Colour.RED: {Colour.RED: []},
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
        assert back.info["red"] == {"red": []}

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
        vars(wrong)[field] = value
        with pytest.raises(EncodeError, match=named):
            encode([single, wrong])

    def test_other_objects_and_too_many_at_once(self, multi):
        with pytest.raises(EncodeError, match="wanted Experience"):
            encode([{"tokens": [1]}])
        with pytest.raises(EncodeError, match=r"65537 experiences.*send several"):
            encode([multi] * 65537)


class TestLayout:
    def test_same_texts_are_stored_once(self):
        given = [Experience(tokens=[1, 2], prompt_text="p" * 10_000, response_text=str(i % 3)) for i in range(50)]
        assert len(encode(given)) < 13_000

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


def sealed(head, tail, version=1, flags=0):
    """Return a body with a right checksum around whatever head (packed or not) and tail."""
    head = head if isinstance(head, bytes) else msgpack.packb(head)
    rest = struct.pack("<IQ", len(head), len(tail)) + head + bytes(-len(head) % 8) + tail
    return struct.pack("<4sBBHI", b"TMQX", version, flags, 0, crc32c(rest)) + rest


def opened(body):
    head_length, _ = struct.unpack_from("<IQ", body, 12)
    return msgpack.unpackb(body[24 : 24 + head_length]), body[24 + head_length + (-head_length % 8) :]


def blob(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def ints(*values):
    return np.array(values, dtype="<i4").tobytes()


@pytest.fixture
def small():
    given = [
        Experience(
            tokens=[1, 2, 3, 4],
            prompt_length=2,
            logprobs=[-1.0, -2.0],
            reward=float(i),
            prompt_text=f"text {i % 2}",
            info={"a": [1, {"b": None}], "t": torch.ones(2)},
            metrics={"m": 0.5},
            versions=[(0, 1, i)],
        )
        for i in range(3)
    ]
    return encode(given)


@pytest.fixture
def taken_apart(small):
    return opened(small)


def test_every_truncation_is_refused(small):
    for end in range(len(small)):
        with pytest.raises(DecodeError):
            decode(small[:end])


def test_every_flipped_bit_is_refused(small):
    body = bytearray(small)
    for position in range(len(body)):
        bit = 1 << position % 8
        body[position] ^= bit
        with pytest.raises(DecodeError):
            decode(body)
        body[position] ^= bit


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "0 bytes"),
        (b"TRXP" + bytes(40), "TRXP"),
        (b"\x80\x04" + bytes(40), "not an experience body"),
        (sealed({}, b"", version=9), "version 9"),
        (sealed({}, b"", flags=1), "zstd"),
        (sealed({}, b"", flags=4), "flags"),
        (sealed({}, b"") + b"x", "followed by something else"),
        (sealed(b"\xc1", blob({})), "head"),
        (sealed([], blob({})), "head"),
        (sealed(b"\x91\x01", blob({})), "head"),
        (sealed({"n": -1, "columns": {}, "tensors": {}}, blob({})), "claims -1"),
        (sealed({"n": 1 << 40, "columns": {}, "tensors": {}}, blob({})), "claims"),
        (sealed({"n": 60000, "columns": {"prompt_length": {"c": 1}}, "tensors": {}}, blob({})), "no tokens"),
        (sealed(b"\x82\xa1n\x01\xa1n\x01", blob({})), "repeated"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, b""), "safetensors"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, blob({}) + bytes(8)), "belong to no tensor"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, blob(b"[" * 100_000)), "JSON"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, blob(b'{"a":1,"a":1}')), "repeated"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, blob(b"\xff\xfe\xfd")), "JSON"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, struct.pack("<Q", 1 << 62)), "header"),
    ],
)
def test_wrong_frames_are_refused_with_a_reason(body, said):
    with pytest.raises(DecodeError, match=said):
        decode(body)


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        ({"dtype": "I32", "shape": [2], "data_offsets": [0, 4]}, 8),
        ({"dtype": "I32", "shape": [2], "data_offsets": [0, 16]}, 8),
        ({"dtype": "I32", "shape": [2], "data_offsets": [4, 12]}, 12),
        ({"dtype": "I32", "shape": [-2], "data_offsets": [0, 8]}, 8),
        ({"dtype": "I32", "shape": [True], "data_offsets": [0, 4]}, 4),
        ({"dtype": "I32", "shape": [1 << 61, 4], "data_offsets": [0, 8]}, 8),
        ({"dtype": "I32", "shape": [0, 1 << 61], "data_offsets": [0, 0]}, 0),
        ({"dtype": "I32", "shape": [1] * 40, "data_offsets": [0, 4]}, 4),
        ({"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}, 8),
        ({"dtype": ["I32"], "shape": [2], "data_offsets": [0, 8]}, 8),
        ({"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}, b"\x02"),
        ({"dtype": "I32", "shape": [2]}, 8),
        ([], 8),
    ],
)
def test_wrong_tensor_entries_are_refused(entry, data):
    data = data if isinstance(data, bytes) else bytes(data)
    head = {"n": 1, "columns": {}, "tensors": {"tokens": {"field": "tokens", "lengths": ints(2)}}}
    with pytest.raises(DecodeError, match="tail: entry 'tokens'"):
        decode(sealed(head, blob({"tokens": entry}, data)))


def changed(head, *path, to):
    place = head
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("tensors", "tokens", "lengths"), ints(4, 4), "lengths of tokens"),
        (("tensors", "tokens", "lengths"), ints(4, 4, 5), "lengths of tokens"),
        (("tensors", "tokens", "lengths"), ints(6, 8, -2), "lengths of tokens"),
        (("tensors", "tokens", "lengths"), ints(6, 6, -1), "tokens"),
        (("tensors", "tokens", "lengths"), b"abc", "lengths of tokens"),
        (("tensors", "tokens", "field"), "logprobs", "wanted 1 dimensions"),
        (("tensors", "tokens", "field"), "of a later release", "no tokens for"),
        (("tensors", "tokens", "field"), "multi_modal_inputs", "with a key"),
        (("tensors", "tokens", "scalar"), True, "wanted 1 dimensions"),
        (("tensors", "tokens"), 5, "entry 'tokens'"),
        (("tensors", "other"), {"field": "tokens", "lengths": b""}, "different tensors"),
        (("tensors", "logprobs", "lengths"), ints(1, 3, 2), "logprobs has 1 values"),
        (("tensors", "documents", "lengths"), ints(2, 4), "a document refers to tensor 2"),
        (("tensors", "documents", "lengths"), ints(2, 4, -1), "tensor of the documents is missing"),
        (("columns", "prompt_length"), {"c": 0}, "prompt_length is 0"),
        (("columns", "prompt_length"), {"c": "2"}, "prompt_length"),
        (("columns", "prompt_length"), {}, "prompt_length"),
        (("columns", "prompt_length"), 2, "prompt_length"),
        (("columns", "experience_type"), {"c": "sft"}, "experience_type"),
        (("columns", "experience_type"), {"c": "dpo"}, "prompt_length is 2, wanted len"),
        (("columns", "truncate_status"), {"c": "cut"}, "truncate_status"),
        (("columns", "temperature"), {"f": struct.pack("<3d", 1, -1, 1)}, "temperature"),
        (("columns", "reward"), {"f": bytes(8)}, "reward: 1 values, wanted 3"),
        (("columns", "reward"), {"f": bytes(24), "n": bytes(2)}, "reward: 2 values, wanted 3"),
        (("columns", "prompt_text"), {"s": b"\xff\xfe\xfd", "l": ints(1, 1, 1)}, "UTF-8"),
        (("columns", "prompt_text"), {"s": b"abc", "l": ints(1, 1, 2)}, "add up"),
        (("columns", "prompt_text"), {"s": b"abc", "l": ints(3), "k": ints(0, 1, 0)}, "beyond"),
        (("columns", "prompt_text"), {"s": b"abc", "l": ints(3), "k": ints(0, -2, 0)}, "beyond"),
        (("columns", "prompt_text"), {"s": b"abc", "l": ints(2**31 - 1, 2**31 - 1, 5)}, "add up"),
        (("columns", "info"), {"d": b"\x01\x01\x01", "l": ints(1, 1, 1)}, "info is 1, wanted a dict"),
        (("columns", "info"), {"d": b"\x81\x01\x01", "l": ints(3, -1, -1)}, "info"),
        (("columns", "info"), {"d": b"\x80\x80", "l": ints(2, -1, -1)}, "info"),
        (("columns", "info"), {"d": b"\xd6\x01\xff\xff\xff\xff", "l": ints(6, -1, -1)}, "refers to tensor"),
        (("columns", "info"), {"d": b"\xd4\x05\x00", "l": ints(3, -1, -1)}, "extension 5"),
        (("columns", "custom_fields"), {"d": b"\x91\x93\xa1a\xa1b\xa4load", "l": ints(11, -1, -1)}, "load"),
        (("columns", "custom_fields"), {"d": b"\x91\x01", "l": ints(2, -1, -1)}, "custom_fields"),
        (("columns", "versions"), {"i": bytes(24), "l": ints(1, 1, 1)}, "versions"),
        (("columns", "versions"), {"i": struct.pack("<3q", 1, 1, 1), "l": ints(1, -1, -1)}, "versions"),
        (("columns", "eid.suffix"), {"s": b"", "l": ints(), "k": ints(-1, -1, -1)}, "eid"),
        (("columns", "eid.batch"), {"d": b"\xc3\xc3\xc3", "l": ints(1, 1, 1)}, "eid.batch holds True"),
        (("columns", "eid.batch"), {"c": 1.5}, "eid.batch"),
    ],
)
def test_wrong_heads_are_refused_with_a_reason(taken_apart, path, value, said):
    head, tail = taken_apart
    assert len(decode(sealed(head, tail))) == 3
    changed(head, *path, to=value)
    with pytest.raises(DecodeError, match=said):
        decode(sealed(head, tail))


def test_missing_id_is_refused(taken_apart):
    head, tail = taken_apart
    del head["columns"]["eid.task"]
    with pytest.raises(DecodeError, match="eid"):
        decode(sealed(head, tail))


def documents(*each):
    return {"d": b"".join(each), "l": ints(*map(len, each), *[-1] * (3 - len(each)))}


@pytest.mark.parametrize(
    "document",
    [
        b"\x91" * MAX_NESTING + b"\x01",
        b"\x91" * 1_000_000,
        b"\xdd\x00\x0f\xff\xff" * 200_000,
        b"\xdd\xff\xff\xff\xff" * 1000,
        b"\xdf\xff\xff\xff\xff" * 1000,
        b"\xdd\x00\x10\x00\x00" * 60 + bytes(300),
        b"\x81\xa1a" * 300_000 + b"\x01",
        b"\xdd\x00\x04\x10\x00" + b"\x90" * 0x41000,
        b"\xc6\xff\xff\xff\xff" + bytes(100),
    ],
    ids=[
        "deep",
        "deeper",
        "claims",
        "huge claims",
        "huge maps",
        "nested claims",
        "deep maps",
        "many lists",
        "long bytes",
    ],
)
def test_bombs_cost_little(taken_apart, document):
    head, tail = taken_apart
    assert len(decode(sealed(head | {"columns": head["columns"] | {"info": documents(b"\x81\xa1a\x01")}}, tail))) == 3
    head["columns"]["info"] = documents(b"\x81\xa1a" + document)
    body = sealed(head, tail)
    tracemalloc.start()
    with pytest.raises(DecodeError, match="info"):
        decode(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * len(body) + 2_000_000


def test_repeated_references_share_one_text(taken_apart):
    head, tail = taken_apart
    head["columns"]["prompt_text"] = {"s": b"x" * 1_000_000, "l": ints(1_000_000), "k": ints(0, 0, 0)}
    texts = [item.prompt_text for item in decode(sealed(head, tail))]
    assert texts[0] is texts[1] is texts[2]


class TestScan:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            [1, -1, 200, -200, 70_000, -70_000, 2**40, -(2**40), 0.5, True, "a" * 40, "b" * 300, "c" * 70_000],
            {"k": [b"x", b"y" * 300, b"z" * 70_000, {"m": {}}], "e": [[]] * 20, "l": list(range(70_000))},
            {str(i): i for i in range(20)},
            {str(i): i for i in range(70_000)},
            [msgpack.ExtType(5, b"x" * n) for n in (1, 2, 3, 4, 8, 16, 17, 300, 70_000)],
        ],
    )
    def test_counts_every_form_of_container(self, value):
        def count(item):
            if isinstance(item, dict):
                return 1 + sum(map(count, item.values()))
            return 1 + sum(map(count, item)) if isinstance(item, list) else 0

        packed = msgpack.packb(value)
        assert scan(packed) == count(value)
        assert scan(msgpack.packb(value, use_single_float=True)) == count(value)
        assert measure(packed) >= count(value)
