"""Parts that several attempts share: how they are told apart, and who leaves what in them."""

from __future__ import annotations

import pytest

from tests.unit.agents.world import a_slice, experience
from trinity_mq.bus import Envelope, Incoming
from trinity_mq.experience import DecodeError, Experience
from trinity_mq.messages.batches import Accepted, BatchClosed, Wanted
from trinity_mq.transport.co_batched_parts import AttemptRows, PartMember, attempt_rows_of
from trinity_mq.transport.experience_parts import ReceivedPart, decode_parts, requested_parts, shared_part_message


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


def test_the_manifest_takes_and_drops_members_like_parts_of_their_own_in_its_order() -> None:
    shared = received(shared_part_message(MEMBERS, body_of(*MEMBERS)))
    alone = received(
        Envelope(body=body_of(member("d", 9)), kind="experience_part", headers={"attempt": "d", "part": 0, "parts": 1})
    )
    parts = parts_of(shared, alone)
    wanted = [parts["c", 0], parts["d", 0], parts["a", 0]]
    experiences, bad = decode_parts(wanted, None)
    assert [each.eid.run for each in experiences] == [6, 7, 8, 9, 0, 1]
    assert bad == []


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
