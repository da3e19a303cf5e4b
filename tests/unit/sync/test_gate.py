"""The weight-sync gate as two pure machines: the good case, each way out, random losses, repeats and deaths."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_mq.messages import SyncEvent
from trinity_mq.sync.gate.coordinator import (
    AbandonCollective,
    Committed,
    Coordinator,
    Failed,
    StartCollective,
)
from trinity_mq.sync.gate.member import Member, MemberStage, Rejoin, Resume

KEY = ((1, 1), 1, 1)
PREPARE = SyncEvent(verb="prepare", sender="t", manifest=[("w", "float32", [2])], canary={"tokens": [2, 3]})


def coordinator(*members: str, timeout: float = 10.0) -> Coordinator:
    machine = Coordinator(name="t", timeout=timeout, lease=15.0)
    for name in members:
        machine.join(name, None, 0.0)
    return machine


def from_member(verb: str, machine: Coordinator, sender: str, **more: Any) -> SyncEvent:
    return SyncEvent.model_validate(
        {
            "verb": verb,
            "sender": sender,
            "version": (1, 1),
            "epoch": machine.epoch,
            "attempt": machine.attempt,
            **more,
        }
    )


def sent(commands: list[Any]) -> list[str]:
    return [command.verb for command in commands if isinstance(command, SyncEvent)]


def taking_part(commands: list[Any]) -> list[str]:
    """Return the members that a start asks to take part."""
    (prepare,) = commands
    return list(prepare.members)


def through_go(machine: Coordinator, version: tuple[int, int] = (1, 1)) -> None:
    for name in taking_part(machine.start(version, version[1], PREPARE, 1.0)):
        machine.ready(from_member("ready", machine, name, version=version), 2.0)


def test_commit_needs_everybody_and_our_own_side() -> None:
    machine = coordinator("a", "b")
    assert sent(machine.start((1, 1), 1, PREPARE, 1.0)) == ["prepare"]
    assert machine.ready(from_member("ready", machine, "a"), 1.5) == []
    commands = machine.ready(from_member("ready", machine, "b"), 2.0)
    assert sent(commands) == ["go"]
    assert isinstance(commands[1], StartCollective)
    assert machine.applied(from_member("applied", machine, "a"), None, 2.5) == []
    assert machine.applied(from_member("applied", machine, "b"), None, 2.5) == []
    commands = machine.collective_done(machine.epoch, machine.attempt, 3.0)
    assert sent(commands) == ["commit"]
    assert commands[1] == Committed((1, 1), 1, ("a", "b"))
    assert machine.committed == (1, 1)
    assert machine.stale_members() == ()
    through_go(machine, (1, 2))
    assert machine.epoch == 1, "the group is kept"
    assert machine.collective_done(machine.epoch, machine.attempt, 4.0) == []
    assert machine.applied(from_member("applied", machine, "a", version=(1, 2)), None, 4.0) == []
    assert machine.committed == (1, 1)
    assert sent(machine.applied(from_member("applied", machine, "b", version=(1, 2)), None, 4.5)) == ["commit"]


def test_a_member_that_does_not_answer_costs_the_version_and_is_left_out() -> None:
    machine = coordinator("a", "b")
    machine.start((1, 1), 1, PREPARE, 1.0)
    machine.ready(from_member("ready", machine, "a"), 1.5)
    commands = machine.tick(11.0)
    assert sent(commands) == ["abort"]
    assert isinstance(commands[-1], Failed)
    assert commands[-1].lost == ("b",)
    assert set(machine.members) == {"a"}
    epoch = machine.epoch
    machine.start((1, 1), 1, PREPARE, 12.0)
    assert machine.epoch == epoch + 1, "what failed is never used again"


def test_a_failed_collective_is_abandoned_and_nobody_is_blamed() -> None:
    machine = coordinator("a", "b")
    through_go(machine)
    commands = machine.collective_failed(machine.epoch, machine.attempt, "a peer is gone")
    assert sent(commands) == ["abort"]
    assert any(isinstance(command, AbandonCollective) for command in commands)
    assert set(machine.members) == {"a", "b"}


def test_a_quarantined_member_takes_part_where_nobody_else_is() -> None:
    machine = coordinator("a")
    through_go(machine)
    machine.applied(from_member("applied", machine, "a"), "logprobs differ by 3.0", 3.0)
    through_go(machine)
    machine.collective_done(machine.epoch, machine.attempt, 3.0)
    machine.applied(from_member("applied", machine, "a"), None, 3.0)
    assert machine.committed == (1, 1)
    assert machine.quarantined() == ()


def test_an_ended_lease_is_a_leave() -> None:
    machine = coordinator("a", timeout=100.0)
    machine.start((1, 1), 1, PREPARE, 1.0)
    assert isinstance(machine.tick(15.0)[-1], Failed)


# -- the member


def prepare(attempt: int = 1, epoch: int = 1) -> SyncEvent:
    return PREPARE.model_copy(
        update={
            "version": (1, attempt),
            "epoch": epoch,
            "attempt": attempt,
            "members": ["m"],
            "seconds": 10.0,
            "progress": attempt,
        }
    )


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [
        (MemberStage.READY, [Resume()]),
        (MemberStage.RECEIVING, [Resume(), Rejoin()]),
        (MemberStage.APPLIED, [Rejoin()]),
    ],
)
def test_member_that_was_touched_when_a_try_is_aborted_asks_again(stage: MemberStage, wanted: list[Any]) -> None:
    member = Member("m", version=(1, 0))
    member.prepare(prepare(), 0.0)
    member.paused(KEY)
    if stage is not MemberStage.READY:
        member.go(prepare(), 0.0)
    if stage is MemberStage.APPLIED:
        member.received(KEY, {})
    assert member.stage is stage
    assert member.abort(prepare().model_copy(update={"verb": "abort"})) == wanted
    assert member.version == ((1, 0) if stage is MemberStage.READY else None)
