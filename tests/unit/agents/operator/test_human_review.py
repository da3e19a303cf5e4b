"""People judge runs of a batch: an operator agent on MemoryBus in virtual time, beside people on the stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.unit.agents.operator.test_operator import batch_of, chunks, decision, ready
from tests.unit.agents.world import World, experience, kill
from trinity_agents import simulation
from trinity_agents.operator.agent import Operator
from trinity_mq.bus import Envelope
from trinity_mq.config import ConfigError, OperatorConfig, load_config
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import ReviewClosed, ReviewRequest, decode
from trinity_mq.operations.review import full_text
from trinity_mq.operators import OperatorConfigError, create_operators
from trinity_mq.operators.human_review import HumanReview, ReviewConditions
from trinity_mq.reviews.base import Answer, Decision, Question
from trinity_mq.reviews.ledger import Review
from trinity_mq.reviews.stream import ReviewStream
from trinity_mq.testing.virtual_time import VirtualTimeLoop

LOOP = VirtualTimeLoop

CHOOSE = '"choose": {"reward_above": 0.5}, "seconds": 100'
EPOCH = 1e9
REQUEST, CLOSED = ReviewRequest.kind, ReviewClosed.kind


def make_world(arguments: str = CHOOSE, *overrides: str) -> World:
    chain = f'operator.operators=[{{"name": "human_review", "args": {{{arguments}}}}}]'
    return World(chain, "algorithm.min_group_runs=1", "explorer.operator_deadline=60", *overrides)


def operator(world: World, name: str = "operator-0") -> Operator:
    loop = asyncio.get_running_loop()
    return Operator(
        world.config, bus=world.bus(), topology=world.topology, agent_id=name, clock=lambda: EPOCH + loop.time()
    )


async def rewards(world: World) -> dict[int, float | None]:
    """The rewards by run of the one processed batch."""
    decided = decision(world)
    bodies = [Experience.deserialize_many(chunk.body) for chunk in chunks(world, decided.op)]
    return {exp.eid.run: exp.reward for body in bodies for exp in body}


async def until(condition: Callable[[], bool]) -> float:
    """Return how long it took."""
    began = asyncio.get_running_loop().time()
    await simulation.until(condition, 0.05)
    return asyncio.get_running_loop().time() - began


def asked(world: World) -> list[ReviewRequest]:
    if f"{world.topology.prefix}review" not in world.broker.queues:
        return []
    return [decode(each.body, ReviewRequest) for each in world.stored("review") if each.headers["kind"] == REQUEST]


def closings(world: World) -> list[ReviewClosed]:
    return [decode(each.body, ReviewClosed) for each in world.stored("review") if each.headers["kind"] == CLOSED]


async def say(world: World, body: dict[str, Any], message_id: str) -> None:
    """Give a verdict as any program could: JSON, no kind, no run."""
    mail = Envelope(
        body=json.dumps(body).encode(),
        kind="x",
        message_id=message_id,
        content_type="application/json",
        headers={"kind": "x"},
    )
    assert await world.outside.publish(world.topology.exchange("review"), "verdict", mail)


async def test_a_verdict_changes_the_reward_and_a_second_one_is_refused() -> None:
    world = make_world()
    await batch_of(world, "a0", "a1")
    async with world.living(operator(world)):
        await until(lambda: bool(asked(world)))
        (request,) = asked(world)
        assert request.reasons == ["reward 1 is above 0.5"]
        assert (request.batch, request.ticket, request.deadline - request.asked) == (1, "t1", 100.0)
        async with ReviewStream(world.outside, world.topology).following() as reviews:
            (review,) = reviews.pending()
            with pytest.raises(ValueError, match="needs a number"):
                await reviews.send(request.request, "reward")
            await say(world, {"request": request.request, "verdict": "reward", "reward": 0.25, "by": "ann"}, "v1")
            assert (await reviews.send(request.request, "drop", by="bob")).taken == "refused"
            await reviews.changed.until(lambda: review.closed is not None)
            assert reviews.pending() == []
        assert await until(lambda: bool(ready(world))) < 5.0, "it waits no longer than for the verdict"
        (end,) = closings(world)
        assert (end.verdict, end.reward, end.how, end.by) == ("reward", 0.25, "verdict", "ann")
        assert await rewards(world) == {0: 0.0, 1: 0.25}
        metrics = {name: value for name, value in decision(world).metrics.items() if name.startswith("review/")}
        counts = {"asked": 1, "not_asked": 0, "kept": 0, "dropped": 0, "rewarded": 1, "timed_out": 0}
        assert metrics == {f"review/{name}": value for name, value in counts.items()}


@pytest.mark.parametrize(
    ("default", "left"), [('"keep"', {0: 0.0, 1: 1.0}), ('"drop"', {0: 0.0}), ('{"reward": 0.5}', {0: 0.0, 1: 0.5})]
)
async def test_the_default_counts_after_the_deadline(default: str, left: dict[int, float]) -> None:
    world = make_world(f'{CHOOSE}, "default": {default}')
    await batch_of(world, "a0", "a1")
    async with world.living(operator(world)):
        took = await until(lambda: bool(ready(world)))
        assert 99.0 < took < 103.0
        assert [end.how for end in closings(world)] == ["timeout"]
        assert await rewards(world) == left
        assert decision(world).metrics["review/timed_out"] == 1


async def test_an_operator_that_takes_over_finds_the_verdict_and_the_deadline_does_not_start_anew() -> None:
    """Heartbeats say how many runs wait for people."""
    world = make_world('"choose": {"fraction": 1.0}, "seconds": 100')
    await batch_of(world, "a0", "a1")
    first, second = operator(world), operator(world, "operator-1")
    assert (first.detail().reviews, first.detail().review_seconds) == (0, 0.0)
    running = asyncio.create_task(first.run())
    loop = asyncio.get_running_loop()
    await until(lambda: len(asked(world)) == 2)
    assert (first.detail().reviews, first.detail().ticket) == (2, "t1")
    assert 95 < first.detail().review_seconds <= 100
    began = loop.time()
    await asyncio.sleep(40.0)
    await kill(running)
    told = next(each for each in asked(world) if each.reward == 1.0)
    await say(world, {"request": told.request, "verdict": "drop", "by": "ann"}, "v1")
    await asyncio.sleep(30.0)
    async with world.living(second):
        await until(lambda: second.detail().reviews == 1)
        await until(lambda: bool(ready(world)))
        assert 99.0 < loop.time() - began < 103.0, "counted from the first request"
        assert (second.detail().reviews, second.detail().review_seconds) == (0, 0.0)
        assert len(asked(world)) == 2, "asked once"
        assert await rewards(world) == {0: 0.0}
        assert {end.request: end.how for end in closings(world)}[told.request] == "verdict"


async def test_after_a_crash_what_was_decided_stays_decided() -> None:
    world = make_world(f'{CHOOSE}, "default": "drop"')
    await batch_of(world, "a0", "a1")
    first = asyncio.create_task(operator(world).run())
    await until(lambda: bool(asked(world)) and bool(closings(world)))
    await kill(first)
    if not ready(world):
        await say(world, {"request": asked(world)[0].request, "verdict": "keep"}, "late")
        async with world.living(operator(world, "operator-1")):
            assert await until(lambda: bool(ready(world))) < 30.0
    assert await rewards(world) == {0: 0.0}
    assert len(closings(world)) == 1


def test_runs_of_the_fraction_are_not_asked_first() -> None:
    review = HumanReview(choose=ReviewConditions(reward_above=0.9, fraction=0.2))
    eids = [EID(batch=1, task=0, run=run, suffix="x") for run in range(200)]
    runs = [Experience(eid=eid, tokens=[1, 2], prompt_length=1, reward=float(eid.run % 2)) for eid in eids]
    _, chosen = review._select_runs(runs)
    is_random = [reason.startswith("one of") for _, (reason,) in chosen]
    assert 10 < sum(is_random) < 30
    assert sum(is_random[:40]) < 15


async def test_people_are_told_the_expected_answer() -> None:
    class Noting:
        async def ask(self, questions: Sequence[Question], **_: Any) -> list[Answer]:
            expected.extend(one.expected for one in questions)
            return [Answer(Decision()) for _ in questions]

    expected: list[str | None] = []
    human_review = HumanReview(choose=ReviewConditions(fraction=1.0))
    human_review.reviews = Noting()  # type: ignore[assignment]
    await human_review.process([experience(1, 0, info={"truth": "7"}), experience(2, 0)])
    assert sorted(map(str, expected)) == ["7", "None"]
    request = ReviewRequest(
        request="0123456789abcdef", batch=1, ticket="t", uid="u", expected="7", asked=0.0, deadline=1.0
    )
    assert full_text(Review(request), 0.0).endswith("-- expected\n   7")


async def test_rubbish_on_the_stream_harms_nobody() -> None:
    world = make_world()
    await batch_of(world, "a0", "a1")
    async with world.living(operator(world)):
        await until(lambda: bool(asked(world)))
        request = asked(world)[0].request
        for number, body in enumerate([{"request": "?"}, {"request": request, "verdict": "reward"}, {"verdict": 1}]):
            await say(world, body, f"bad{number}")
        forged = {"kind": "review_closed", "request": request, "batch": 1, "ticket": "t1", "how": "timeout"}
        await say(world, {**forged, "verdict": "drop"}, "forged")
        await say(world, {"request": request, "verdict": "keep"}, "good")
        assert await until(lambda: bool(ready(world))) < 5.0
        assert await rewards(world) == {0: 0.0, 1: 1.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "choose"),
        ({"choose": {}}, "choose has no condition"),
        ({"choose": {"fraction": 2}}, "less than or equal to 1"),
        ({"choose": {"truncated": True}, "limit": 0}, "limit is 0"),
        ({"choose": {"truncated": True}, "default": "reward"}, "default"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(OperatorConfigError, match=words):
        create_operators([OperatorConfig(name="human_review", args=arguments)])


def test_the_wait_fits_into_the_time_of_the_chain() -> None:
    def config(seconds: float, *overrides: str) -> None:
        chain = [{"name": "human_review", "args": {"choose": {"truncated": True}, "seconds": seconds}}] * 2
        load_config({"name": "x", "model": {"tiny": {}}, "operator": {"operators": chain, "timeout": 800}}, overrides)

    config(300.0)
    with pytest.raises(ConfigError, match=r"human_review may wait 830 s.*operator.timeout is 800"):
        config(400.0)
    with pytest.raises(ConfigError, match=r"stall_timeout ends a run"):
        config(300.0, "explorer.stall_timeout=600", "explorer.batch_timeout=600", "explorer.max_timeout=100")
