"""Control-plane bodies: round trips, JSON on the way in, and what does not decode."""

from __future__ import annotations

import msgpack
import pytest

from trinity_mq.messages import (
    BatchClosed,
    DecodeError,
    Heartbeat,
    Mark,
    Message,
    Progress,
    SampledChoice,
    SessionCall,
    SyncEvent,
    TaskBody,
    TaskResult,
    TaskSlice,
    TaskSubmission,
    decode,
    decode_any,
    encode,
)
from trinity_mq.messages.batches import Accepted
from trinity_mq.messages.msgpack_scan import MAX_NESTING

MESSAGES: list[Message] = [
    TaskSubmission(task=TaskBody(raw_task={"question": "1+1", "answer": "2"}), submission_id="s"),
    TaskSlice(batch="3/held", ticket="t", task_id=1, task=TaskBody(workflow="w"), pinned=(1, 2), seed=2**62),
    TaskResult(
        batch=3,
        ticket="t",
        task_id=1,
        attempt="a",
        outcome="partial",
        runs=[0, 2],
        metrics=[{"a": 1.0}],
        version_min=(1, 0),
    ),
    BatchClosed(batch=3, ticket="t", accepted=[Accepted(task_id=0, run_base=0, attempt="a", runs=[0], parts=1)]),
    Progress(progress=1, generation=1, step=1, batch=1, ticket="t", outcome="trained"),
    SyncEvent(verb="prepare", sender="t", version=(1, 0), manifest=[("w", "float32", [2, 3])]),
    Heartbeat(role="runner", id="r", seq=1, incarnation="i", lease=10.0, state="idle"),
    Mark(nonce="n"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_round_trip(message: Message) -> None:
    assert decode_any(encode(message)) == message
    assert decode(encode(message), type(message)) == message


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
    body = encode(MESSAGES[1])
    for length in range(len(body)):
        with pytest.raises(DecodeError):
            decode_any(body[:length])


def test_a_body_with_thousands_of_tokens_is_not_walked_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway reads gigabytes of them when it starts."""
    tokens = list(range(100_000, 105_000))
    choice = SampledChoice(ids=tokens, logprobs=[-0.5] * len(tokens))
    call = SessionCall(session="s", call="c", at=1.0, prompt=tokens, choices=[choice])

    def walk(document: bytes) -> int:
        raise AssertionError(f"{len(document)} bytes were walked byte by byte")

    monkeypatch.setattr("trinity_mq.messages.codec.scan", walk)
    assert decode(encode(call), SessionCall) == call


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1, 500, 2000])
def test_the_nesting_of_a_body_with_many_numbers_is_bounded(depth: int) -> None:
    deep = b"\x91" * (depth - 1) + b"\x90"
    numbers = b"\xdd" + (200).to_bytes(4, "big") + b"\xcd\x90\x90" * 200  # they look like lists
    body = b"\x83\xa4kind\xa4mark\xa5nonce" + deep + b"\xa1n" + numbers
    match = "nested deeper" if depth >= MAX_NESTING else "nonce"
    with pytest.raises(DecodeError, match=match):
        decode(body, Mark)
