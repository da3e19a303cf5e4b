"""Bodies of older versions are upgraded step by step; what is newer or cannot be upgraded says so."""

from __future__ import annotations

from typing import Any, ClassVar

import msgpack
import pytest

from trinity_mq.messages import DecodeError, Message, codec, decode, decode_any


class Parcel(Message):
    """A made-up body that has seen two changes."""

    kind: ClassVar[str] = "parcel"
    version_number: ClassVar[int] = 3

    grams: int
    to: list[str]
    note: str = ""


def to_grams(fields: dict[str, Any]) -> dict[str, Any]:
    """1 to 2: kilograms became grams."""
    return {**fields, "grams": fields["kilograms"] * 1000}


def to_many(fields: dict[str, Any]) -> dict[str, Any]:
    """2 to 3: one addressee became a list."""
    return {**fields, "to": [fields["to"]]}


@pytest.fixture(autouse=True)
def parcel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "CATALOGUE", {**codec.CATALOGUE, ("parcel", 3): Parcel})
    monkeypatch.setitem(codec.UPGRADES, ("parcel", 1), to_grams)
    monkeypatch.setitem(codec.UPGRADES, ("parcel", 2), to_many)


@pytest.mark.parametrize(
    "fields",
    [
        {"kilograms": 2, "to": "ann"},
        {"version_number": 1, "kilograms": 2, "to": "ann"},
        {"version_number": 2, "grams": 2000, "to": "ann"},
        {"version_number": 3, "grams": 2000, "to": ["ann"]},
    ],
)
def test_every_version_becomes_the_newest(fields: dict[str, Any]) -> None:
    body = msgpack.packb({"kind": "parcel", **fields})
    assert decode_any(body) == decode(body, Parcel) == Parcel(grams=2000, to=["ann"])


@pytest.mark.parametrize("version", [4, 0, -1, 1.0, "1", True, None, [1]])
def test_other_versions_are_refused(version: object) -> None:
    body = msgpack.packb({"kind": "parcel", "version_number": version, "grams": 1, "to": []})
    for read in (decode_any, lambda data: decode(data, Parcel)):
        with pytest.raises(DecodeError, match=r"parcel of version .*, this release reads 1 to 3"):
            read(body)


@pytest.mark.parametrize("fields", [{"to": "ann"}, {"kilograms": None, "to": "ann"}, {"kilograms": {}, "to": "x"}])
def test_what_an_upgrade_cannot_use_is_a_decode_error(fields: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match="parcel of version 1 cannot be upgraded from 1"):
        decode(msgpack.packb({"kind": "parcel", **fields}), Parcel)


def test_each_old_version_in_the_catalogue_has_its_upgrade() -> None:
    wanted = {(kind, old) for kind, newest in codec.CATALOGUE for old in range(1, newest)}
    assert set(codec.UPGRADES) == wanted
    assert len({kind for kind, _ in codec.CATALOGUE}) == len(codec.CATALOGUE)
