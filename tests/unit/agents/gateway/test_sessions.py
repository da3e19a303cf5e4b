"""Sessions over restarts, lost confirms, late and foreign events: each ends in one state, and becomes a task once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from typing import Any

import pytest

from tests.unit.agents.gateway.world import HOUR, DyingBus, Killed, World, config, until
from tests.virtual import virtually
from trinity_agents.gateway.acting_gateway import task_of
from trinity_mq.bus import Envelope
from trinity_mq.config.outsiders import OutsidersConfig
from trinity_mq.gateway.session_store import SessionsUnavailable
from trinity_mq.messages import ContentError, SessionEnd, SessionReplay, SessionReward
from trinity_mq.messages.msgpack_scan import MAX_CONTAINERS, MAX_NESTING
from trinity_mq.testing.virtual_time import run_virtually


def state(store: Any, name: str) -> str:
    found = store.ledger.get(name)
    assert found is not None
    return str(found.state)


@virtually
async def test_a_reward_that_is_an_hour_late_and_a_gateway_that_was_restarted_meanwhile() -> None:
    world = World()
    async with world.running():
        async with world.gateway() as store:
            await world.session(store, "a")
            await store.report(SessionEnd(session="a"), "end-a")
            assert state(store, "a") == "parked"
        await asyncio.sleep(HOUR)
        async with world.gateway() as store:
            assert state(store, "a") == "parked"
            applied = await store.report(SessionReward(session="a", reward=0.5), "late")
            assert applied.taken == "new"
            await until(store, lambda: state(store, "a") == "trained")
            late = await store.report(SessionReward(session="a", reward=9.0), "later")
            assert late.taken == "refused"
        (task,) = world.accepted.values()
        assert task.exact_runs
        (session,) = task.task.raw_task["sessions"]
        assert (session["id"], session["reward"]) == ("a", 0.5)


@virtually
async def test_the_task_of_a_traced_session_names_the_callers_trace() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    world = World()
    async with world.running(), world.gateway() as store:
        for name, given in (("traced", traceparent), ("silent", "")):
            await world.session(store, name, traceparent=given)
            await store.report(SessionEnd(session=name, reward=1.0), f"end-{name}")
            await until(store, lambda name=name: state(store, name) == "trained")  # type: ignore[misc]
    assert [headers.get("traceparent") for headers in world.headers] == [traceparent, None]


@virtually
async def test_no_reward_within_its_time() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", reward_ttl=HOUR)
        await store.report(SessionEnd(session="a"), "end-a")
        await world.session(store, "silent", idle_ttl=60.0)
        await until(store, lambda: state(store, "silent") == "parked", 100)
        await until(store, lambda: state(store, "a") == "dropped", 2 * HOUR)
        found = store.ledger.get("a")
        assert found is not None
        assert found.why == "no reward came within 3600 s"
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
                await store.report(SessionEnd(session="never"), "end-never")
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


@virtually
async def test_confirms_are_lost_and_what_was_said_counts_once() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        for number in range(4):
            world.broker.lose_confirm_once()
            await store.report(SessionReward(session="a", reward=1.0, how="add"), f"r{number}")
        found = store.ledger.get("a")
        assert found is not None
        assert found.reward == 4.0
        world.broker.lose_confirm_once()
        await store.report(SessionEnd(session="a"), "end-a")
        await until(store, lambda: state(store, "a") == "trained")
        assert len(world.accepted) == 1


@virtually
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
        await publish({"kind": "session_end", "session": "a"}, "m6")
        await until(store, lambda: state(store, "a") == "trained")
        found = store.ledger.get("a")
        assert found is not None
        assert (found.reward, found.metrics) == (0.5, {})
        assert found.replay is None, "a rewarder may not replay"
        await until(store, lambda: len(world.dead) == 8)
    assert sorted(reason[:24] for reason in world.dead) == [
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
        await store.report(SessionEnd(session="b", reward=1.0), "end-b")
        await until(store, lambda: state(store, "b") == "trained")
        assert len(world.dead) == 8, "told once, whoever reads the stream anew"


@virtually
async def test_sessions_that_wait_outlive_the_retention_of_the_stream() -> None:
    world = World(sessions_max_bytes=40_000)
    async with world.running(), world.gateway() as store:
        await world.session(store, "old", calls=3)
        await store.report(SessionReward(session="old", reward=0.5), "r-old")
        await store.report(SessionReward(session="old", reward=0.25, how="add"), "r2-old")
        for number in range(60):  # several times what the stream keeps
            await world.session(store, f"s{number}", size=100)
            await store.report(SessionEnd(session=f"s{number}", reward=1.0), f"end-s{number}")
            await until(store, lambda name=f"s{number}": state(store, name) == "trained")  # type: ignore[misc]
        assert store.position > 2 * 40_000
        async with world.gateway(acts=False) as fresh:
            found, known = fresh.ledger.get("old"), store.ledger.get("old")
            assert found is not None
            assert known is not None
            assert (found.state, found.reward, list(found.calls)) == ("open", 0.75, list(known.calls))
            assert await store.report(SessionEnd(session="old"), "end-old")
            await until(fresh, lambda: state(fresh, "old") == "trained")


@virtually
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


@virtually
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


@virtually
async def test_the_task_of_a_replay() -> None:
    opened = OutsidersConfig(workflows={"math_workflow": ("x",)})
    world = World(config(group_size=None).model_copy(update={"outsiders": opened}))
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", task={"answer": "5"})
        found = store.ledger.get("a")
        assert found is not None
        asked = {"messages": [{"role": "user", "content": "2+3?"}], "tools": []}
        call = next(iter(found.calls))
        found.calls[call] = found.calls[call].model_copy(update={"request": asked})
        replay = SessionReplay(workflow="math_workflow", runs=4, workflow_args={"x": 1})
        await store.report(SessionEnd(session="a", replay=replay), "end-a")
        task = task_of([found], world.config)
        assert (task.workflow, task.repeat_times, task.workflow_args) == ("math_workflow", 4, {"x": 1})
        assert task.raw_task == {"question": "2+3?", **asked, "answer": "5"}


@virtually
async def test_a_replay_that_is_not_open_is_dropped_with_its_reason() -> None:
    """Whoever wrote it to the stream, such as a gateway of another configuration."""
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        replay = SessionReplay(workflow="program_workflow", runs=2, workflow_args={"command": ["true"]})
        await store.report(SessionEnd(session="a", replay=replay), "end-a")
        await until(store, lambda: state(store, "a") == "dropped")
        found = store.ledger.get("a")
        assert found is not None
        assert "outsiders.workflows" in found.why
        assert world.accepted == {}


@virtually
async def test_the_record_of_a_replay_has_no_other_keys_of_the_request() -> None:
    world = World(config(group_size=None))
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", task={"answer": "5"})
        found = store.ledger.get("a")
        assert found is not None
        call = next(iter(found.calls))
        asked = {"prompt": "2+3?", "question": "other", "env_args": {"path": "/"}, "seed": 1}
        found.calls[call] = found.calls[call].model_copy(update={"request": asked})
        await store.report(SessionEnd(session="a", replay=SessionReplay(workflow="async_simple_workflow", runs=2)), "e")
        task = task_of([found], world.config)
        assert task.raw_task == {"question": "2+3?", "prompt": "2+3?", "answer": "5"}
        assert task.record_args == []
        for messages, question in ((7, "2+3?"), ([7, None, {"role": "user", "content": "4+5?"}], "4+5?")):
            request = {**asked, "messages": messages}  # as a stranger may write it to the stream
            found.calls[call] = found.calls[call].model_copy(update={"request": request})
            assert task_of([found], world.config).raw_task["question"] == question


@virtually
async def test_a_task_that_is_too_large_is_dropped_with_its_reason() -> None:
    settings = World().config.model_dump(mode="json", exclude_unset=True)
    settings["broker"] = {"max_message_bytes": 64 * 1024}
    world = World(type(World().config).model_validate(settings))
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", calls=5, size=3000)
        await store.report(SessionEnd(session="a", reward=1.0), "end-a")
        await until(store, lambda: state(store, "a") == "dropped")
        found = store.ledger.get("a")
        assert found is not None
        assert "broker.max_message_bytes" in found.why
        assert world.accepted == {}


@virtually
async def test_an_explorer_that_lost_a_submission_gets_it_again() -> None:
    world = World()
    world.answers = False
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a")
        await store.report(SessionEnd(session="a", reward=1.0), "end-a")
        await asyncio.sleep(10)
        assert world.submissions == 1
        await asyncio.sleep(1500)
        assert world.submissions == 3
        (message,) = world.accepted.values()
        await world.close_batch(bus, message)
        await until(store, lambda: state(store, "a") == "trained")


@virtually
async def test_a_call_that_cannot_travel_is_not_recorded_and_the_gateway_goes_on() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        for value in (10**30, "\ud800", {1: 2}, object(), nested(70), {1, 2}):
            call = world.call("a", 2)
            assert not await store.record(call.model_copy(update={"request": {"tools": [{"x": value}]}}))
        assert await store.record(world.call("a", 2))
        await store.report(SessionEnd(session="a", reward=1.0), "end-a")
        await until(store, lambda: state(store, "a") == "trained")


@virtually
async def test_an_event_that_cannot_travel_is_refused_and_is_not_waited_for() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        with pytest.raises(ContentError, match=r"session_reward\.choice: an integer of 100 bits"):
            await store.report(SessionReward(session="a", reward=1.0, choice=10**30), "reward-a")
        with pytest.raises(ContentError, match=r"session_opened\.task\.x: half a surrogate pair"):
            await world.session(store, "b", task={"x": "\ud800"})
        assert store.ledger.get("b") is None


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@virtually
async def test_a_replay_that_nests_too_deep_in_a_submission_is_dropped_with_its_reason() -> None:
    """A session may hold it: there it is one level less deep."""
    world = World(config(group_size=None))
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", task={"x": nested(MAX_NESTING - 2)})
        replay = SessionReplay(workflow="async_simple_workflow", runs=2)
        await store.report(SessionEnd(session="a", replay=replay), "end-a")
        await until(store, lambda: state(store, "a") == "dropped")
        found = store.ledger.get("a")
        assert found is not None
        assert "task_submission.task.raw_task.x" in found.why
        assert "more than 64 levels" in found.why
        await world.session(store, "b")
        await store.report(SessionEnd(session="b", reward=1.0), "end-b")
        await until(store, lambda: state(store, "b") == "trained")


@pytest.mark.parametrize("session", ["a", "unknown"])
@virtually
async def test_a_reward_of_digits_beyond_64_bits_becomes_a_dead_letter(session: str) -> None:
    """As text the number passes where an integer is wanted, and the gateway could not pass it on."""
    world = World()
    async with world.running() as outside, world.gateway() as store:
        await world.session(store, "a")
        body = json.dumps({"kind": "session_reward", "session": session, "reward": 1, "choice": "9" * 30})
        message = Envelope(body=body.encode(), kind="session_reward", content_type="application/json")
        await outside.publish(world.topology.exchange("sessions"), "session", message)
        await asyncio.sleep(HOUR / 2)
        assert [reason for reason in world.dead if "an integer of 100 bits" in reason] == world.dead != []
        assert state(store, "a") == "open"


@virtually
async def test_an_event_that_cannot_be_written_again_is_not_carried_and_the_others_are() -> None:
    """An earlier release wrote it, and it is at the limits of a body: what is written again has more fields."""
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a", task={"x": 1})
        found = store.ledger.get("a")
        assert found is not None
        opened, called = found.events
        body = opened.body.model_copy(update={"task": {"x": [[]] * MAX_CONTAINERS}})
        before = store.position
        for event in (dataclasses.replace(opened, body=body), called):
            await store.republish(event)
        await store.catch_up()
        assert 0 < store.position - before < 1000, "the call alone"
