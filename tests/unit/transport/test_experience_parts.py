"""Experiences cut into bodies that fit, and the one that fits nowhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.agents.world import a_slice, experience
from trinity_agents.runner.result_publisher import BatchedPublish
from trinity_mq.bus import Envelope, Incoming, MessageTooLarge
from trinity_mq.experience import DecodeError, Experience, encode
from trinity_mq.messages import BatchClosed
from trinity_mq.messages.batches import Accepted, Wanted
from trinity_mq.transport.blobs import BlobStore
from trinity_mq.transport.experience_parts import (
    AttemptRows,
    PartMember,
    ReceivedPart,
    attempt_rows_of,
    decode_parts,
    requested_parts,
    shared_part_message,
    split_to_size,
)

LIMIT = 64 * 1024


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(f"file://{tmp_path}", "r", 1 << 20)


def runs(bodies: list[bytes]) -> list[int]:
    return [one.eid.run for body in bodies for one in Experience.deserialize_many(body)]


def test_they_are_cut_until_each_body_fits(store: BlobStore) -> None:
    many = [experience(run=run, length=3000) for run in range(16)]
    for given in (None, store):
        bodies = split_to_size(many, LIMIT, store=given)
        assert max(map(len, bodies)) <= LIMIT
        assert 4 <= len(bodies) <= 16
        assert runs(bodies) == list(range(16))
    assert split_to_size([], LIMIT) == []


def test_without_a_store_the_error_names_the_setting_and_the_experience() -> None:
    with pytest.raises(MessageTooLarge, match=r"1/0/7.*broker\.blob_store"):
        split_to_size([experience(run=0), experience(run=7, length=100_000)], LIMIT)


def test_what_no_reader_would_take_is_refused(store: BlobStore) -> None:
    with pytest.raises(MessageTooLarge, match=r"over broker\.max_batch_bytes 1048576"):
        split_to_size([experience(length=200_000)], LIMIT, store=store)


def test_compression_comes_before_the_limit(store: BlobStore) -> None:
    one = [experience(length=12_000)]
    assert len(encode(one)) > LIMIT
    (body,) = split_to_size(one, LIMIT, compression="zstd")
    assert len(body) <= LIMIT
    assert runs([body]) == [0]


def member(attempt: str, *runs: int, task: int = 0, oldest: tuple[int, int] | None = (1, 3)) -> PartMember:
    return PartMember(a_slice(task=task), attempt, [experience(task, run) for run in runs], 100, oldest)


def body_of(*members: PartMember) -> bytes:
    return Experience.serialize_many([each for one in members for each in one.experiences])


def received(mail: Envelope) -> Incoming:
    headers = {**mail.headers, "kind": mail.kind}
    return Incoming(
        body=mail.body, exchange="e", routing_key="k", queue="q", headers=headers, content_type=mail.content_type
    )


def parts_of(*incoming: Incoming) -> dict[tuple[str, int], ReceivedPart]:
    return {share.key: ReceivedPart(each, share) for each in incoming for share in attempt_rows_of(each)}


MEMBERS = (member("a", 0, 1), member("b", 4, oldest=(1, 2)), member("c", 6, 7, 8, oldest=None))


def test_a_shared_part_says_whose_experiences_it_holds_and_how_old_they_are() -> None:
    mail = shared_part_message(MEMBERS, body_of(*MEMBERS))
    assert mail.headers == {
        "version": 1,
        "batch": 1,
        "ticket": "t1",
        "attempts": "a:2,b:1,c:3",
        "policy_version": "1.2",
    }
    assert mail.kind == "experience_part"
    assert mail.message_id == "a-0+2"
    assert "policy_version" not in shared_part_message(MEMBERS[2:], b"").headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"attempt": "a"},
        {"attempt": 1, "part": 0},
        {"attempts": 7},
        {"attempts": ""},
        {"attempts": "a"},
        {"attempts": "a:"},
        {"attempts": ":3"},
        {"attempts": "a:-1"},
        {"attempts": "a:1,"},
        {"attempts": "a:1,a:2"},
        {"attempts": "a:²"},
        {"attempts": "a:10000000000"},
    ],
)
def test_headers_that_do_not_say_whose_they_are_are_refused(headers: dict[str, object]) -> None:
    with pytest.raises(DecodeError, match="attempt"):
        attempt_rows_of(Incoming(body=b"", exchange="", routing_key="", queue="q", headers=headers))


def test_an_attempt_may_have_none_and_its_name_may_hold_a_colon() -> None:
    incoming = Incoming(body=b"", exchange="", routing_key="", queue="q", headers={"attempts": "a:b:0,c:2"})
    assert attempt_rows_of(incoming) == [AttemptRows(("a:b", 0), slice(0, 0), 2), AttemptRows(("c", 0), slice(0, 2), 2)]


def test_one_that_holds_more_than_it_lists_is_unusable_as_a_whole_and_once() -> None:
    shared = received(shared_part_message(MEMBERS[:2], body_of(*MEMBERS)))
    experiences, bad = decode_parts(parts_of(shared).values(), None)
    assert len(experiences) == 0
    assert [(one is shared, reason) for one, reason in bad] == [
        (True, "does not decode: header attempts lists 3 experiences, the body holds 6")
    ]


def test_submitters_get_their_own_share_and_no_more() -> None:
    shared = received(shared_part_message(MEMBERS, body_of(*MEMBERS)))
    manifest = BatchClosed(
        batch=1,
        ticket="t1",
        accepted=[
            Accepted(task_id=task, run_base=0, attempt=name, runs=[0], parts=1) for task, name in enumerate("abc")
        ],
        wanted=[Wanted(task_id=1, reply_to="me", correlation_id="c")],
    )
    ((reply_to, mail),) = requested_parts(manifest, parts_of(shared))
    assert (reply_to, mail.headers["attempt"], mail.headers["part"], mail.headers["parts"]) == ("me", "b", 0, 1)
    assert [each.eid.run for each in Experience.deserialize_many(mail.body)] == [4]
    damaged = received(shared_part_message(MEMBERS, b"no experiences"))
    assert list(requested_parts(manifest, parts_of(damaged))) == []


def test_a_part_that_does_not_decode_leaves_the_others_in_their_places() -> None:
    whole = received(shared_part_message(MEMBERS, body_of(*MEMBERS)))
    others = (member("d", 9), member("e", 10, 11))
    damaged = received(shared_part_message(others, body_of(*others)[:-1]))
    last = received(shared_part_message((member("f", 12),), body_of(member("f", 12))))
    parts = parts_of(whole, damaged, last)

    found, bad = decode_parts([parts[name, 0] for name in ("b", "d", "f", "e", "a")], None)

    assert [each.eid.run for each in found] == [4, 12, 0, 1]
    assert [incoming for incoming, _ in bad] == [damaged]


async def test_a_call_that_fails_fails_for_all_who_were_in_it_and_is_no_error_of_who_left() -> None:
    async def fail(key: str, items: list[str]) -> list[str]:
        raise ValueError(key)

    together: BatchedPublish[str, str, str] = BatchedPublish(fail, max_batch_size=10)
    asked = [asyncio.ensure_future(together.publish("k", item)) for item in "abc"]
    await asyncio.sleep(0)
    asked[1].cancel()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ValueError, asyncio.CancelledError, ValueError]
