"""The gate with real processes that are killed, or cut off, at each of its steps, for each channel. Follow it with
``pytest -s``. Some victims on some channels; ``CHAOS_ALL=1`` plays every victim on every channel (10 minutes).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.sync_arena import ENGINES, PATIENCE, Answer, SyncArena
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.testing.tcp_proxy import FaultProxy

LIVES = {
    "trainer-0": ["said prepare:3", "heard ready:5", "said go:3", "broadcast", "heard applied:5", "saying commit:3"],
    "host-1": ["heard prepare:6", "said ready:4", "heard go:4", "said applied:4", "heard commit:4"],
    "host-1-engine": ["engine pause:4", "engine receive:4", "broadcast", "engine applying:4", "engine commit:4"],
}
"""How each life of an agent or engine ends. ``broadcast`` stands for the middle of the third one."""
METHODS = ("collective", "memory", "checkpoint")
EVERY_SCENE = [
    ({who: [end for end in ends if method == "collective" or end != "broadcast"]}, method)
    for method in METHODS
    for who, ends in LIVES.items()
]
ALL = bool(os.environ.get("CHAOS_ALL"))
SCENES = EVERY_SCENE if ALL else [EVERY_SCENE[number] for number in (0, 2, 4, 8)]

pytestmark = [
    pytest.mark.extended,
    pytest.mark.chaos,
    pytest.mark.any_broker,
    pytest.mark.broker,
    pytest.mark.e2e,
    pytest.mark.timeout(480),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]


@pytest.fixture(scope="module")
def node() -> Iterator[PrivateNode]:
    """A broker for these tests alone."""
    base = Path(tempfile.mkdtemp(prefix="tmq-"))
    node = PrivateNode(base / "broker")

    async def start() -> None:
        await node.start()
        await node.wait_ready()

    try:
        asyncio.run(start())
        yield node
    finally:
        asyncio.run(node.kill())
        shutil.rmtree(base, ignore_errors=True)


@pytest.mark.parametrize(("points", "method"), SCENES, ids=[f"{method}-{next(iter(who))}" for who, method in SCENES])
async def test_whoever_is_killed_costs_the_others_a_version_at_most(
    tmp_path: Path, node: PrivateNode, unique_run: str, points: dict[str, list[str]], method: str
) -> None:
    arena = SyncArena(tmp_path / "run", node.url, unique_run, points=points, method=method)

    async def acts() -> None:
        for number in range(sum(map(len, points.values()))):
            victim, where, died = await arena.death(number)
            back = await arena.led_again(died) if victim == "trainer-0" else died
            at = await arena.commit_of((), died)
            arena.say(f"those that live have gone on, {at - back:.1f} s after that ({where})")
            assert at - back < PATIENCE
        await arena.both_in()
        arena.say("both are in")

    await arena.play(acts)
    arena.check_order()
    assert sorted(where for _, where, _ in arena.deaths) == sorted(
        point.partition(":")[0] for ends in points.values() for point in ends
    )
    generations = {event.version[0] for _, event in arena.commits() if event.version}
    assert generations == set(range(1, 2 + len(points.get("trainer-0", []))))


async def test_a_host_that_is_cut_off_in_the_middle_of_a_sync_comes_back(
    tmp_path: Path, node: PrivateNode, unique_run: str
) -> None:
    async with FaultProxy(node.url) as proxy:
        arena = SyncArena(tmp_path / "run", node.url, unique_run, urls={"host-1": proxy.url})

        async def acts() -> None:
            await arena.both_in()
            number = len(arena.events)
            await arena.changed.until(lambda: any(event.verb == "go" for _, event in arena.events[number:]))
            proxy.refuse()
            cut = arena.now
            arena.say("host-1 is cut off")
            at = await arena.commit_of(ENGINES[:1], cut + 0.5)
            arena.say(f"the other has gone on, {at - cut:.1f} s later")
            assert at - cut < PATIENCE
            proxy.accept()
            await arena.both_in()
            arena.say("both are in again")

        await arena.play(acts)
    arena.check_order()


@pytest.mark.parametrize("method", METHODS if ALL else METHODS[:1])
async def test_with_keep_requests_in_flight_go_on_under_the_new_weights(
    tmp_path: Path, node: PrivateNode, unique_run: str, method: str
) -> None:
    arena = SyncArena(tmp_path / "run", node.url, unique_run, method=method, pause_mode="keep", max_tokens=56)

    def gone_on() -> list[Answer]:
        return [answer for answer in arena.answers if len(answer.versions) > 1]

    async def acts() -> None:
        while {answer.engine for answer in gone_on()} != set(ENGINES):
            await arena.both_in()
        arena.say(f"{len(gone_on())} of {len(arena.answers)} answers were made by several versions")

    await arena.play(acts)
    arena.check_order()
    assert not arena.deaths
