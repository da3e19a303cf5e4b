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
    RUN,
    SMALL,
    DyingBus,
    Killed,
    World,
    config,
    end,
    live_on,
    reaches,
    session_of,
    state,
    until,
)
from trinity_agents.gateway.acting_gateway import RESUBMIT_SECONDS, task_of
from trinity_agents.gateway.agent import Gateway
from trinity_agents.gateway.session_stream import SessionStream
from trinity_mq.bus import BusUnavailable, Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.topology import BY_GATEWAY
from trinity_mq.config import Config
from trinity_mq.config.outsiders import OutsidersConfig
from trinity_mq.gateway.conversations import Conversations
from trinity_mq.gateway.ledger import _task
from trinity_mq.gateway.session import Session
from trinity_mq.gateway.session_store import SessionsUnavailable
from trinity_mq.messages import (
    ContentError,
    SampledChoice,
    SessionCall,
    SessionEnd,
    SessionReplay,
    SessionReward,
    SubmissionOutcome,
)
from trinity_mq.messages.msgpack_scan import MAX_CONTAINERS, MAX_NESTING
from trinity_mq.messages.sessions import StoredResponse
from trinity_mq.runtime.deliveries import envelope
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


async def test_every_gateway_knows_lineages_stored_responses_and_their_rewards_from_the_stream() -> None:
    world = World()
    answer = SampledChoice(ids=[3], logprobs=[0.0], conversation="digest")
    stored = StoredResponse(
        messages=[{"role": "user", "content": "2+3?"}], answer={"role": "assistant", "content": "5"}
    )
    first = SessionCall(session="a", call="resp_1", at=1.0, prompt=[1, 2], choices=[answer], stored=stored)
    second = SessionCall(session="a", call="resp_2", at=2.0, continues="resp_1", prompt=[4], choices=[answer])
    async with world.running(), world.gateway() as one:
        async with world.gateway(acts=False) as other:
            await world.session(one, "a", calls=0)
            assert await one.record(first)
            assert await one.record(second)
            assert await other.find_call("a", "resp_2") == second
            assert await other.find_call("a", "resp_3") is None
            assert await other.find_call("b", "resp_1") is None
            await other.report(SessionReward(session="a", reward=0.5, lineage="resp_2"), "r")
        async with world.gateway(acts=False) as restarted:
            session = session_of(restarted, "a")
            conversation = Conversations().of(session)
            place = conversation.lineages.place([1, 2, 3, 4, 3, 9], "", 1.0, None)
            assert place.continued is not None
            assert (place.continued.call, place.break_cause) == ("resp_2", "")
            assert conversation.responses.messages("resp_1", session.calls) == [*stored.messages, stored.answer]
            assert session.lineage_rewards == {"resp_1": 0.5}
        await end(one, "a", None)
        await reaches(one, "a", "trained")
        [submission] = world.accepted.values()
        assert submission.task.raw_task["sessions"][0]["lineage_rewards"] == {"resp_1": 0.5}


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
    """An earlier release wrote it, and it is at the limits of a body: what is written again has more fields. Or
    ``broker.max_message_bytes`` was larger.
    """
    world = World()
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a", task={"x": 1})
        found = session_of(store, "a")
        opened, called = found.events
        before = store.position
        for value in ([[]] * MAX_CONTAINERS, "x" * bus.max_message_bytes):
            body = opened.body.model_copy(update={"task": {"x": value}})
            await store.republish(dataclasses.replace(opened, body=body))
        await store.republish(called)
        await store.catch_up()
        assert 0 < store.position - before < 1000, "the call alone"


GROUP: dict[str, Any] = {"group": "g", "group_size": 2}


def queued(world: World) -> list[str]:
    messages = world.broker.queues[world.topology.submitted.name].messages  # type: ignore[attr-defined]
    return [str(message.message_id) for message in messages]


async def test_a_gateway_that_is_back_after_retention_builds_its_sessions_anew() -> None:
    world, second_bus = World(sessions_max_bytes=SMALL), None
    async with world.running():
        second_bus = world.bus()
        async with world.gateway(acts=False, bus=second_bus) as second:
            async with world.gateway() as first:
                await world.session(first, "s1", **GROUP)
                await end(first, "s1")
                await world.session(first, "stays", idle_ttl=9 * HOUR)
                await until(second, lambda: second.ledger.get("stays") is not None)
                world.broker.drop(second_bus, delay=None)
                await world.session(first, "s2", **GROUP)
                await end(first, "s2")
                await reaches(first, "s2", "trained")
                await live_on(world, first)
                world.broker.restore(second_bus)
                await until(second, lambda: not second.is_ready())
                await until(second, second.is_ready)
                assert set(second.ledger.live) == {"stays"}
                lost = session_of(second, "s1")
                assert "retention" in lost.why
                assert (await second.report(SessionReward(session="s1", reward=9.0), "late")).taken == "refused"
            task = asyncio.create_task(world.acting(second_bus, second, agent_id="gateway-1").run())
            await world.session(second, "s3", **GROUP)
            await end(second, "s3", 0.5)
            await asyncio.sleep(60)
            task.cancel()
            assert state(second, "s3") == "parked"
    records = [message.task.raw_task["sessions"] for message in world.accepted.values()]
    assert [[session["id"] for session in record] for record in records] == [["s1", "s2"]]


async def test_a_gateway_decides_nothing_while_it_builds_its_sessions_anew() -> None:
    world, reads = World(), [False]

    class Reading(SessionStream):
        def is_ready(self) -> bool:
            return not reads[0] and super().is_ready()

    bus = world.bus()
    async with world.running(), world.gateway(acts=False, bus=bus, kind=Reading) as store:
        await world.session(store, "a")
        await end(store, "a")
        acting = world.acting(bus, store)
        reads[0] = True
        await acting.once()
        assert state(store, "a") == "parked"
        reads[0] = False
        await acting.once()
        assert state(store, "a") == "queued"


async def test_a_frozen_gateway_does_not_bring_back_what_was_settled_meanwhile() -> None:
    world = World(sessions_max_bytes=SMALL)
    bus = world.bus()

    def events() -> list[Any]:
        return list(world.broker.queues[world.topology.sessions.name].messages)  # type: ignore[attr-defined]

    async with world.running(), world.gateway() as first, world.gateway(acts=False, bus=bus) as frozen:
        await world.session(first, "a")
        await until(frozen, lambda: frozen.ledger.get("a") is not None)
        holds = [False]  # its connection is lost: it learns so when it publishes its mark
        acting = world.acting(bus, frozen, agent_id="frozen", may_act=lambda: holds[0])
        frozen.position += SMALL
        published = len(events())
        await acting.once()
        assert {message.headers["kind"] for message in events()[published:]} == {"mark"}
        holds[0] = True
        await acting.once()
        repeated = [message.message_id for message in events()[published:] if message.headers["kind"] != "mark"]
        assert repeated == ["opened-a", "call-a-call-0"]


async def test_a_task_waits_in_the_queue_once_however_long_training_is_behind() -> None:
    world = World()
    async with world.alone(), world.gateway() as store:
        for number in range(20):
            await world.session(store, f"s{number}")
            await end(store, f"s{number}")
        await asyncio.sleep(12 * HOUR)
        assert len(queued(world)) == len(set(queued(world))) == 20
    for _ in range(5):  # gateways come and go meanwhile
        async with world.gateway():
            await asyncio.sleep(2 * RESUBMIT_SECONDS)
    assert len(queued(world)) == len(set(queued(world))) == 20


@pytest.mark.parametrize("deleted", [False, True])
async def test_tasks_whose_queue_was_emptied_are_submitted_again(deleted: bool) -> None:
    world = World()
    async with world.alone(), world.gateway() as store:
        for number in range(5):
            await world.session(store, f"s{number}")
            await end(store, f"s{number}")
        await until(store, lambda: store.ledger.waiting == 5)
        await asyncio.sleep(10)
        before = queued(world)
        if deleted:
            world.broker.delete(world.topology.submitted.name)
        else:
            world.broker.queues[world.topology.submitted.name].purge()  # type: ignore[attr-defined]
        await asyncio.sleep(2 * RESUBMIT_SECONDS)
        assert sorted(queued(world)) == sorted(before)


class FullBus(MemoryBus):
    """A bus whose broker takes no submissions."""

    is_full = True
    refused = 0

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        if routing_key == BY_GATEWAY and self.is_full:
            self.refused += 1
            await asyncio.sleep(timeout or 300.0)
            raise BusUnavailable("not confirmed in time: the queue is full")
        return await super().publish(exchange, routing_key, envelope, timeout=timeout)


async def test_a_full_queue_holds_nothing_else_up() -> None:
    world = World()
    bus: FullBus = world.bus(FullBus)
    async with world.running(), world.gateway(bus=bus) as store:
        await world.session(store, "a")
        await end(store, "a")
        await until(store, lambda: bus.refused == 1)
        await world.session(store, "b", record="eval")
        await end(store, "b")
        await reaches(store, "b", "evaluated", 30)
        await asyncio.sleep(300)
        assert 5 < bus.refused < 20
        bus.is_full = False
        await reaches(store, "a", "trained")


class AwayOnce(MemoryBus):
    """A bus that fails once, at the first operation of a kind: the query of a depth, a dead letter or a copy."""

    fails_at: str | None = None

    def _pass(self, operation: str) -> None:
        if operation == self.fails_at:
            self.fails_at = None
            raise BusUnavailable("away for a moment")

    async def depth(self, queue: str) -> int | None:
        self._pass("depth")
        return await super().depth(queue)

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        for header, operation in (("dead-reason", "dead letter"), ("origin", "copy")):
            if header in envelope.headers:
                self._pass(operation)
        return await super().publish(exchange, routing_key, envelope, timeout=timeout)


async def test_an_outage_loses_no_task_of_an_earlier_gateway() -> None:
    world = World()
    full, bus = world.bus(FullBus), world.bus(AwayOnce)
    bus.fails_at = "depth"
    async with world.running():
        async with world.gateway(bus=full) as store:
            await world.session(store, "a")
            await end(store, "a")
            await until(store, lambda: full.refused == 1)
        async with world.gateway(bus=bus) as store:
            await reaches(store, "a", "trained")


@pytest.mark.parametrize("session", ["trained", "nobody"])
async def test_an_outage_loses_no_refused_message(session: str) -> None:
    world = World()
    away = world.bus(AwayOnce)
    away.fails_at = "dead letter"
    async with world.running() as bus, world.gateway(bus=away) as store:
        await world.session(store, "trained")
        await end(store, "trained")
        await reaches(store, "trained", "trained")
        await reward(bus, world, "late", session=session, reward=1.0)
        await asyncio.sleep(30)
        assert away.fails_at is None
        assert len(world.dead) == 1


async def test_an_outage_while_sessions_are_carried_leaves_none_behind() -> None:
    world = World(sessions_max_bytes=SMALL)
    world.answers = False
    bus = world.bus(AwayOnce)
    async with world.running() as outside, world.gateway(acts=False, bus=bus) as store:
        await world.session(store, "a")
        await end(store, "a")
        acting = world.acting(bus, store)
        await acting.once()
        await until(store, lambda: state(store, "a") == "queued" and len(world.accepted) == 1)
        (message,) = world.accepted.values()
        outcome = SubmissionOutcome(
            submission_id=message.submission_id or "", batch=1, ticket="t", outcome="finished", completed_runs=1
        )
        await outside.publish(world.topology.exchange("sessions"), "outcome", envelope(outcome, message_id="o"))
        await reaches(store, "a", "batched")
        stream = world.broker.queues[world.topology.sessions.name]
        store.position += SMALL
        before, bus.fails_at = len(stream.messages), "copy"  # type: ignore[attr-defined]
        with pytest.raises(BusUnavailable):
            await acting.once()
        await acting.once()
        kinds = [message.headers["kind"] for message in list(stream.messages)[before:]]  # type: ignore[attr-defined]
        assert {"session_opened", "session_call", "session_end", "submission_outcome"} <= set(kinds)


async def test_the_outcome_of_a_batch_outlives_the_retention_of_the_stream() -> None:
    world = World(sessions_max_bytes=SMALL)
    world.answers = False
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a")
        await end(store, "a")
        await until(store, lambda: len(world.accepted) == 1)
        (message,) = world.accepted.values()
        outcome = SubmissionOutcome(
            submission_id=message.submission_id or "", batch=1, ticket="t", outcome="finished", completed_runs=1
        )
        await bus.publish(world.topology.exchange("sessions"), "outcome", envelope(outcome, message_id="o"))
        await reaches(store, "a", "batched")
        await live_on(world, store)
        async with world.gateway(acts=False) as fresh:
            assert state(fresh, "a") == "batched"
            assert session_of(fresh, "a").batch == outcome


# -- time


async def test_limits_of_time_stand_still_while_the_broker_is_away() -> None:
    world = World()
    bus = world.bus()
    async with world.running(), world.gateway(bus=bus) as store:
        await world.session(store, "asks")
        await world.session(store, "waits", reward_ttl=HOUR)
        await end(store, "waits", None)
        world.broker.drop(bus, delay=None)
        for _ in range(65):
            await asyncio.sleep(60)
            await store.record(world.call("asks", 2))
        with pytest.raises(SessionsUnavailable):
            await store.report(SessionReward(session="waits", reward=1.0), "r")
        world.broker.restore(bus)
        await asyncio.sleep(60)
        assert (state(store, "asks"), state(store, "waits")) == ("open", "parked")
        await reaches(store, "waits", "dropped", HOUR)


async def test_limits_of_time_stand_still_while_no_gateway_runs() -> None:
    world = World()
    async with world.running():
        async with world.gateway() as store:
            await world.session(store, "a", reward_ttl=10 * HOUR)
            await end(store, "a", None)
            await asyncio.sleep(4 * HOUR)
        await asyncio.sleep(60 * HOUR)
        async with world.gateway() as store:
            await asyncio.sleep(5 * HOUR)
            assert state(store, "a") == "parked"
        await asyncio.sleep(60 * HOUR)
        async with world.gateway() as store:
            await asyncio.sleep(0.5 * HOUR)
            assert state(store, "a") == "parked"
            await reaches(store, "a", "dropped", HOUR)


async def test_limits_of_time_stand_still_while_the_acting_gateway_is_frozen() -> None:
    world = World()
    async with world.running(), world.gateway() as store:
        await world.session(store, "a")
        world.ahead = 2 * HOUR
        await asyncio.sleep(10)
        assert state(store, "a") == "open"


async def test_what_is_carried_is_as_old_as_it_was() -> None:
    world = World(sessions_max_bytes=SMALL)
    async with world.running():
        async with world.gateway() as store:
            await world.session(store, "a", reward_ttl=5 * HOUR)
            await end(store, "a", None)
            await asyncio.sleep(2 * HOUR)
        await asyncio.sleep(60 * HOUR)
        async with world.gateway() as store:
            await live_on(world, store)
        async with world.gateway() as store:
            await asyncio.sleep(2.5 * HOUR)
            assert state(store, "a") == "parked"
            await reaches(store, "a", "dropped", HOUR)


async def test_times_are_whole_seconds_for_release_0_1_0_and_exact_for_us() -> None:
    world = World()
    async with world.running() as bus, world.gateway(acts=False) as store:
        await asyncio.sleep(0.75)
        await world.session(store, "a", calls=0)
        stream = world.broker.queues[world.topology.sessions.name].messages  # type: ignore[attr-defined]
        headers = stream[-1].headers
        exact = headers["at-ms"]
        assert isinstance(exact, int)
        assert exact / 1000 == pytest.approx(world.clock(), abs=0.5)
        assert headers["at"] == round(exact / 1000)
        assert type(headers["at"]) is int
        session = session_of(store, "a")
        assert session.last_at == exact / 1000
        old = envelope(SessionEnd(session="a"), message_id="end-a", headers={"at": 1e9 + 7.5})
        await bus.publish(world.topology.exchange("sessions"), "event", old)
        await until(store, lambda: session.end is not None)
        assert session.ended_at == 1e9 + 7.5


async def reward(bus: Any, world: World, message_id: str = "", **body: Any) -> None:
    raw = json.dumps(body).encode()
    given: dict[str, Any] = {"message_id": message_id} if message_id else {}
    message = Envelope(body=raw, kind="session_reward", content_type="application/json", **given)
    await bus.publish(world.topology.exchange("sessions"), "session", message)


async def test_a_message_of_the_largest_size_that_no_session_takes_does_not_end_the_gateway() -> None:
    world = World()
    async with world.running() as bus, world.gateway() as store:
        most = bus.max_message_bytes
        await reward(bus, world, "nobody", session="s" * (most - 40), reward=1.0)  # larger as MessagePack
        await reward(bus, world, "somebody", session="s" * (most - 1000), reward=1.0)
        await asyncio.sleep(30)
        assert [len(reason) for reason in world.dead] == [1000]
        assert not store.ledger.unknown_events()
        await world.session(store, "a")
        await end(store, "a")
        await reaches(store, "a", "trained")


class SlowBus(MemoryBus):
    """A bus whose broker confirms after a second."""

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        await asyncio.sleep(1.0)
        return await super().publish(exchange, routing_key, envelope, timeout=timeout)


async def test_many_refused_messages_do_not_hold_sessions_up() -> None:
    world = World()
    async with world.running() as bus, world.gateway(bus=world.bus(SlowBus)) as store:
        await world.session(store, "a")
        for number in range(100):
            await reward(bus, world, f"m{number}", session=f"nobody-{number}", reward=1.0)
        await end(store, "a")
        await reaches(store, "a", "trained", 60)
        assert len(world.dead) == 100


async def test_refused_rewards_become_dead_letters_once() -> None:
    world = World()
    async with world.running() as bus:
        async with world.gateway() as store:
            await world.session(store, "s1")
            await world.session(store, "s2")
            await reward(bus, world, "first", session="s1", reward=1.0, final=True)
            await reaches(store, "s1", "trained")
            await reward(bus, world, "late", session="s1", reward=-1.0)
            await reward(bus, world, "first", session="s1", reward=1.0)  # its confirm was lost
            await reward(bus, world, "typo", session="s2", reward=1.0, call="chatcmpl-typo")
            await reward(bus, world, "nobody", session="s3", reward=1.0)
            await asyncio.sleep(30)
        async with world.gateway() as store:
            await asyncio.sleep(30)
        assert sorted(reason[:23] for reason in world.dead) == [
            "no session 's3' is know",
            "session s1 is trained i",
            "session s2 has no call ",
        ]


@pytest.mark.parametrize("taken", ["decided", "end-a-idle", "opened-b", "call", "end-a"])
async def test_the_id_of_an_outsiders_message_blocks_nothing_of_ours(taken: str) -> None:
    world = World()
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a", idle_ttl=60.0)
        call = world.call("a", 2)
        ids = {"decided": f"decided-{_task([Session('a')]).submission}", "call": call.message_id}
        await reward(bus, world, ids.get(taken, taken), session="a", reward=0.5)
        await until(store, lambda: store.ledger.live["a"].has_reward)
        assert await store.record(call)
        await until(store, lambda: len(store.ledger.live["a"].calls) == 2)
        await world.session(store, "b")
        if taken == "end-a":
            await end(store, "a", None)
        await reaches(store, "a", "trained", 120)
        assert state(store, "b") == "open"


async def test_an_outsiders_reward_that_was_carried_counts_once() -> None:
    world = World(sessions_max_bytes=SMALL)
    async with world.running() as bus, world.gateway() as store:
        await world.session(store, "a")
        await reward(bus, world, "r", session="a", reward=1.0, how="add")
        await reward(bus, world, session="a", reward=1.0, how="add")
        await live_on(world, store)
        async with world.gateway(acts=False) as fresh:
            await reward(bus, world, "r", session="a", reward=1.0, how="add")
            await end(store, "a", None)
            for one in (store, fresh):
                await reaches(one, "a", "trained")
                assert session_of(one, "a").reward == 2.0


async def test_answers_that_wait_for_the_broker_are_bounded() -> None:
    world = World(config())
    own = world.bus()
    async with world.running() as bus, world.gateway(acts=False, bus=own) as first:
        await world.session(first, "a")
        async with asyncio.TaskGroup() as group:
            store = world.stream(own, group, most_unconfirmed=100_000)
            world.broker.block()
            for _ in range(200):
                assert not await store.record(world.call("a", 100))
            await asyncio.sleep(0)
            waiting = sum(task.get_name() == "record call" for task in asyncio.all_tasks())
            assert 10 < waiting < 25
            world.broker.unblock()
            await until(first, lambda: len(first.ledger.live["a"].calls) == 1 + waiting)
            assert await store.record(world.call("a", 100))
        assert bus.usable


async def test_a_gateway_that_is_ending_says_of_an_answer_that_it_is_not_recorded() -> None:
    world = World(config())
    bus = world.bus()
    async with world.running(), world.gateway(acts=False, bus=bus) as first:
        await world.session(first, "a")
        async with asyncio.TaskGroup() as group:
            store = world.stream(bus, group, most_unconfirmed=1000)
        for _ in range(20):
            assert not await store.record(world.call("a", 2))
        assert len(first.ledger.live["a"].calls) == 1


async def holds(agent: Gateway, acts: bool) -> None:
    async with asyncio.timeout(30):
        while not (agent.detail().url and agent.detail().acting == acts):  # noqa: ASYNC110  # as heartbeats do
            await asyncio.sleep(0.01)


def test_a_gateway_acts_only_while_no_other_one_holds_the_lock() -> None:
    async def main() -> None:
        broker, topology, settings = MemoryBroker(), Topology(RUN), config(port=0)
        other, bus = (MemoryBus(broker, topology, config=settings.broker) for _ in range(2))
        await other.connect()
        await other.declare(*topology.durable, topology.sessions)
        lock = await other.lock(topology.lock("gateway"))
        bus.run_id = "run-of-the-world"
        agent = Gateway(settings, bus=bus, topology=topology)
        running = asyncio.create_task(agent.run())
        try:
            await holds(agent, acts=False)
            for _ in range(100):  # nobody says when it does not act
                await asyncio.sleep(0)
            assert not agent.detail().acting
            await lock.release()
            await holds(agent, acts=True)
            agent.drain()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await other.close()

    asyncio.run(main())


async def test_sessions_that_wait_outlive_the_retention_of_the_stream() -> None:
    """What is carried over it says where its first copy was. Readers order events by it: of two rewards the later one
    counts, whichever was carried.
    """
    first: dict[str, int] = {}
    copies: list[tuple[str, object]] = []

    async def read(world: World) -> None:
        bus = world.bus()
        await bus.connect()
        async with await bus.consume(world.topology.sessions, offset=0) as feed:
            async for delivery in feed:
                name = str(delivery.message_id)
                if first.setdefault(name, delivery.offset or 0) != delivery.offset:
                    copies.append((name, delivery.headers.get("origin")))

    world = World(sessions_max_bytes=SMALL)
    async with world.running(), world.gateway() as store:
        reading = asyncio.create_task(read(world))
        await world.session(store, "old", calls=3)
        await store.report(SessionReward(session="old", reward=0.5), "r-old")
        await store.report(SessionReward(session="old", reward=0.25, how="add"), "r2-old")
        await live_on(world, store)
        reading.cancel()
        assert store.position > 2 * SMALL
        async with world.gateway(acts=False) as fresh:
            session, before = session_of(fresh, "old"), session_of(store, "old")
            assert (session.state, session.reward, list(session.calls)) == ("open", 0.75, list(before.calls))
            await end(store, "old", None)
            await reaches(fresh, "old", "trained")
    carried = [(name, origin) for name, origin in copies if "old" in name or name.startswith("call-")]
    assert {"r-old", "r2-old"} <= {name for name, _ in carried}
    assert all(origin == first[name] for name, origin in carried), carried
