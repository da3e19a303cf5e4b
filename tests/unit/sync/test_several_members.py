"""Members of the gate live and die independently: one dies, the others go on; an evaluation delays the sync of all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.sync.test_drivers import Gate, now
from trinity_mq.messages import SyncEvent
from trinity_mq.sync.gate.member import Member, MemberStage, Rejoin, Resume
from trinity_mq.testing.fakes import FakeEngine


def prepare(*members: str, attempt: int = 1) -> SyncEvent:
    return SyncEvent(
        verb="prepare",
        sender="t",
        version=(1, 1),
        progress=1,
        epoch=1,
        attempt=attempt,
        members=list(members),
        seconds=10,
    )


def ready_member() -> Member:
    member = Member("b", version=(1, 0))
    member.prepare(prepare("a", "b"), 0.0)
    member.paused(member.key)
    assert member.stage is MemberStage.READY
    return member


def test_an_evaluation_of_one_host_is_served_by_the_engines_of_another() -> None:
    """The sync waits for the evaluation, so no engine may stand still meanwhile: the evaluation would wait for it."""
    gate = Gate(3)
    stood_still: list[bool] = []

    async def act() -> float:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 3)
        await gate.keeper.sync((1, 0), 0)
        gate.no_evaluation.clear()
        syncing = asyncio.ensure_future(gate.keeper.sync((1, 1), 1))
        await asyncio.sleep(0.5)
        for _ in range(40):
            stood_still.append(any(engine.paused for engine in gate.engines))
            await asyncio.sleep(1.0)
        began = now()
        gate.no_evaluation.set()
        await syncing
        return now() - began

    assert gate.play(act) < 2.0
    assert not any(stood_still)
    assert [engine.served for engine in gate.engines] == [[(1, 0), (1, 1)]] * 3
    assert gate.keeper.aborts == 0


def test_an_engine_that_dies_costs_the_others_nothing() -> None:
    gate = Gate(2, timeout=20.0)

    async def act() -> float:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 2)
        await gate.keeper.sync((1, 0), 0)
        gate.members[1].engine_down()
        await asyncio.sleep(0.1)
        began = now()
        await gate.keeper.sync((1, 1), 1)
        took = now() - began
        gate.members[1].engine_up(None, None)
        await gate.members[1].changed.until(lambda: gate.members[1].version == (1, 1))
        assert now() - began < 2.0, "it did not wait for the next sync"
        await gate.keeper.sync((1, 2), 2)
        return took

    assert gate.play(act) < 1.0, "nobody waited for its lease to end"
    assert [engine.served for engine in gate.engines] == [[(1, 0), (1, 1), (1, 2)], [(1, 0), (1, 1), (1, 2)]]
    assert gate.keeper.aborts == 0
    assert gate.keeper.machine.epoch == 3, "a group without it, and a new one with it"


def test_one_that_comes_back_between_two_syncs_gets_a_new_group() -> None:
    """Its process has never been in the old one."""
    gate = Gate(2)

    async def act() -> None:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 2)
        await gate.keeper.sync((1, 0), 0)
        gate.members[1].engine_down()
        gate.members[1].engine_up(None, None)
        await asyncio.sleep(0.1)
        await gate.keeper.sync((1, 1), 1)

    gate.play(act)
    assert gate.keeper.machine.epoch == 2


def test_what_is_cut_off_while_it_receives_is_told_so() -> None:
    member = ready_member()
    member.go(prepare("a", "b"), 1.0)
    assert member.abort(prepare("a", "b").model_copy(update={"verb": "abort"})) == [Resume(), Rejoin()]
    assert member.version is None, "until the engine says what it holds"


class StaleEngine(FakeEngine):
    """Says that it has taken the weights in, and answers with those it had; from its second transfer on, ``lies``
    times.
    """

    def __init__(self, engine_id: str, lies: int) -> None:
        super().__init__(engine_id)
        self.received, self.lies = 0, lies

    async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        answer = await super().receive(spec, timeout)
        self.received += 1
        if 1 < self.received <= 1 + self.lies:
            answer["logprobs"] = [-1.0] * len(answer["logprobs"])
        return answer


@pytest.mark.parametrize("lies", [1, 3])
def test_an_engine_that_keeps_its_old_weights_is_left_out_in_that_round_and_freed_once_it_has_them(lies: int) -> None:
    gate = Gate(3)
    gate.engines[1] = gate.members[1]._engine = StaleEngine("e1", lies)  # type: ignore[assignment]
    keeper = gate.keeper

    async def act() -> None:
        await keeper.changed.until(lambda: len(keeper.machine.members) == 3)
        await keeper.sync((1, 0), 0)
        began = now()
        await keeper.sync((1, 1), 1)
        assert now() - began < 2.0
        assert keeper.aborts == 1
        assert (1, 1) not in gate.engines[1].served
        assert keeper.report().members["m1"].state == "quarantined"
        assert keeper.metrics()["sync/quarantined"] == 1.0
        await keeper.changed.until(lambda: not keeper.machine.stale_members())
        assert keeper.metrics()["sync/canary_failures"] == lies
        assert keeper.report().members["m1"].state == "current"
        await keeper.sync((1, 2), 2)

    gate.play(act, limit=100)
    assert [engine.served for engine in gate.engines] == [[(1, 0), (1, 1), (1, 2)]] * 3
    assert keeper.aborts == 1, "whoever is in quarantine costs the others nothing"


def test_a_try_goes_on_while_another_fetches_alone() -> None:
    gate = Gate(2)
    gate.members[1].engine_ready = False

    async def act() -> None:
        await gate.keeper.changed.until(lambda: gate.keeper.has_members)
        await gate.keeper.sync((1, 0), 0)
        gate.engines[0].receive_seconds = 3.0
        syncing = asyncio.ensure_future(gate.keeper.sync((1, 1), 1))
        await gate.keeper.changed.until(lambda: gate.keeper.phase == "applying")
        gate.members[1].engine_up(None, None)
        await gate.members[1].changed.until(lambda: gate.members[1].version == (1, 0))
        assert not syncing.done()
        await syncing
        await gate.members[1].changed.until(lambda: gate.members[1].version == (1, 1))

    gate.play(act, limit=60)
    assert gate.engines[1].served == [(1, 0), (1, 1)]
    assert gate.keeper.aborts == 0


def test_the_phases_of_the_last_committed_sync_say_where_its_time_went() -> None:
    gate = Gate(2)
    pause, commit = gate.engines[0].pause, gate.engines[1].commit
    gate.engines[1].receive_seconds, gate.channel.seconds = 2.0, 1.5

    async def slow_pause(timeout: float) -> None:
        await asyncio.sleep(0.25)
        await pause(timeout)

    async def slow_commit(version: Any, progress: int) -> None:
        await asyncio.sleep(0.125)
        await commit(version, progress)

    gate.engines[0].pause, gate.engines[1].commit = slow_pause, slow_commit  # type: ignore[method-assign]

    async def act() -> dict[str, float]:
        await gate.keeper.changed.until(lambda: len(gate.keeper.machine.members) == 2)
        await gate.keeper.sync((1, 0), 0)
        gate.no_evaluation.clear()
        syncing = asyncio.ensure_future(gate.keeper.sync((1, 1), 1))
        await asyncio.sleep(4.0)
        gate.no_evaluation.set()
        await syncing
        slower = gate.keeper.changed.until(lambda: gate.keeper.phases.get("resume", 0.0) > 100.0)
        await slower  # the other engine said at once that it serves
        next_try = asyncio.ensure_future(gate.keeper.sync((1, 2), 2))
        await gate.keeper.changed.until(lambda: gate.keeper.phase != "idle")
        found = gate.keeper.phases
        await next_try
        return found

    wanted = {"wait": 4000.0, "pause": 250.0, "transfer": 1500.0, "apply": 500.0, "resume": 125.0}
    assert gate.play(act) == pytest.approx(wanted, abs=20.0)
    assert gate.keeper.metrics()["sync/transfer_ms"] == pytest.approx(1500.0, abs=20.0)
