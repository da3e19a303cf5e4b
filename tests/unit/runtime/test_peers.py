from __future__ import annotations

import asyncio
from typing import Any

from trinity_mq.messages import ExplorerStatus, Heartbeat, RunnerStatus, TrainerStatus
from trinity_mq.runtime.peers import Peers
from trinity_mq.testing.virtual_time import run_virtually


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


def test_a_peer_lives_as_long_as_its_lease() -> None:
    async def main() -> None:
        peers = Peers()
        peers.receive(beat())
        peers.receive(beat("runner-1", lease=3.0))
        peers.receive(beat("engine-0", role="engine"))
        assert [each.id for each in peers.alive("runner")] == ["runner-0", "runner-1"]
        await asyncio.sleep(3)
        assert [each.id for each in peers.alive("runner")] == ["runner-0"]
        await asyncio.sleep(6.9)
        peers.receive(beat(seq=2))
        await asyncio.sleep(9.9)
        assert [each.seq for each in peers.alive("runner")] == [2]
        await asyncio.sleep(0.1)
        assert peers.alive("runner") == []

    run_virtually(main())


def test_one_that_is_gone_does_not_live_but_is_remembered() -> None:
    async def main() -> None:
        peers = Peers()
        peers.receive(beat(detail={"running": 1}))
        peers.receive(beat(seq=2, state="gone", detail={"running": 0}))
        assert peers.alive("runner") == []
        assert peers.statuses("runner", RunnerStatus) == []
        latest = peers.latest("runner-0")
        assert latest is not None
        assert latest.detail == RunnerStatus(running=0)
        assert peers.latest("nobody") is None

    run_virtually(main())


def test_beats_that_overtook_each_other_count_by_number_within_a_life() -> None:
    async def main() -> None:
        peers = Peers()
        woken = 0

        async def count() -> None:
            nonlocal woken
            while await peers.changed.wait(1.0):
                woken += 1

        counting = asyncio.create_task(count())
        for seq, incarnation, kept in ((5, "a", 5), (4, "a", 5), (5, "a", 5), (6, "a", 6), (1, "b", 1)):
            await asyncio.sleep(0.1)
            peers.receive(beat(seq=seq, incarnation=incarnation))
            assert [each.seq for each in peers.alive("runner")] == [kept]
        await counting
        assert woken == 3

    run_virtually(main())


def test_an_old_beat_does_not_extend_a_lease() -> None:
    async def main() -> None:
        peers = Peers()
        peers.receive(beat(seq=5))
        await asyncio.sleep(9)
        peers.receive(beat(seq=5))
        await asyncio.sleep(2)
        assert peers.alive("runner") == []

    run_virtually(main())


def test_after_deafness_every_lease_starts_anew() -> None:
    async def main() -> None:
        peers = Peers()
        peers.receive(beat(detail={"running": 1}))
        await asyncio.sleep(60)
        assert peers.alive("runner") == []
        peers.refresh()
        assert peers.statuses("runner", RunnerStatus) == [RunnerStatus(running=1)]
        await asyncio.sleep(10)
        assert peers.statuses("runner", RunnerStatus) == []

    run_virtually(main())


def test_leases_stand_still_while_we_are_deaf() -> None:
    async def main() -> None:
        peers = Peers()
        peers.receive(beat())
        peers.suspend()
        await asyncio.sleep(60)
        assert [one.id for one in peers.alive("runner")] == ["runner-0"]
        peers.refresh()
        await asyncio.sleep(11)
        assert peers.alive("runner") == []

    run_virtually(main())


def test_the_status_of_the_living_explorer_and_trainer_is_that_of_the_last_id() -> None:
    async def main() -> None:
        peers = Peers()
        assert (peers.explorer, peers.trainer) == (ExplorerStatus(), TrainerStatus())
        peers.receive(beat("explorer-1", role="explorer", detail={"wants": 2}))
        peers.receive(beat("explorer-0", role="explorer", detail={"wants": 1}))
        peers.receive(beat("trainer-0", role="trainer", detail={"committed": [1, 3]}))
        assert peers.explorer.wants == 2
        assert peers.trainer.committed == (1, 3)
        assert [one.wants for one in peers.statuses("explorer", ExplorerStatus, without="explorer-1")] == [1]
        await asyncio.sleep(10)
        assert (peers.explorer, peers.trainer) == (ExplorerStatus(), TrainerStatus())

    run_virtually(main())
