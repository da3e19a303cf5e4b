"""What a failing or slow operator of the chain costs: tries, then its batch, and never the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.unit.agents.operator.test_operator import QUEUE, batch_of, close, make, make_world, manifest, ready, send
from tests.unit.agents.world import World
from tests.virtual import virtually
from trinity_agents.operator.agent import Operator
from trinity_mq.experience import Experience
from trinity_mq.operators import ExperienceOperatorV1, ThreadedOperator
from trinity_mq.operators.base import Processed
from trinity_mq.runtime.errors import RestartRequested, first_leaf

THIS = __name__


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    Choosy.repaired, Choosy.seconds, Choosy.seen = False, 0.0, []
    with capture_logs():  # rendering a traceback for the console takes a second
        yield


class Fine(ExperienceOperatorV1):
    async def process(self, exps: list[Experience]) -> Processed:
        return exps, {}


class Choosy(ExperienceOperatorV1):
    """Fails on batch 1 until it is repaired."""

    repaired = False
    seconds = 0.0
    seen: list[str] = []  # noqa: RUF012  reset before each test

    async def prepare(self) -> None:
        self.seen += [f"{name}: {len(clients)}" for name, clients in self.auxiliary_models.items()]

    async def process(self, exps: list[Experience]) -> Processed:
        await asyncio.sleep(self.seconds)
        if exps[0].eid.batch == 1 and not self.repaired:
            raise ArithmeticError("not this one")
        return exps, {}


class Computes(ThreadedOperator):
    go = threading.Event()

    def apply(self, exps: list[Experience]) -> Processed:
        self.go.wait(30)
        return exps, {}


def a_world(*overrides: str, kind: str = "Choosy") -> World:
    chain = f'operator.operators=[{{"name": "{THIS}.Fine"}}, {{"name": "{THIS}.{kind}"}}]'
    return World(chain, "algorithm.min_group_runs=1", "broker.delivery_limit=2", *overrides)


@virtually
async def test_the_dead_letter_names_the_operator_and_given_back_to_a_repaired_one_it_is_done() -> None:
    world = a_world()
    await batch_of(world, "a", "b")
    async with world.living(make(world), make(world, "operator-1")):
        await asyncio.sleep(10)
        (letter,) = world.stored("dead")
        assert letter.headers["operator"] == "1_Choosy"
        assert "operator 1_Choosy: ArithmeticError: not this one" in str(letter.headers["dead-reason"])
        assert [decided.state for decided in ready(world)] == ["failed"]
        assert world.count(QUEUE) == 2
        Choosy.repaired = True
        await close(world, manifest(("a", 1), ("b", 1)))
        await asyncio.sleep(5)
    assert [(decided.state, decided.experiences) for decided in ready(world)] == [("failed", 0), ("ready", 2)]
    assert world.count(QUEUE) is None


@virtually
async def test_a_chain_that_takes_too_long_names_who_was_at_work() -> None:
    world = a_world("operator.timeout=100")
    Choosy.seconds = 1e6
    await batch_of(world, "a")
    async with world.living(make(world)):
        await asyncio.sleep(250)
    assert [str(letter.headers["operator"]) for letter in world.stored("dead")] == ["1_Choosy"]
    assert "1_Choosy: the chain was not done within 100 s (operator.timeout)" in world.reasons()[0]


@virtually
async def test_what_is_not_an_operators_fault_names_none() -> None:
    world = make_world("broker.delivery_limit=2")
    await batch_of(world, "a", deliveries=1, failed=1)
    async with world.living(make(world)):
        await asyncio.sleep(3)
    assert ["operator" in letter.headers for letter in world.stored("dead")] == [False]


async def test_a_computation_that_does_not_end_costs_the_process_not_the_batch() -> None:
    world = a_world("operator.timeout=0.05", kind="Computes")
    await world.ready()
    await world.outside.declare(world.topology.batch_queue(1, "t1"))
    await send(world, "a")
    await close(world, manifest(("a", 1)))
    try:
        with pytest.raises(ExceptionGroup) as caught:
            await make(world).run()
    finally:
        Computes.go.set()
    error = first_leaf(caught.value)
    assert isinstance(error, RestartRequested)
    assert "Computes exceeded its time limit and still computes" in str(error)
    assert (world.count("closed"), world.reasons()) == (1, [])


@virtually
async def test_operators_are_handed_the_auxiliary_models_by_name() -> None:
    models = '[{"name": "judge", "engine": "external", "url": "http://127.0.0.1:9/v1"}]'
    world = a_world(f"explorer.auxiliary_models={models}")
    operator: Operator = make(world)
    async with world.living(operator):
        assert Choosy.seen == ["judge: 1"]
