"""Control-plane bodies: round trips, JSON on the way in, and what does not decode."""

from __future__ import annotations

from typing import Any, ClassVar

import msgpack
import pytest

from trinity_mq.messages import (
    AgentStatus,
    DecodeError,
    EngineStatus,
    ExplorerStatus,
    Heartbeat,
    Mark,
    Message,
    OperatorStatus,
    RunnerStatus,
    SchedulerStatus,
    TaskBody,
    TaskSlice,
    TrainerStatus,
    codec,
    decode,
    decode_any,
    encode,
)
from trinity_mq.messages.msgpack_scan import MAX_NESTING
from trinity_mq.messages.status import STATUS_BY_ROLE

SLICE = TaskSlice(batch="3/held", ticket="t", task_id=1, task=TaskBody(workflow="w"), pinned=(1, 2), seed=2**62)


def test_unknown_fields_are_ignored_so_that_a_newer_writer_can_be_read() -> None:
    body = msgpack.packb({"kind": "mark", "version_number": 1, "nonce": "n", "colour": "red"})
    assert decode_any(body) == Mark(nonce="n")


def nested(levels: int) -> bytes:
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return msgpack.packb({"kind": "task_submission", "task": {"raw_task": value}})


@pytest.mark.parametrize(
    ("body", "content_type", "part"),
    [
        (b"", None, "0 bytes is not msgpack"),
        (b"\xc1", None, "is not msgpack"),
        (b"\xdf\xff\xff\xff\xff", None, "is not msgpack"),
        (b"{", "application/json", "is not JSON"),
        (b"[" * 100_000, "application/json", "is not JSON"),
        (b"\xff\xfe", "application/json", "is not JSON"),
        (msgpack.packb([1, 2]), None, "is a list"),
        (msgpack.packb({"kind": "nothing"}), None, "unknown kind 'nothing'"),
        (msgpack.packb({"kind": ["mark"]}), None, "unknown kind"),
        (msgpack.packb({"kind": "mark", "version_number": 9}), None, "version 9"),
        (msgpack.packb({"kind": "mark"}), None, "mark: field nonce"),
        (msgpack.packb({"kind": "mark", "nonce": 7}), None, "got 7"),
        (nested(200), None, "nested deeper"),
    ],
)
def test_what_does_not_decode_says_why(body: bytes, content_type: str | None, part: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_any(body, content_type)
    assert part in str(caught.value)


def test_every_truncation_is_a_decode_error() -> None:
    body = encode(SLICE)
    for length in range(len(body)):
        with pytest.raises(DecodeError):
            decode_any(body[:length])


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1, 500, 2000])
def test_the_nesting_of_a_body_with_many_numbers_is_bounded(depth: int) -> None:
    deep = b"\x91" * (depth - 1) + b"\x90"
    numbers = b"\xdd" + (200).to_bytes(4, "big") + b"\xcd\x90\x90" * 200  # they look like lists
    body = b"\x83\xa4kind\xa4mark\xa5nonce" + deep + b"\xa1n" + numbers
    match = "nested deeper" if depth >= MAX_NESTING else "nonce"
    with pytest.raises(DecodeError, match=match):
        decode(body, Mark)


COMMON = {"id": "a-0", "seq": 1, "incarnation": "x", "lease": 10.0, "state": "working"}


def received(role: str, detail: Any) -> Heartbeat:
    return decode(msgpack.packb({**COMMON, "role": role, "detail": detail}), Heartbeat)


def sent(heartbeat: Heartbeat) -> dict[str, Any]:
    return msgpack.unpackb(encode(heartbeat))["detail"]


@pytest.mark.parametrize(
    ("role", "detail"),
    [
        ("explorer", ExplorerStatus(open=["t"], wants=3, counters={"progress": 2, "committed_progress": 1})),
        ("scheduler", SchedulerStatus(open=["t"])),
        ("runner", RunnerStatus(running=1, slices=[("t", 0, 4, 1.5)], done=0)),
        ("operator", OperatorStatus(ticket="t")),
        ("trainer", TrainerStatus(committed=(1, 2), sync={"members": {"e": {"version": [1, 2], "given": [1, 1]}}})),
        ("engine", EngineStatus(id="e", url="u", name="m", role="rollout", version=None)),
        ("supervisor", AgentStatus()),
    ],
)
def test_a_status_comes_back_as_its_roles_class(role: str, detail: Any) -> None:
    heartbeat = Heartbeat(role=role, detail=detail, **COMMON)  # type: ignore[arg-type]
    again = decode(encode(heartbeat), Heartbeat)
    assert again == heartbeat
    assert type(again.detail) is type(detail) is STATUS_BY_ROLE[heartbeat.role]


@pytest.mark.parametrize("role", STATUS_BY_ROLE)
def test_older_agents_lack_keys_and_newer_ones_have_more(role: Any) -> None:
    assert received(role, {}).detail == STATUS_BY_ROLE[role]()
    assert Heartbeat(role=role, **COMMON).detail == STATUS_BY_ROLE[role]()
    newer = received(role, {"of_tomorrow": {"a": [1]}})
    assert sent(newer) == {"of_tomorrow": {"a": [1]}}


@pytest.mark.parametrize(
    ("role", "detail", "reason"),
    [
        ("trainer", {"progress": "many"}, "field detail: .*progress: .*valid integer"),
        ("trainer", {"committed": 3}, "field detail: .*committed: .*valid tuple"),
        ("trainer", {"sync": {"members": {"e": 1}}}, r"field detail: .*sync\.members\.e: "),
        ("runner", {"slices": [["t", 0]]}, r"field detail: .*slices\.0"),
        ("engine", {"load": "high"}, "field detail: .*load: .*valid integer"),
        ("engine", 5, "field detail: .*dictionary"),
        ("explorer", None, "field detail: .*dictionary"),
    ],
)
def test_a_key_of_the_wrong_type_is_named(role: str, detail: Any, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        received(role, detail)


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


@pytest.fixture
def parcel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.CATALOGUE, ("parcel", 3), Parcel)
    monkeypatch.setitem(codec.UPGRADES, ("parcel", 1), to_grams)
    monkeypatch.setitem(codec.UPGRADES, ("parcel", 2), to_many)


@pytest.mark.usefixtures("parcel")
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


@pytest.mark.usefixtures("parcel")
@pytest.mark.parametrize("version", [4, 0, -1, 1.0, "1", True, None, [1]])
def test_other_versions_are_refused(version: object) -> None:
    body = msgpack.packb({"kind": "parcel", "version_number": version, "grams": 1, "to": []})
    for read in (decode_any, lambda data: decode(data, Parcel)):
        with pytest.raises(DecodeError, match=r"parcel of version .*, this release reads 1 to 3"):
            read(body)


@pytest.mark.usefixtures("parcel")
@pytest.mark.parametrize("fields", [{"to": "ann"}, {"kilograms": None, "to": "ann"}, {"kilograms": {}, "to": "x"}])
def test_what_an_upgrade_cannot_use_is_a_decode_error(fields: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match="parcel of version 1 cannot be upgraded from 1"):
        decode(msgpack.packb({"kind": "parcel", **fields}), Parcel)


def test_each_old_version_in_the_catalogue_has_its_upgrade() -> None:
    wanted = {(kind, old) for kind, newest in codec.CATALOGUE for old in range(1, newest)}
    assert set(codec.UPGRADES) == wanted
    assert len({kind for kind, _ in codec.CATALOGUE}) == len(codec.CATALOGUE)
