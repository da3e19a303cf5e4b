"""A heartbeat's detail is the status of its role, and on the wire the map of the keys that were set."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from trinity_mq.messages import (
    AgentStatus,
    DecodeError,
    EngineStatus,
    ExplorerStatus,
    Heartbeat,
    OperatorStatus,
    RunnerStatus,
    SchedulerStatus,
    TrainerStatus,
    decode,
    encode,
)
from trinity_mq.messages.status import STATUS_BY_ROLE

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
