"""The weight-sync gate as two pure machines: the good case, each way out, random losses, repeats and deaths."""

from __future__ import annotations

import random
from typing import Any

import pytest

from trinity_mq.messages import SyncEvent
from trinity_mq.sync.gate.coordinator import (
    AbandonCollective,
    Committed,
    Coordinator,
    Failed,
    Phase,
    StartCollective,
)
from trinity_mq.sync.gate.member import Commit, Member, MemberStage, Pause, Receive, Rejoin, Resume

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


def test_nothing_is_committed_while_one_has_not_applied_it() -> None:
    machine = coordinator("a", "b")
    through_go(machine)
    assert machine.collective_done(machine.epoch, machine.attempt, 2.5) == []
    assert machine.applied(from_member("applied", machine, "a"), None, 3.0) == []
    assert machine.committed is None
    assert sent(machine.applied(from_member("applied", machine, "b"), None, 3.5)) == ["commit"]


def test_the_group_is_kept_between_versions_and_renewed_with_the_membership() -> None:
    machine = coordinator("a")
    for step in (1, 2):
        through_go(machine, (1, step))
        machine.applied(from_member("applied", machine, "a", version=(1, step)), None, 3.0)
        machine.collective_done(machine.epoch, machine.attempt, 3.0)
    assert machine.epoch == 1
    machine.join("b", None, 4.0)
    machine.start((1, 3), 3, PREPARE, 5.0)
    assert machine.epoch == 2


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


def test_prepare_and_go_are_repeated_until_answered() -> None:
    machine = coordinator("a")
    machine.start((1, 1), 1, PREPARE, 1.0)
    assert sent(machine.tick(2.0)) == ["prepare"]
    assert machine.tick(2.5) == []
    machine.ready(from_member("ready", machine, "a"), 2.6)
    assert sent(machine.tick(3.6)) == ["go"]


def test_a_failed_collective_is_abandoned_and_nobody_is_blamed() -> None:
    machine = coordinator("a", "b")
    through_go(machine)
    commands = machine.collective_failed(machine.epoch, machine.attempt, "a peer is gone")
    assert sent(commands) == ["abort"]
    assert any(isinstance(command, AbandonCollective) for command in commands)
    assert set(machine.members) == {"a", "b"}


def test_a_failed_canary_quarantines_the_member() -> None:
    machine = coordinator("a", "b")
    through_go(machine)
    commands = machine.applied(from_member("applied", machine, "b"), "logprobs differ by 3.0", 3.0)
    assert isinstance(commands[-1], Failed)
    assert machine.committed is None
    assert machine.quarantined() == ("b",)
    assert taking_part(machine.start((1, 1), 1, PREPARE, 4.0)) == ["a"], "the others go on without it"


def test_one_in_quarantine_fetches_alone_and_is_freed_by_its_canary() -> None:
    machine = coordinator("a", "b")
    through_go(machine)
    machine.applied(from_member("applied", machine, "b"), "logprobs differ by 3.0", 3.0)
    assert machine.due_catch_ups(3.0) == (), "nothing is committed yet"
    through_go(machine)
    machine.applied(from_member("applied", machine, "a"), None, 3.5)
    machine.collective_done(machine.epoch, machine.attempt, 3.5)
    assert machine.due_catch_ups(4.0) == ("b",)
    (sent_,) = machine.pull("b", PREPARE, 4.0)
    assert isinstance(sent_, SyncEvent)
    pull = sent_
    assert (pull.pull, pull.members, pull.version) == (True, ["b"], (1, 1))
    answer = SyncEvent(verb="applied", sender="b", version=(1, 1), epoch=0, attempt=pull.attempt)
    commands = machine.applied(answer, "logprobs differ by 3.0", 5.0)
    assert sent(commands) == ["abort"]
    assert machine.quarantined() == ("b",)
    assert machine.due_catch_ups(5.5) == (), "not at once again"
    assert machine.due_catch_ups(7.0) == ("b",)
    (sent_,) = machine.pull("b", PREPARE, 7.0)
    assert isinstance(sent_, SyncEvent)
    answer = SyncEvent(verb="applied", sender="b", version=(1, 1), epoch=0, attempt=sent_.attempt)
    commands = machine.applied(answer, None, 8.0)
    assert sent(commands) == ["commit"]
    assert commands[1] == Committed((1, 1), 1, ("b",), pulled=True)
    assert machine.quarantined() == machine.stale_members() == ()
    assert machine.canary_failures == 2
    assert taking_part(machine.start((1, 2), 2, PREPARE, 9.0)) == ["a", "b"]


def test_a_quarantined_member_takes_part_where_nobody_else_is() -> None:
    machine = coordinator("a")
    through_go(machine)
    machine.applied(from_member("applied", machine, "a"), "logprobs differ by 3.0", 3.0)
    through_go(machine)
    machine.collective_done(machine.epoch, machine.attempt, 3.0)
    machine.applied(from_member("applied", machine, "a"), None, 3.0)
    assert machine.committed == (1, 1)
    assert machine.quarantined() == ()


def test_a_pull_goes_on_beside_a_try_and_a_newer_version_ends_it() -> None:
    machine = coordinator("a")
    through_go(machine)
    machine.collective_done(machine.epoch, machine.attempt, 3.0)
    machine.applied(from_member("applied", machine, "a"), None, 3.0)
    machine.start((1, 2), 2, PREPARE, 4.0)
    machine.join("b", None, 4.5)
    (sent_,) = machine.pull("b", PREPARE, 5.0)
    assert isinstance(sent_, SyncEvent)
    machine.ready(from_member("ready", machine, "a", version=(1, 2)), 5.5)
    machine.collective_done(machine.epoch, machine.attempt, 6.0)
    machine.applied(from_member("applied", machine, "a", version=(1, 2)), None, 6.0)
    assert machine.committed == (1, 2)
    late = SyncEvent(verb="applied", sender="b", version=(1, 1), epoch=0, attempt=sent_.attempt)
    assert machine.applied(late, None, 6.5) == [], "nobody is given an older version than the others hold"
    assert machine.due_catch_ups(6.5) == ("b",)


def test_a_member_that_comes_back_as_another_process_ends_the_try_and_gets_a_new_group() -> None:
    machine = Coordinator(name="t", timeout=10.0, lease=15.0)
    machine.join("a", None, 0.0, life="1")
    machine.start((1, 1), 1, PREPARE, 1.0)
    assert isinstance(machine.join("a", None, 2.0, life="2")[-1], Failed)
    assert machine.leave("a", 2.5, life="1") == []
    assert set(machine.members) == {"a"}, "a late word of its former life"
    machine.start((1, 1), 1, PREPARE, 3.0)
    assert machine.epoch == 2
    unheard = from_member("ready", machine, "a", life="3")
    assert isinstance(machine.ready(unheard, 4.0)[-1], Failed), "its join was lost"


def test_answers_to_an_older_try_count_for_nothing() -> None:
    machine = coordinator("a")
    machine.start((1, 1), 1, PREPARE, 1.0)
    old = from_member("ready", machine, "a")
    machine.tick(11.0)
    machine.join("a", None, 12.0)
    machine.start((1, 1), 1, PREPARE, 12.0)
    assert machine.ready(old, 12.5) == []
    assert machine.phase is Phase.PREPARING


@pytest.mark.parametrize("phase", ["preparing", "entering", "applying"])
def test_a_member_that_leaves_ends_the_try_in_every_phase(phase: str) -> None:
    machine = coordinator("a", "b")
    machine.start((1, 1), 1, PREPARE, 1.0)
    if phase != "preparing":
        for name in "ab":
            machine.ready(from_member("ready", machine, name), 2.0)
    if phase == "applying":
        machine.collective_done(machine.epoch, machine.attempt, 2.5)
    assert machine.phase.value == phase
    assert isinstance(machine.leave("b", 3.0)[-1], Failed)
    assert machine.phase is Phase.IDLE


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


def test_member_goes_through_to_the_new_version() -> None:
    member = Member("m", version=(1, 0))
    assert member.prepare(prepare(), 0.0) == [Pause(KEY, 10.0)]
    (reply,) = member.paused(KEY)
    assert isinstance(reply, SyncEvent)
    assert reply.verb == "ready"
    (receive,) = member.go(prepare().model_copy(update={"verb": "go"}), 1.0)
    assert isinstance(receive, Receive)
    (reply,) = member.received(KEY, {"logprobs": [0.0]})
    assert isinstance(reply, SyncEvent)
    assert reply.verb == "applied"
    assert member.commit(prepare().model_copy(update={"verb": "commit"})) == [Commit((1, 1), 1)]
    assert (member.version, member.stage) == ((1, 1), MemberStage.IDLE)


def test_member_abort_before_the_collective_resumes_the_old_version() -> None:
    member = Member("m", version=(1, 0))
    member.prepare(prepare(), 0.0)
    member.paused(KEY)
    assert member.abort(prepare().model_copy(update={"verb": "abort"})) == [Resume()]
    assert member.version == (1, 0)


def test_member_abort_after_applying_is_dirty_and_asks_again() -> None:
    member = Member("m", version=(1, 0))
    member.prepare(prepare(), 0.0)
    member.paused(KEY)
    member.go(prepare(), 0.0)
    member.received(KEY, {})
    assert member.abort(prepare()) == [Rejoin()]
    assert member.version is None


def test_member_takes_a_try_up_once_and_none_that_is_older() -> None:
    """A commit of the first time may still be on its way: it must not meet weights of the second."""
    member = Member("m", version=(1, 0))
    member.prepare(prepare(attempt=2), 0.0)
    assert member.prepare(prepare(attempt=1), 1.0) == []
    assert member.abort(prepare(attempt=2).model_copy(update={"verb": "abort"})) == [Resume()]
    assert member.prepare(prepare(attempt=2), 2.0) == []
    restarted = prepare(attempt=1).model_copy(update={"version": (2, 0)})
    assert member.prepare(restarted, 3.0) == [Pause(((2, 0), 1, 1), 10.0)]


def test_member_pulls_without_go_and_what_it_holds_already_not_at_all() -> None:
    member = Member("m", version=(1, 0))
    pull = prepare().model_copy(update={"epoch": 0, "pull": True})
    key = ((1, 1), 0, 1)
    assert member.prepare(pull, 0.0) == [Pause(key, 10.0)]
    (receive,) = member.paused(key, 0.25)
    assert isinstance(receive, Receive)
    (reply,) = member.received(key, {}, {"apply": 0.5})
    assert isinstance(reply, SyncEvent)
    assert (reply.verb, reply.detail) == ("applied", {"apply": 0.5})
    assert member.commit(pull.model_copy(update={"verb": "commit"})) == [Commit((1, 1), 1)]
    assert member.prepare(pull, 1.0) == [Rejoin()], "the trainer has not heard of it"


def test_member_whose_coordinator_is_silent_frees_itself() -> None:
    member = Member("m", version=(1, 0))
    member.prepare(prepare(), 0.0)
    member.paused(KEY)
    assert member.tick(19.0, None) == []
    assert member.tick(20.0, None) == [Resume()]


def test_member_that_missed_the_commit_learns_it_from_the_beat() -> None:
    member = Member("m", version=(1, 0))
    member.prepare(prepare(), 0.0)
    member.paused(KEY)
    member.go(prepare(), 0.0)
    member.received(KEY, {})
    assert member.tick(1.0, ((1, 0), 1, 1)) == []
    assert member.tick(1.5, ((1, 1), 2, 2)) == [], "that was another try: ours may have failed for our canary"
    assert member.tick(2.0, KEY) == [Commit((1, 1), 1)]


def test_member_failure_without_touching_keeps_the_old_version() -> None:
    member = Member("m", version=(1, 0))
    member.prepare(prepare(), 0.0)
    member.paused(KEY)
    member.go(prepare(), 0.0)
    reply, after, rejoin = member.broke(KEY, "the barrier did not fill", touched=False)
    assert isinstance(reply, SyncEvent)
    assert reply.verb == "failed"
    assert (after, rejoin) == (Resume(), Rejoin())
    assert member.version == (1, 0)


@pytest.mark.parametrize("seed", range(300))
def test_under_losses_repeats_and_deaths_versions_only_rise_and_the_gate_always_frees_itself(seed: int) -> None:
    """Random schedules: every message may be lost, repeated or late, collectives break, members die and come back."""
    rng = random.Random(seed)
    machine = Coordinator(name="t", timeout=5.0, lease=8.0)
    members = {name: Member(name) for name in ("a", "b")}
    now, step = 0.0, 0
    committed: list[tuple[int, int]] = []
    served: dict[str, list[tuple[int, int]]] = {name: [] for name in members}
    wire: list[tuple[float, str, SyncEvent]] = []
    collective: StartCollective | None = None
    chaos = 300.0  # then the world is kind, and the gate must commit

    def post(to: str, event: SyncEvent) -> None:
        for _ in range(rng.choice((0, 1, 1, 1, 2)) if now < chaos else 1):
            wire.append((now + (rng.random() * 3 if now < chaos else 0.01), to, event))

    def of_coordinator(commands: list[Any]) -> None:
        nonlocal collective
        for command in commands:
            if isinstance(command, SyncEvent):
                for name in members:
                    post(name, command)
            elif isinstance(command, StartCollective):
                collective = command
            elif isinstance(command, AbandonCollective):
                collective = None
            elif isinstance(command, Committed):
                assert not committed or command.version >= committed[-1]
                committed.append(command.version)

    def of_member(name: str, commands: list[Any]) -> None:
        member = members[name]
        for command in commands:
            if isinstance(command, SyncEvent):
                post("t", command)
            elif isinstance(command, Pause):
                of_member(name, member.paused(command.key))
            elif isinstance(command, Receive):
                if now < chaos and rng.random() < 0.2:
                    of_member(name, member.broke(command.key, "cut", touched=rng.random() < 0.5))
                else:
                    of_member(name, member.received(command.key, {}))
            elif isinstance(command, Commit):
                assert command.version in committed, "served without having been committed"
                served[name].append(command.version)

    while now < chaos + 60.0:
        now += 0.5
        for name, member in members.items():
            if now < chaos and rng.random() < 0.02:
                of_member(name, member.lost_engine())
            if rng.random() < 0.3:
                post("t", SyncEvent(verb="join", sender=name, version=member.version, seconds=8.0))
            known = machine.members.get(name)
            given = (known.version, *known.given) if known is not None else None
            of_member(name, member.tick(now, given))
        for item in [item for item in wire if item[0] <= now]:
            wire.remove(item)
            _, to, event = item
            if to != "t":
                handler = {"prepare": members[to].prepare, "go": members[to].go}.get(event.verb)
                if handler:
                    of_member(to, handler(event, now))
                else:
                    of_member(to, members[to].commit(event) if event.verb == "commit" else members[to].abort(event))
            elif event.verb == "join":
                of_coordinator(machine.join(event.sender, event.version, now, lease=event.seconds))
            elif event.verb == "ready":
                of_coordinator(machine.ready(event, now))
            elif event.verb == "applied":
                of_coordinator(machine.applied(event, None, now))
            elif event.verb == "failed":
                of_coordinator(machine.failed(event, now))
        of_coordinator(machine.tick(now))
        if collective is not None:
            start, collective = collective, None
            if now < chaos and rng.random() < 0.2:
                of_coordinator(machine.collective_failed(start.epoch, start.attempt, "broke"))
            else:
                of_coordinator(machine.collective_done(start.epoch, start.attempt, now))
        if machine.phase is Phase.IDLE and machine.members:
            if machine.committed is None or rng.random() < 0.2:
                step += 1
            of_coordinator(machine.start((1, step), step, PREPARE, now))

    assert committed
    assert committed[-1][1] >= step - 2, "once the world is kind the newest version is committed"
    for versions in served.values():
        assert versions == sorted(versions)
        assert versions
