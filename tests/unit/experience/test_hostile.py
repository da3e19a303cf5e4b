"""Bytes that no encoder made: always a DecodeError, without much memory."""

import json
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
import torch
from crc32c import crc32c

from trinity_mq.experience import DecodeError, Experience, decode, encode
from trinity_mq.messages.msgpack_scan import MAX_NESTING, measure, scan


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
        (sealed(b"\x82\xa1n\x01\xa1n\x01", blob({})), "twice"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, b""), "safetensors"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, blob({}) + bytes(8)), "belong to no tensor"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, blob(b"[" * 100_000)), "JSON"),
        (sealed({"n": 0, "columns": {}, "tensors": {}}, blob(b'{"a":1,"a":1}')), "twice"),
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
