from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.virtual import virtually
from trinity_mq.messages import ExplorerStatus, Heartbeat, RunnerStatus, TrainerStatus
from trinity_mq.runtime.peers import REMEMBERED_LEASES, Peers


def beat(name: str = "runner-0", seq: int = 1, incarnation: str = "a", **fields: Any) -> Heartbeat:
    return Heartbeat(
        **{
            "role": "runner",
            "id": name,
            "seq": seq,
            "incarnation": incarnation,
            "lease": 10.0,
            "state": "idle",
            **fields,
        }
    )


def alive(peers: Peers, role: Any = "runner") -> list[str]:
    return [each.id for each in peers.alive(role)]


@virtually
async def test_a_peer_lives_as_long_as_its_lease() -> None:
    peers = Peers()
    peers.receive(beat())
    peers.receive(beat("runner-1", lease=3.0))
    peers.receive(beat("engine-0", role="engine"))
    peers.receive(beat("leaves", detail={"running": 1}))
    peers.receive(beat("leaves", seq=2, state="gone", detail={"running": 0}))
    assert alive(peers) == ["runner-0", "runner-1"]
    assert peers.latest("leaves").detail == RunnerStatus(running=0)  # type: ignore[union-attr]  # remembered
    assert peers.latest("nobody") is None
    peers.receive(beat("runner-1", seq=2, lease=3.0, role="operator"))
    assert (alive(peers), alive(peers, "operator")) == (["runner-0"], ["runner-1"]), "an id lives once"
    await asyncio.sleep(9.9)
    peers.receive(beat(seq=2))
    await asyncio.sleep(5)
    peers.receive(beat(seq=2))  # an old beat does not extend a lease
    await asyncio.sleep(4.9)
    assert [each.seq for each in peers.alive("runner")] == [2]
    await asyncio.sleep(0.1)
    assert alive(peers) == []


@virtually
async def test_beats_that_overtook_each_other_count_by_number_within_a_life() -> None:
    peers, woken = Peers(), []
    for seq, incarnation, kept in ((5, "a", 5), (4, "a", 5), (5, "a", 5), (6, "a", 6), (1, "b", 1)):
        waiting = asyncio.create_task(peers.changed.wait(1.0))
        await asyncio.sleep(0.1)
        peers.receive(beat(seq=seq, incarnation=incarnation))
        woken.append(await waiting)
        assert [each.seq for each in peers.alive("runner")] == [kept]
    assert woken == [True, False, False, True, True]


@pytest.mark.parametrize("looked_before", [True, False])
@virtually
async def test_a_reconnect_extends_the_leases_that_ran_when_the_connection_broke_and_revives_nobody(
    looked_before: bool,
) -> None:
    peers = Peers()
    peers.receive(beat("died-an-hour-ago"))
    await asyncio.sleep(3600)
    peers.receive(beat("lives"))
    peers.receive(beat("said-goodbye", state="gone"))
    assert not looked_before or peers.alive("runner")
    peers.suspend()
    await asyncio.sleep(60)
    assert alive(peers) == ["lives"], "leases stand still while we are deaf"
    peers.refresh()
    await asyncio.sleep(9.9)
    assert alive(peers) == ["lives"]
    await asyncio.sleep(0.1)
    peers.refresh()
    assert alive(peers) == []


@virtually
async def test_an_agent_that_sends_nothing_is_forgotten_after_some_leases() -> None:
    peers = Peers()
    peers.receive(beat("died"))
    peers.receive(beat("slow", lease=60.0))
    for seq in range(2, 200):
        await asyncio.sleep(1)
        peers.receive(beat(seq=seq))
        assert (peers.latest("died") is not None) == (seq - 1 < REMEMBERED_LEASES * 10)
    assert peers.latest("slow") is not None
    assert peers.latest("runner-0") is not None


def lines_run(function: Callable[[], object]) -> int:
    """Return how many lines of Python ``function`` runs: its cost, on a machine of any speed."""
    lines = 0

    def count(_frame: FrameType, event: str, _argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


@virtually
async def test_fifty_thousand_that_have_gone_cost_a_look_nothing() -> None:
    """One id for each process that ever lived: a runner in a container is named after its host."""
    peers = Peers()
    for number in range(50_000):
        peers.receive(beat(f"runner-{number}", lease=1.0))
    peers.receive(beat("lives", lease=100.0))
    await asyncio.sleep(2)
    assert [each.id for each in peers.alive("runner")] == ["lives"]
    assert lines_run(lambda: peers.alive("runner")) < 50
    await asyncio.sleep(REMEMBERED_LEASES * 10)
    peers.receive(beat("lives", seq=2, lease=100.0))
    assert peers.latest("runner-7") is None


@virtually
async def test_the_status_of_the_living_explorer_and_trainer_is_that_of_the_last_id() -> None:
    peers = Peers()
    assert (peers.explorer, peers.trainer) == (ExplorerStatus(), TrainerStatus())
    peers.receive(beat("explorer-1", role="explorer", detail={"wants": 2}))
    peers.receive(beat("explorer-0", role="explorer", detail={"wants": 1}))
    peers.receive(beat("trainer-0", role="trainer", detail={"committed": [1, 3]}))
    assert peers.explorer.wants == 2
    peers.receive(beat("explorer-0", seq=2, role="explorer", detail={"wants": 1, "finished": True}))
    assert peers.explorer.finished, "explorer-1 was killed a moment ago"
    peers.receive(beat("explorer-0", seq=3, role="explorer", detail={"wants": 1}))
    assert peers.trainer.committed == (1, 3)
    assert [one.wants for one in peers.statuses("explorer", ExplorerStatus, without="explorer-1")] == [1]
    await asyncio.sleep(10)
    assert (peers.explorer, peers.trainer) == (ExplorerStatus(), TrainerStatus())


@pytest.mark.parametrize(
    ("role", "at_work", "waiting"),
    [
        ("explorer", {"run_id": "ours", "open": ["t1"]}, {"run_id": "", "open": []}),
        ("trainer", {"generation": 2, "progress": 7}, {"generation": 0}),
    ],
)
@virtually
async def test_a_process_that_waits_for_the_lock_does_not_replace_its_holder_of_the_same_id(
    role: Any, at_work: dict[str, Any], waiting: dict[str, Any]
) -> None:
    peers = Peers()
    peers.receive(beat("a-0", role=role, detail=at_work))
    for seq, state in ((9, "idle"), (10, "gone")):
        peers.receive(beat("a-0", role=role, incarnation="b", seq=seq, state=state, detail=waiting))
        (living,) = peers.alive(role)
        assert living.detail.as_map() == at_work
    await asyncio.sleep(10.0)
    peers.receive(beat("a-0", role=role, incarnation="b", seq=11, detail=waiting))
    assert [living.incarnation for living in peers.alive(role)] == ["b"]
