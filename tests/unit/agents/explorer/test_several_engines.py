"""Several engines in one run, at one host or at several: whole runs on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.world import beside, failure, leaf
from trinity_agents.explorer.agent import Explorer
from trinity_agents.explorer.engine_hosting import EngineHosting
from trinity_agents.simulation import Simulation, until
from trinity_mq.messages import SyncEvent
from trinity_mq.models.engine_selection import EngineSelector
from trinity_mq.runtime.errors import FatalError
from trinity_mq.testing.fakes import FakeEngine
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop


@dataclass
class Engines(Simulation):
    """Beside the explorer's own engine another one there, and two at a host of their own."""

    second: FakeEngine = field(default_factory=lambda: FakeEngine("explorer-0-engine-1"))
    remote: list[FakeEngine] = field(default_factory=lambda: [FakeEngine("far-engine"), FakeEngine("far-engine-1")])
    hosts: list[EngineHosting] = field(default_factory=list)

    def make_explorer(self, agent_id: str = "explorer-0") -> Explorer:
        explorer = super().make_explorer(agent_id)
        explorer.engines = [self.engine, self.second]
        return explorer

    def make_host(self, name: str = "far") -> EngineHosting:
        host = EngineHosting(self.config, bus=self.bus(), topology=self.topology, agent_id=name, engines=self.remote)
        self.hosts.append(host)
        return host

    @property
    def all(self) -> list[FakeEngine]:
        return [self.engine, self.second, *self.remote]


def dies(engine: FakeEngine) -> None:
    engine.snapshot = replace(engine.snapshot, alive=False, state="loading", version=None, url="")
    engine.on_change()


def comes_back(engine: FakeEngine) -> None:
    engine.snapshot = replace(engine.snapshot, alive=True, state="empty", url="http://127.0.0.1:9")
    engine.on_change()


def test_all_engines_of_all_hosts_get_every_version(tmp_path: Path) -> None:
    sim = Engines(tmp_path, batches=5)
    run_virtually(sim.run(beside=lambda: sim.make_host().run()), limit=1000)
    assert [engine.served for engine in sim.all] == [[(1, step) for step in range(6)]] * 4
    assert sim.evaluated_steps() == [0, 2, 4, 5]
    assert all(not engine.paused for engine in sim.all)
    last = [event for event in sim.published(SyncEvent) if event.verb == "commit"][-1]
    assert set(last.members) == {engine.snapshot.id for engine in sim.all}
    assert {event.sender for event in sim.published(SyncEvent) if event.verb == "leave"} == {
        engine.snapshot.id for engine in sim.all
    }


def test_the_lease_of_an_engine_is_renewed_while_a_slower_one_starts(tmp_path: Path) -> None:
    held: list[float] = []

    class Quick(FakeEngine):
        async def hold(self) -> None:
            began = asyncio.get_running_loop().time()
            try:
                await super().hold()
            finally:
                held.append(asyncio.get_running_loop().time() - began)

    class Slow(FakeEngine):
        async def start(self) -> None:
            await asyncio.sleep(7.0)

    sim = Engines(tmp_path, batches=1, second=Slow("explorer-0-engine-1"))
    sim.engine = Quick(sim.engine.snapshot.id)
    run_virtually(sim.run(), limit=1000)
    assert held == [pytest.approx(7.0)]


async def test_engines_that_joined_before_the_trainer_listened_get_weights_when_it_does(tmp_path: Path) -> None:
    """A join is repeated at a third of the lease only, and the first step would wait as long."""
    sim = Engines(tmp_path, batches=2)

    async def later() -> None:
        await asyncio.sleep(1.5)
        await sim.make_trainer().run()

    async with beside(sim.run(trainer=later, beside=lambda: sim.make_host().run())):
        await until(lambda: all(engine.served for engine in sim.all))
        assert 1.5 < asyncio.get_running_loop().time() < 2.5


async def test_an_evaluation_is_not_waited_for_by_the_engines_that_answer_it(tmp_path: Path) -> None:
    sim = Engines(tmp_path, batches=4, runner_seconds=lambda task_slice: 20.0 if task_slice.lane == "eval" else 0.1)
    paused: list[int] = []
    async with beside(sim.run(beside=lambda: sim.make_host().run())):
        await until(lambda: bool(sim.explorers) and sim.explorer.exploration is not None)
        while not sim.state().finished:
            await asyncio.sleep(1.0)
            if sim.explorer.exploration and sim.explorer.exploration.evaluations.running == 2:
                paused.append(sum(engine.paused for engine in sim.all))
    assert len(paused) >= 15
    assert sum(paused) == 0
    assert sim.evaluated_steps() == [0, 2, 4]
    assert [engine.served[-1] for engine in sim.all] == [(1, 4)] * 4


@pytest.mark.parametrize(
    "victims",
    [pytest.param((n,), id=f"engine {n}") for n in range(3)] + [pytest.param((0, 1), id="all of the explorer's")],
)
async def test_one_dies_and_the_others_go_on_until_it_is_back(tmp_path: Path, victims: tuple[int, ...]) -> None:
    sim = Engines(tmp_path, batches=12)
    dead = [sim.all[number] for number in victims]
    others = [engine for engine in sim.all if engine not in dead]
    sim.runner = _asks_any(sim)  # type: ignore[method-assign]
    async with beside(sim.run(beside=lambda: sim.make_host().run())):
        await until(lambda: all(len(engine.served) >= 3 for engine in sim.all))
        for engine in dead:
            dies(engine)
        then = len(others[0].served)
        await until(lambda: all(len(other.served) >= then + 4 for other in others))
        for engine in dead:
            comes_back(engine)
        await until(lambda: all(engine.snapshot.version is not None for engine in dead))
        assert sim.trainer.loop.progress < 12, "not only at the end"
    assert sim.trainer.loop.progress == 12
    assert [engine.served[-1] for engine in sim.all] == [(1, 12)] * 4
    assert sim.state().finished
    aborts = [event for event in sim.published(SyncEvent) if event.verb == "abort"]
    assert len(aborts) <= 1, "at most the try under way"


def _asks_any(sim: Engines) -> Any:
    """Runners ask whichever engine has weights."""
    from trinity_mq.testing.fakes import FakeRunner

    async def runner(bus: Any, topology: Any) -> None:
        def version() -> Any:
            return max((e.snapshot.version for e in sim.all if e.snapshot.version), default=None)

        await FakeRunner(bus, topology, version, sim.runner_seconds, sim.spoil).run()

    return runner


async def test_beats_say_which_engine_is_gone_and_the_host_is_taken_for_no_engine(tmp_path: Path) -> None:
    sim = Engines(tmp_path, batches=3)
    async with beside(sim.run()):
        host = sim.make_host()
        running = asyncio.create_task(host.run())
        await until(lambda: len(sim.remote[0].served) >= 2)
        dies(sim.remote[1])
        await asyncio.sleep(0.5)
        choice = EngineSelector(lambda: host.peers.alive("engine"))
        assert {choice().id for _ in range(50)} == {"engine", "explorer-0-engine-1", "far-engine"}
        gone, far = host.peers.latest("far-engine-1"), host.peers.latest("far")
        assert gone is not None
        assert far is not None
        assert (gone.state, far.detail.as_map()) == ("gone", {"hosts": ["far-engine", "far-engine-1"]})
        comes_back(sim.remote[1])
        await running


async def test_two_hosts_of_one_name_are_refused(tmp_path: Path) -> None:
    sim = Engines(tmp_path, batches=40)
    async with beside(sim.run()):
        first = asyncio.create_task(sim.make_host().run())
        await until(lambda: len(sim.remote[0].served) >= 1)
        with pytest.raises(ExceptionGroup) as caught:
            await sim.make_host().run()
        assert "start this host with another --id" in str(leaf(caught.value, FatalError))
        await first


async def test_a_host_leaves_when_it_is_drained_and_the_run_goes_on(tmp_path: Path) -> None:
    sim = Engines(tmp_path, batches=6)
    async with beside(sim.run()):
        host = sim.make_host()
        running = asyncio.create_task(host.run())
        await until(lambda: len(sim.remote[0].served) >= 2)
        host.drain()
        await running
    assert sim.trainer.loop.progress == 6
    assert sim.engine.served[-1] == sim.second.served[-1] == (1, 6)
    assert len(sim.remote[0].served) < 6


def test_setting_up_the_group_by_hand_counts_every_engine(tmp_path: Path) -> None:
    sim = Engines(tmp_path)
    explorer = sim.make_explorer()
    specs: list[dict[str, Any]] = []

    async def receive(spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        specs.append(spec)
        return {}

    for engine in explorer.engines:
        engine.receive = receive
    run_virtually(explorer.setup_weight_sync_group("127.0.0.1", 5, []))
    assert sorted((spec["rank"], spec["world"]) for spec in specs) == [(1, 3), (2, 3)]


class Stale(FakeEngine):
    """Takes weights in that it does not use, at its third transfer and its fourth."""

    received = 0

    async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        answer = await super().receive(spec, timeout)
        self.received += 1
        return {"logprobs": [-1.0] * len(answer["logprobs"])} if self.received in {3, 4} else answer


def test_an_engine_that_keeps_its_old_weights_is_quarantined_in_that_round_and_comes_back(tmp_path: Path) -> None:
    sim = Engines(tmp_path, batches=12)
    sim.second = Stale("explorer-0-engine-1")
    run_virtually(sim.run(beside=lambda: sim.make_host().run()), limit=1000)
    assert sim.engine.served == [(1, step) for step in range(13)]
    others = [event for event in sim.published(SyncEvent) if event.verb == "commit" and event.version == (1, 2)]
    assert sim.second.snapshot.id not in others[0].members, "the others have gone on without it"
    assert others[-1].members == [sim.second.snapshot.id], "and it has got it alone, once it used what it took"
    assert sim.second.served == sorted(set(sim.second.served))
    assert sim.second.served[-1] == (1, 12)
    assert sim.trainer.loop.gate.aborts == 1
    assert sim.trainer.loop.gate.metrics()["sync/canary_failures"] == 2.0
    assert sim.trainer.loop.gate.metrics()["sync/quarantined"] == 0.0


@pytest.mark.parametrize("wrong", ["the explorer's", "another host's"])
def test_a_host_whose_engines_have_another_tokenizer_than_the_trainer_ends_at_once(tmp_path: Path, wrong: str) -> None:
    """The trainer gives them no weights: the run would hold until explorer.stall_timeout."""
    sim = Engines(tmp_path, batches=3)
    ended: list[float] = []
    errors: list[FatalError] = []

    async def host() -> None:
        try:
            await sim.make_host().run()
        except ExceptionGroup as group:
            ended.append(asyncio.get_running_loop().time())
            errors.append(leaf(group, FatalError))

    async def trainer() -> None:
        made = sim.make_trainer()
        made.loop.gate.fingerprint = "trained"
        await made.run()

    for engine in sim.all:
        here = engine in (sim.engine, sim.second)
        served = "other" if here == (wrong == "the explorer's") else "trained"
        engine.snapshot = replace(engine.snapshot, fingerprint=served)
    if wrong == "the explorer's":
        errors.append(failure(sim.run(trainer=trainer, beside=host), FatalError, limit=30))
    else:
        run_virtually(sim.run(trainer=trainer, beside=host), limit=1000)
        assert ended[0] < 5.0
        assert sim.trainer.loop.progress == 3, "the engines of the explorer serve the run"
    assert "another tokenizer or chat template (fingerprint other) than the trainer (trained)" in str(errors[0])
