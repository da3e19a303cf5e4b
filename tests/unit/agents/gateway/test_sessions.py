"""Sessions over restarts, lost confirms, late and foreign events: each ends in one state, and becomes a task once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from typing import Any

import pytest

from tests.unit.agents.gateway.world import (
    HOUR,
    DyingBus,
    Killed,
    World,
    config,
    end,
    reaches,
    session_of,
    state,
    until,
)
from trinity_agents.gateway.acting_gateway import task_of
from trinity_mq.bus import Envelope
from trinity_mq.config import Config
from trinity_mq.config.outsiders import OutsidersConfig
from trinity_mq.gateway.session_store import SessionsUnavailable
from trinity_mq.messages import ContentError, SessionEnd, SessionReplay, SessionReward
from trinity_mq.messages.msgpack_scan import MAX_CONTAINERS, MAX_NESTING
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_reward_that_is_an_hour_late_and_a_gateway_that_was_restarted_meanwhile() -> None:
    world = World()
    async with world.running():
        async with world.gateway() as store:
            await world.session(store, "a", traceparent=TRACE)
            await end(store, "a", None)
            assert state(store, "a") == "parked"
        await asyncio.sleep(HOUR)
        async with world.gateway() as store:
            assert state(store, "a") == "parked"
            applied = await store.report(SessionReward(session="a", reward=0.5), "late")
            assert applied.taken == "new"
            await reaches(store, "a", "trained")
            late = await store.report(SessionReward(session="a", reward=9.0), "later")
            assert late.taken == "refused"
        (task,) = world.accepted.values()
        assert task.exact_runs
        (session,) = task.task.raw_task["sessions"]
        assert (session["id"], session["reward"]) == ("a", 0.5)
        assert [headers.get("traceparent") for headers in world.headers] == [TRACE], "the caller's"


async def test_no_reward_within_its_time() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", reward_ttl=HOUR)
        await end(store, "a", None)
        await world.session(store, "silent", idle_ttl=60.0)
        await reaches(store, "silent", "parked", 100)
        await reaches(store, "a", "dropped", 2 * HOUR)
        assert session_of(store, "a").why == "no reward came within 3600 s"
        assert world.accepted == {}


@pytest.mark.parametrize("keeps_last", [False, True])
def test_the_acting_gateway_is_killed_at_each_of_its_publishes(keeps_last: bool) -> None:
    async def story(dies_at: int) -> bool:
        world = World()
        async with world.running():
            async with world.gateway(acts=False) as store:
                for number in range(3):
                    await world.session(store, f"s{number}")
                    await store.report(SessionEnd(session=f"s{number}", reward=1.0), f"end-{number}")
                await world.session(store, "never", reward_ttl=5.0)
                await end(store, "never", None)
                dying: DyingBus = world.bus(DyingBus)
                dying.dies_at, dying.keeps_last = dies_at, keeps_last
                died = False
                try:
                    async with world.gateway(bus=dying) as own:
                        await until(own, lambda: own.ledger.live == {})
                except* Killed:
                    died = True
                if died:
                    async with world.gateway() as other:
                        await until(other, lambda: other.ledger.live == {})
                await until(store, lambda: store.ledger.live == {})
                states = {one.id: one.state for one in store.ledger}
                assert states == {"s0": "trained", "s1": "trained", "s2": "trained", "never": "dropped"}
                assert len(world.accepted) == 3
        return died

    points = 0
    while run_virtually(story(points + 1)):
        points += 1
        assert points < 100
    assert points >= 10, "decisions, submissions, and what was trained"


async def test_confirms_are_lost_and_what_was_said_counts_once() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        for number in range(4):
            world.broker.lose_confirm_once()
            await store.report(SessionReward(session="a", reward=1.0, how="add"), f"r{number}")
        assert session_of(store, "a").reward == 4.0
        world.broker.lose_confirm_once()
        await end(store, "a", None)
        await reaches(store, "a", "trained")
        assert len(world.accepted) == 1
        assert "traceparent" not in world.headers[0]


async def test_rewards_come_as_json_from_any_program() -> None:
    world = World()
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a")

        async def publish(body: dict[str, Any], message_id: str, kind: str = "") -> None:
            message = Envelope(
                body=json.dumps(body).encode(),
                kind=kind,
                message_id=message_id,
                content_type="application/json",
                headers={"kind": kind} if kind else {},
            )
            await bus.publish(world.topology.exchange("sessions"), "session", message)

        await publish({"session": "a", "reward": 0.25}, "m1", "session_reward")
        await publish({"session": "a", "reward": 0.25, "how": "add"}, "m2", "session_reward")
        await publish({"session": "a", "reward": 7}, "m1", "session_reward")
        await publish({"session": "nobody", "reward": 1}, "m3", "session_reward")
        await publish({"session": "a", "reward": "much"}, "m4", "session_reward")
        await publish({"what": "ever"}, "m5")
        forged = {"kind": "sessions_decided", "sessions": ["a"], "dropped": "discarded"}
        await publish(forged, "m7", "sessions_decided")
        replay = {"workflow": "async_simple_workflow", "runs": 2}
        await publish({"session": "a", "replay": replay}, "m8", "session_end")
        await publish({"session": "a", "reward": 1, "metrics": {"reward": 9}}, "m9", "session_reward")
        await publish({"session": "a", "reward": 1, "metrics": {"tries": 1e300}}, "m10", "session_reward")
        await publish({"session": "a", "reward": 1e300}, "m11", "session_end")
        for session in ("a", "unknown"):  # as text the number passes where an integer is wanted
            digits = {"session": session, "reward": 1, "choice": "9" * 30}
            await publish(digits, f"digits-{session}", "session_reward")
        await publish({"kind": "session_end", "session": "a"}, "m6")
        await reaches(store, "a", "trained")
        found = session_of(store, "a")
        assert (found.reward, found.metrics) == (0.5, {})
        assert found.replay is None, "a rewarder may not replay"
        await until(store, lambda: len(world.dead) == 10)
    assert sum("an integer of 100 bits" in reason for reason in world.dead) == 2
    assert sorted(reason[:24] for reason in world.dead if "100 bits" not in reason) == [
        "does not decode: a repla",
        "does not decode: a sessi",
        "does not decode: metric ",
        "does not decode: metric ",
        "does not decode: reward ",
        "does not decode: session",
        "does not decode: unknown",
        "no session 'nobody' is k",
    ]
    async with world.running(), world.gateway() as store:
        await world.session(store, "b")
        await end(store, "b")
        await reaches(store, "b", "trained")
        assert len(world.dead) == 10, "told once, whoever reads the stream anew"


async def test_two_gateways_know_the_same() -> None:
    world, draw = World(), random.Random(1)
    async with world.running(), world.gateway() as one, world.gateway(acts=False) as other:
        for number in range(20):
            store = draw.choice([one, other])
            await world.session(store, f"s{number}")
            assert await other.find(f"s{number}") is not None
            await draw.choice([one, other]).report(SessionEnd(session=f"s{number}", reward=1.0), f"end-{number}")
        await until(one, lambda: one.ledger.live == {})
        await until(other, lambda: other.ledger.live == {})
        assert {one.id: one.state for one in one.ledger} == {one.id: one.state for one in other.ledger}
        assert await other.find("nobody") is None


async def test_answers_do_not_wait_for_a_broker_that_takes_nothing() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        world.broker.block()
        began = asyncio.get_running_loop().time()
        assert not await store.record(world.call("a", 2))
        assert asyncio.get_running_loop().time() == began
        with pytest.raises(SessionsUnavailable, match="the broker is not available: the broker blocks publishers"):
            await store.report(SessionReward(session="a", reward=1.0), "r")
        assert asyncio.get_running_loop().time() - began == pytest.approx(2.0)
        world.broker.unblock()
        await until(store, lambda: len(store.ledger.live["a"].calls) == 2)


ASKED = {"messages": [{"role": "user", "content": "2+3?"}], "tools": []}
PROMPTED = {"prompt": "2+3?", "question": "other", "env_args": {"path": "/"}, "seed": 1}
STRANGE = [7, None, {"role": "user", "content": "4+5?"}]


@pytest.mark.parametrize(
    ("request_body", "record"),
    [
        pytest.param(ASKED, {"question": "2+3?", **ASKED}, id="messages"),
        pytest.param(PROMPTED, {"question": "2+3?", "prompt": "2+3?"}, id="no other keys of the request"),
        pytest.param({**PROMPTED, "messages": 7}, {"question": "2+3?"}, id="of a stranger: a number"),
        pytest.param({**PROMPTED, "messages": STRANGE}, {"question": "4+5?"}, id="of a stranger: a list"),
    ],
)
async def test_the_task_of_a_replay(request_body: dict[str, Any], record: dict[str, Any]) -> None:
    opened = OutsidersConfig(workflows={"math_workflow": ("x",)})
    world = World(config(group_size=None).model_copy(update={"outsiders": opened}))
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", task={"answer": "5"})
        session = session_of(store, "a")
        call = next(iter(session.calls))
        session.calls[call] = session.calls[call].model_copy(update={"request": request_body})
        await end(store, "a", None, replay=SessionReplay(workflow="math_workflow", runs=4, workflow_args={"x": 1}))
        task = task_of([session], world.config)
        assert (task.workflow, task.repeat_times, task.workflow_args) == ("math_workflow", 4, {"x": 1})
        assert task.record_args == []
        if isinstance(request_body.get("messages", []), list) and request_body.get("messages") is not STRANGE:
            assert task.raw_task == {**record, "answer": "5"}
        assert task.raw_task["question"] == record["question"]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


REPLAY = SessionReplay(workflow="async_simple_workflow", runs=2)
NOT_OPEN = SessionReplay(workflow="program_workflow", runs=2, workflow_args={"command": ["true"]})


@pytest.mark.parametrize(
    ("session", "replay", "reasons"),
    [
        pytest.param({"calls": 5, "size": 3000}, None, ["broker.max_message_bytes"], id="too large"),
        pytest.param({}, NOT_OPEN, ["outsiders.workflows"], id="not open"),
        # a session may hold it: there it is one level less deep
        pytest.param(
            {"task": {"x": nested(MAX_NESTING - 2)}},
            REPLAY,
            ["task_submission.task.raw_task.x", "more than 64 levels"],
            id="too deep",
        ),
    ],
)
async def test_a_task_that_cannot_be_submitted_is_dropped_with_its_reason(
    session: dict[str, Any], replay: SessionReplay | None, reasons: list[str]
) -> None:
    """Whoever wrote it to the stream, such as a gateway of another configuration."""
    settings = config(group_size=None).model_dump(mode="json", exclude_unset=True)
    world = World(Config.model_validate({**settings, "broker": {"max_message_bytes": 64 * 1024}}))
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", **session)
        await end(store, "a", None if replay else 1.0, replay=replay)
        await reaches(store, "a", "dropped")
        assert [reason for reason in reasons if reason not in session_of(store, "a").why] == []
        assert world.accepted == {}
        await world.session(store, "b")
        await end(store, "b")
        await reaches(store, "b", "trained")


async def test_an_explorer_that_lost_a_submission_gets_it_again() -> None:
    world = World()
    world.answers = False
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a")
        await end(store, "a")
        await asyncio.sleep(10)
        assert world.submissions == 1
        await asyncio.sleep(1500)
        assert world.submissions == 3
        (message,) = world.accepted.values()
        await world.close_batch(bus, message)
        await reaches(store, "a", "trained")


async def test_what_cannot_travel_is_not_recorded_and_the_gateway_goes_on() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        for value in (10**30, "\ud800", {1: 2}, object(), nested(70), {1, 2}):
            call = world.call("a", 2)
            assert not await store.record(call.model_copy(update={"request": {"tools": [{"x": value}]}}))
        with pytest.raises(ContentError, match=r"session_reward\.choice: an integer of 100 bits"):
            await store.report(SessionReward(session="a", reward=1.0, choice=10**30), "reward-a")
        with pytest.raises(ContentError, match=r"session_opened\.task\.x: half a surrogate pair"):
            await world.session(store, "b", task={"x": "\ud800"})
        assert store.ledger.get("b") is None
        assert await store.record(world.call("a", 2))
        await end(store, "a")
        await reaches(store, "a", "trained")


async def test_an_event_that_cannot_be_written_again_is_not_carried_and_the_others_are() -> None:
    """An earlier release wrote it, and it is at the limits of a body: what is written again has more fields."""
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", task={"x": 1})
        found = session_of(store, "a")
        opened, called = found.events
        body = opened.body.model_copy(update={"task": {"x": [[]] * MAX_CONTAINERS}})
        before = store.position
        for event in (dataclasses.replace(opened, body=body), called):
            await store.republish(event)
        await store.catch_up()
        assert 0 < store.position - before < 1000, "the call alone"
