"""A card that an engine and a trainer share: every order of events, and tensors that come back bit for bit."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_mq.engines.card import (
    AskEngines,
    CardLock,
    EngineCommand,
    EngineStage,
    EngineTurn,
    MoveIn,
    MoveOut,
    TrainerStage,
    TrainerTurn,
)
from trinity_mq.engines.server.sleeping import Sleeper
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.torch.parking import ParkedTensors

FREE_MEMORY = "free memory"
"""The work of an engine that has drained."""


@dataclass
class Engine:
    """An engine process: its turn, what it does, and whether its memory is on the card."""

    turn: EngineTurn
    on_card: bool = True
    locks: bool = True
    serves: bool = True
    work: tuple[Any, ...] = ()
    """Commands that are being executed."""

    def perform(self, commands: list[Any]) -> None:
        for command in commands:
            if command is EngineCommand.SERVE:
                self.serves = True
            elif command is EngineCommand.STOP_WAKING:
                self.work = tuple(item for item in self.work if item is not EngineCommand.TAKE_CARD)
            else:
                self.serves = False
                self.work = (*(item for item in self.work if item != command), command)


@dataclass
class Trainer:
    turn: TrainerTurn
    on_card: bool = False
    locks: bool = False
    work: tuple[Any, ...] = ()


@dataclass
class World:
    """A trainer, two engines, one lock. None: a process that died and was not started again."""

    trainer: Trainer | None = None
    engines: dict[str, Engine | None] = field(default_factory=dict)
    deaths: int = 1

    def key(self) -> str:
        return repr(self)

    # -- what may happen next

    def events(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        if self.trainer is None:
            yield "trainer starts", World.start_trainer
        else:
            yield from self._trainer_events(self.trainer)
        for name, engine in self.engines.items():
            if engine is None:
                if self._may_lock_shared:
                    yield f"{name} starts", lambda world, name=name: world.engines.update({name: Engine(EngineTurn())})
            else:
                yield from self._engine_events(name, engine)
        if self.deaths:
            yield "trainer dies", World.kill_trainer
            for name in self.engines:
                yield f"{name} dies", lambda world, name=name: world.kill_engine(name)

    def start_trainer(self) -> None:
        self.trainer = Trainer(TrainerTurn())

    def _trainer_events(self, trainer: Trainer) -> Iterator[tuple[str, Callable[[World], None]]]:
        if not trainer.work:
            if trainer.turn.stage is not TrainerStage.HOLDING:
                yield "trainer wants 1", lambda world: world.order(world.trainer.turn.want(1))  # type: ignore[union-attr]
                yield "trainer wants 2", lambda world: world.order(world.trainer.turn.want(2))  # type: ignore[union-attr]
            else:
                for follows in (True, False):
                    yield (
                        f"trainer is done, weights follow: {follows}",
                        lambda world, follows=follows: world.order(world.trainer.turn.done(weights_follow=follows)),  # type: ignore[union-attr]
                    )
            return
        yield f"trainer does {trainer.work[0]}", World.trainer_works

    def _engine_events(self, name: str, engine: Engine) -> Iterator[tuple[str, Callable[[World], None]]]:
        def act(call: Callable[[EngineTurn], list[Any]]) -> Callable[[World], None]:
            def event(world: World) -> None:
                chosen = world.engines[name]
                assert chosen is not None
                chosen.perform(call(chosen.turn))

            return event

        if not engine.serves:
            yield f"the lease of {name} ends, or weights arrive", act(lambda turn: turn.wake())
        for number, command in enumerate(engine.work):
            if command is not EngineCommand.TAKE_CARD or engine.turn.has_lock or self._may_lock_shared:
                yield f"{name} does {command}", lambda world, number=number: world.engine_works(name, number)

    @property
    def _may_lock_shared(self) -> bool:
        return self.trainer is None or not self.trainer.locks

    # -- effects

    def order(self, commands: list[Any]) -> None:
        assert self.trainer is not None
        self.trainer.work = (*self.trainer.work, *commands)

    def trainer_works(self) -> None:
        assert self.trainer is not None
        command, *rest = self.trainer.work
        self.trainer.work = tuple(rest)
        living = [engine for engine in self.engines.values() if engine is not None]
        if isinstance(command, AskEngines):
            for engine in living:
                engine.perform(engine.turn.sleep(command.level))
            is_free = not any(engine.locks for engine in living)
            self.trainer.locks = is_free
            self.order(self.trainer.turn.locked(is_free=is_free))
        elif isinstance(command, MoveIn):
            self.trainer.on_card = True
        elif isinstance(command, MoveOut):
            self.trainer.on_card = self.trainer.locks = False
            for engine in living if command.wakes else []:
                engine.perform(engine.turn.wake())

    def engine_works(self, name: str, number: int) -> None:
        engine = self.engines[name]
        assert engine is not None
        command = engine.work[number]
        rest = tuple(item for place, item in enumerate(engine.work) if place != number)
        if command is EngineCommand.PAUSE_REQUESTS:
            engine.work = (*rest, FREE_MEMORY) if engine.turn.drained() else rest
        elif command == FREE_MEMORY:
            engine.work = rest
            engine.on_card = engine.locks = False
            engine.perform(engine.turn.freed())
        elif command is EngineCommand.TAKE_CARD and not engine.turn.has_lock:
            engine.locks = engine.turn.locked()  # the work goes on: the memory is filled
            engine.work = engine.work if engine.locks else rest
        else:
            engine.work, engine.on_card = rest, True
            engine.perform(engine.turn.woken())

    def kill_trainer(self) -> None:
        self.trainer, self.deaths = None, self.deaths - 1

    def kill_engine(self, name: str) -> None:
        self.engines[name], self.deaths = None, self.deaths - 1

    # -- rules

    def check(self) -> None:
        living = [engine for engine in self.engines.values() if engine is not None]
        if self.trainer is not None and self.trainer.on_card:
            assert not any(engine.on_card for engine in living), "two on the card"
        for engine in living:
            assert engine.locks or not engine.on_card, "an engine on the card without the lock"
            assert engine.on_card or not engine.serves, "an engine that serves without memory"

    @property
    def all_serve(self) -> bool:
        return all(engine is not None and engine.serves for engine in self.engines.values())

    @property
    def trains(self) -> bool:
        return self.trainer is not None and self.trainer.on_card


def first_world(engines: int, deaths: int) -> World:
    return World(Trainer(TrainerTurn()), {f"e{number}": Engine(EngineTurn()) for number in range(engines)}, deaths)


def explore(first: World) -> dict[str, tuple[World, set[str]]]:
    """Return every reachable state with the keys of the states that follow by events other than deaths."""
    states: dict[str, tuple[World, set[str]]] = {}
    waiting = deque([first])
    while waiting:
        world = waiting.popleft()
        if world.key() in states:
            continue
        world.check()
        follows: set[str] = set()
        for name, event in world.events():
            after = copy.deepcopy(world)
            event(after)
            waiting.append(after)
            if not name.endswith("dies"):
                follows.add(after.key())
        states[world.key()] = (world, follows)
    return states


def reaching(states: dict[str, tuple[World, set[str]]], goal: Callable[[World], bool]) -> set[str]:
    """Return the states from which some order of events without a death reaches the goal."""
    before: dict[str, set[str]] = {key: set() for key in states}
    for key, (_, follows) in states.items():
        for after in follows:
            before[after].add(key)
    found = {key for key, (world, _) in states.items() if goal(world)}
    waiting = deque(found)
    while waiting:
        for key in before[waiting.popleft()] - found:
            found.add(key)
            waiting.append(key)
    return found


GOALS: dict[str, Callable[[World], bool]] = {
    "the trainer never trains": lambda world: world.trains,
    "an engine never serves": lambda world: world.all_serve,
}


def problem_of(first: World) -> str:
    """Return a broken rule of the reachable states, or an empty text."""
    try:
        states = explore(first)
    except AssertionError as error:
        return str(error)
    return "; ".join(problem for problem, goal in GOALS.items() if reaching(states, goal) != states.keys())


@pytest.mark.parametrize(("engines", "deaths"), [(1, 2), (2, 0)])
def test_in_every_order_of_events_one_side_is_on_the_card_and_each_gets_its_turn(engines: int, deaths: int) -> None:
    assert problem_of(first_world(engines, deaths)) == ""


class FreesNothing(EngineTurn):
    """Says that it sleeps while its memory is still on the card."""

    def drained(self) -> bool:
        self.stage = EngineStage.ASLEEP
        return False


class NeverWakes(EngineTurn):
    def wake(self) -> list[Any]:
        return []


class KeepsTheCard(TrainerTurn):
    def done(self, *, weights_follow: bool) -> list[Any]:
        return []


@pytest.mark.parametrize("broken", [FreesNothing, NeverWakes, KeepsTheCard])
def test_a_broken_rule_is_found(broken: type[Any]) -> None:
    first = first_world(1, 0)
    engine = first.engines["e0"]
    assert engine is not None
    assert first.trainer is not None
    if issubclass(broken, EngineTurn):
        engine.turn = broken()
    else:
        first.trainer.turn = broken()
    assert problem_of(first)


def test_the_lock_is_shared_by_engines_and_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trinity_mq.engines.card import CardLock; "
        "lock = CardLock(Path(sys.argv[1])); print(lock.try_take(shared=sys.argv[2] == 'shared'), flush=True); "
        "sys.stdin.read()"
    )

    def holder(mode: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        return child

    mine = CardLock(tmp_path)
    with holder("shared") as engine:
        assert mine.try_take(shared=True)
        mine.release()
        assert not mine.try_take(shared=False)
        engine.kill()
    assert mine.try_take(shared=False)
    mine.release()
    with holder("alone") as trainer:
        assert not mine.try_take(shared=True)
        trainer.kill()
    assert mine.try_take(shared=True)
    mine.release()


class TrainersCard(CardLock):
    """A card that the trainer takes as soon as the engine releases it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.returned = asyncio.Event()

    async def take(self, *, shared: bool) -> None:
        await self.returned.wait()


class Machine:
    """Batcher and generator of an engine: ``sleep`` ends when the test says so."""

    def __init__(self) -> None:
        self.may_sleep = asyncio.Event()
        self.done: list[str] = []

    async def idle(self) -> None:
        return

    async def call(self, work: Callable[[], Any]) -> None:
        await work()

    async def sleep(self, level: int) -> None:
        await self.may_sleep.wait()
        self.done.append("sleep")

    async def wake_weights(self) -> None:
        self.done.append("wake_weights")


async def test_weights_that_come_while_the_engine_falls_asleep_wait_for_the_memory(tmp_path: Path) -> None:
    machine, card = Machine(), TrainersCard(tmp_path)
    sleeper = Sleeper(card, EngineState(), machine, machine, pytest.fail)
    assert not await sleeper.sleep(2, lease=60.0, timeout=0.01)
    arrived = asyncio.create_task(sleeper.wake_for_weights())
    await asyncio.sleep(0)
    machine.may_sleep.set()
    done, _ = await asyncio.wait({arrived}, timeout=0.1)
    assert (not done, machine.done) == (True, ["sleep"]), "the trainer has the card"
    card.returned.set()
    await arrived
    assert machine.done == ["sleep", "wake_weights"]


def test_parked_tensors_come_back_bit_for_bit_in_place() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    half = torch.randn(5).bfloat16()
    view, mapped = half[1:], torch.from_file(__file__, size=16, dtype=torch.uint8)
    tensors = [*model.parameters(), half, view, mapped]
    before = [tensor.detach().clone() for tensor in tensors]
    parked = ParkedTensors()
    for _ in range(2):
        size = parked.park(tensors)
        assert size == sum(tensor.nbytes for tensor in (*model.parameters(), half, mapped))
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        parked.unpark()
        assert all(map(torch.equal, tensors, before))
    assert model[1].weight is model[0].weight
    assert view.data_ptr() == half[1:].data_ptr()
    parked.park([half], keep=False)
    parked.unpark()
    assert half.untyped_storage().nbytes() == 10
