"""Every experience body ever written decodes, for ever, to what its JSON form says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.golden.forms import EXPERIENCES, batch_form, experience_form, json_text
from trinity_mq.experience import DecodeError, ExperienceBatch, decode, encode
from trinity_mq.experience.codec.tail import DTYPES
from trinity_mq.experience.record import FIELD_NAMES

BODIES = sorted(EXPERIENCES.glob("*.tmqx"))


def comparable(value: Any) -> str:
    """Return text in which 1, 1.0 and true differ, and 0.0 and -0.0."""
    return json_text(json.loads(json.dumps(value, sort_keys=True)))


def shown_in(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_decodes_to_its_json_form_whole_and_one_at_a_time(path: Path) -> None:
    shown, body = shown_in(path), path.read_bytes()
    experiences, batch = decode(body), ExperienceBatch.decode(body)
    assert comparable(batch_form(experiences)) == comparable(shown)
    assert comparable(batch_form(decode(encode(experiences)))) == comparable(shown)
    assert comparable([experience_form(batch[at]) for at in range(len(batch))]) == comparable(shown["experiences"])


def test_the_compressed_one_holds_what_the_mixed_one_does() -> None:
    bodies = {path.stem: path.read_bytes() for path in BODIES}
    assert [name for name, body in bodies.items() if body[5]] == ["v1.zstd"]
    assert bodies["v1.zstd"][24:28] == bytes.fromhex("28b52ffd")
    assert batch_form(decode(bodies["v1.zstd"])) == batch_form(decode(bodies["v1.mixed"]))


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_any_flipped_bit_is_found(path: Path) -> None:
    body = path.read_bytes()
    for position in range(0, len(body), max(1, len(body) // 50)):
        damaged = bytearray(body)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DecodeError):
            decode(bytes(damaged))


def test_every_form_of_column_and_entry_is_in_a_golden() -> None:
    columns, entries, dtypes = set(), set(), set()
    for body in (path.read_bytes() for path in BODIES):
        if body[5]:  # compressed
            continue
        (length,) = struct.unpack_from("<I", body, 12)
        head = msgpack.unpackb(body[24 : 24 + length])
        columns |= {"+".join(sorted(column)) for column in head["columns"].values()}
        entries |= {"+".join(sorted(entry)) for entry in head["tensors"].values()}
        tail = len(body) - struct.unpack_from("<Q", body, 16)[0]
        (length,) = struct.unpack_from("<Q", body, tail)
        dtypes |= {entry["dtype"] for entry in json.loads(body[tail + 8 : tail + 8 + length]).values()}
    assert columns == {"c", "i", "i+n", "f", "f+n", "l+s", "k+l+s", "d+l", "i+l"}
    assert entries == {"field+lengths", "field+key+lengths", "field+key+lengths+scalar", "field+lengths+scalar"}
    assert dtypes == set(DTYPES)


def test_all_types_and_fields_are_in_a_golden() -> None:
    experiences = [experience for path in BODIES for experience in shown_in(path)["experiences"]]
    assert {item["experience_type"] for item in experiences} == {"single_turn", "multi_turn", "dpo"}
    given = {name for item in experiences for name in (*item, *item["tensors"])} - {"tensors"}
    assert given == set(FIELD_NAMES)
