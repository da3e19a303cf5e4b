"""The data that the page shows: curves, intervals, samples, and the state of a run, in time that is an argument."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.agents.world import experience
from tests.unit.observability.test_run_state import beat, metrics
from trinity_mq.experience import ExperienceBatch
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.messages import Metrics
from trinity_mq.observability import samples
from trinity_mq.observability.curves import Curves
from trinity_mq.observability.diagnosis import Room
from trinity_mq.observability.history import KEPT_SECONDS, RunHistory
from trinity_mq.observability.run_state import AgentRow, RunState
from trinity_mq.observability.samples import COLUMNS, SampleStore, decoded, experience_at
from trinity_mq.page.actions import broker_runs, runs_of
from trinity_mq.page.run_page import RunPage
from trinity_mq.telemetry.jsonline import dump_line


def test_a_later_value_of_a_step_replaces_the_earlier_one() -> None:
    found = Curves()
    found.add_all([metrics("explorer", step, **{"rollout/reward/mean": step / 10}) for step in (1, 2, 3)])
    found.add(metrics("explorer", 2, **{"rollout/reward/mean": 0.9}))
    assert found.named("rollout/reward/mean") == [(1, 0.1), (2, 0.9), (3, 0.3)]
    [picture] = found.pictures()
    assert picture["title"] == "Reward"


def test_curves_are_bounded() -> None:
    found = Curves(max_points=100)
    for step in range(1000):
        found.add(metrics("trainer", step, **{"actor/entropy": float(step), "odd": float("nan")}))
    points = found.named("actor/entropy")
    assert len(points) <= 100
    assert points[-1] == (999, 999.0)
    assert "odd" not in found.names


def test_equal_observations_are_one_interval() -> None:
    found, runner = RunHistory(), beat("runner", "runner-0")
    for now in range(10):
        row = AgentRow(runner, "working") if now < 5 else AgentRow(runner, "idle", "a slice")
        found.observe([row], float(now))
    [lane] = found.lanes(0.0)
    assert lane["intervals"] == [[0.0, 5.0, "working", None], [5.0, 9.0, "idle", "a slice"]]


def test_old_intervals_are_forgotten_and_lanes_are_in_the_order_of_the_flow() -> None:
    found = RunHistory()
    for now in (0.0, 1.0, KEPT_SECONDS + 10):
        roles = ("trainer", "explorer", "supervisor")
        found.observe([AgentRow(beat(role, role), f"{now}") for role in roles], now)
    assert [lane["agent"] for lane in found.lanes(0.0)] == ["explorer", "trainer", "supervisor"]
    assert found.lanes(0.0)[0]["intervals"][0][0] == 1.0


def body(batch: int, runs: int = 4, **fields: Any) -> bytes:
    made = [experience(1, run, **fields) for run in range(runs)]
    for run, one in enumerate(made):
        one.eid.batch, one.eid.suffix, one.reward = batch, f"{batch}-{run}", run / 4
        one.response_text = "answer " * 30
    return ExperienceBatch.of(made).encode()


def test_rows_tell_what_the_table_shows() -> None:
    store = SampleStore()
    versions = [(0, 1, 3), (1, 1, 5)]
    assert store.add(decoded(body(7, versions=versions, taskset="sums"), 8, {"sums": "math_workflow"})) == 4
    first = dict(zip(COLUMNS, store.rows()[0], strict=True))
    assert (first["number"], first["step"], first["batch"], first["workflow"]) == (1, 8, 7, "math_workflow")
    assert (first["staleness"], first["version"]) == (4, "1.3 1.5"), "the oldest token is of weights 4 steps old"
    assert len(first["text"]) == samples.PREVIEW + 1
    kept = store.body_of(first["uid"])
    assert kept is not None
    assert experience_at(*kept).eid.uid == first["uid"]


def test_the_same_sample_is_shown_once_and_only_what_is_new_is_asked_for() -> None:
    store = SampleStore()
    assert store.add(decoded(body(1), 1, {})) == 4
    assert store.add(decoded(body(1), 2, {})) == 0
    assert store.add(decoded(body(2), 2, {})) == 4
    assert [row[0] for row in store.rows(after=4)] == [5, 6, 7, 8]


def test_what_nobody_looks_at_is_bounded_too() -> None:
    store = SampleStore(max_bytes=5 * len(body(10)))
    for batch in range(10, 30):
        store.put(body(batch), batch)
    assert asyncio.run(store.decode()) == []
    assert {row[COLUMNS.index("batch")] for row in store.rows()} == {25, 26, 27, 28, 29}
    assert store.seen == 20


def test_only_what_the_table_has_room_for_is_decoded() -> None:
    store = SampleStore(max_rows=10)
    for batch in range(17):
        store.put(b"not decoded, or a problem would say so", batch)
    for batch in range(17, 20):
        store.put(body(batch), batch)
    store.put(body(20)[:-20], 20)
    [problem] = asyncio.run(store.decode())
    assert problem.startswith("samples of step 20 cannot be read")
    assert [row[COLUMNS.index("batch")] for row in store.rows()] == [18] * 4 + [19] * 4
    assert asyncio.run(store.decode()) == []


async def test_who_goes_away_while_samples_are_decoded_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(body: bytes, step: int | None, workflows: Mapping[str, str]) -> samples.DecodedSamples:
        began.set()
        assert go_on.wait(30)
        return decoded(body, step, workflows)

    monkeypatch.setattr(samples, "decoded", slow)
    store = SampleStore()
    store.put(body(1), 1)
    asking = asyncio.create_task(store.decode())
    await asyncio.to_thread(began.wait, 30)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    go_on.set()
    again = asyncio.create_task(store.decode())
    await asyncio.sleep(0)
    store.put(body(2), 2)  # while the first is decoded: the next call's
    await again
    assert {row[COLUMNS.index("batch")] for row in store.rows()} == {1}
    await store.decode()
    assert {row[COLUMNS.index("batch")] for row in store.rows()} == {1, 2}


class Observed:
    """A run as a page shows it, in time that the test sets."""

    def __init__(self, room: frozenset[Room] | None = None) -> None:
        self.now = 1000.0
        self.state = RunState("r", 100, room=room)
        self.state.is_live = True
        self.page = RunPage(self.state, RunHistory(), lambda: self.now)

    def receive(self, message: object) -> None:
        self.state.receive(message, self.now)

    def set_depths(self, depths: Mapping[str, int | None]) -> None:
        self.state.set_depths(depths, self.now)

    def shown(self) -> dict[str, Any]:
        return self.page.as_map()


def test_the_state_is_json_whatever_came() -> None:
    found = Observed()
    json.loads(dump_line(found.shown()))
    found.receive(beat("explorer", "explorer-0", detail={"opened": 3, "closed": 2, "open": ["a"]}))
    found.receive(beat("engine", "explorer-0-engine", detail={"load": 0, "tokens": 5, "version": (1, 2)}))
    found.receive(beat("trainer", "trainer-0", state="idle", waits_for="batch 3", detail={"progress": 2, "step": 2}))
    found.receive(Metrics(role="trainer", id="trainer-0", step=2, values={"actor/entropy": float("nan")}))
    found.set_depths({"tasks.train": 4, "tasks.eval": None, "closed": 1, "dead": 2})
    found.now += 1
    found.page.tick()
    state = json.loads(dump_line(found.shown()))
    assert (state["step"], state["total"], state["over"]) == (2, 100, False)
    assert [one["role"] for one in state["flow"]["nodes"]] == ["explorer", "engine", "trainer"]
    assert state["flow"]["arrows"][0]["depth"] == 4
    assert {lane["agent"]: lane["intervals"][0][2] for lane in found.page.history.lanes(0.0)} == {
        "explorer-0": "working",
        "explorer-0-engine": "idle",  # it samples nothing
        "trainer-0": "idle",
    }
    assert any("2 dead letters" in text for _, text in state["news"])


def test_a_run_that_stands_still_has_a_culprit_and_one_that_moves_none() -> None:
    found = Observed()
    for second in range(5):
        found.now += 1
        found.receive(beat("runner", "runner-0", second + 1, detail={"done": second}))
        found.page.tick()
    assert found.shown()["finding"]["state"] == "moving"
    for second in range(100):
        found.now += 1
        found.receive(beat("trainer", "trainer-0", second, state="idle", waits_for="batch 3"))
        found.page.tick()
    state = found.shown()
    assert found.state.still(found.now) == 100.0
    assert state["finding"]["culprit"] == "runner-0", "its heartbeats have ceased"
    assert state["finding"]["sentence"]


def healthy(found: Observed, second: int) -> None:
    """Pass on what the agents of a healthy run on two cores say in one second: single steps differ widely."""
    found.now += 1
    waits = {"state": "idle", "waits_for": "a closed batch"} if second % 4 else {"state": "working"}
    here = f"{socket.gethostname()}:/runs/r"
    explorer = {"opened": second, "closed": second, "open": ["t"], "place": here}
    load = int(second % 10 not in {0, 1})
    found.receive(beat("explorer", "explorer-0", second + 2, detail=explorer))
    found.receive(
        beat("engine", "e", second + 2, detail={"url": "u", "role": "rollout", "load": load, "tokens": second})
    )
    found.receive(beat("operator", "operator-0", second + 2, **waits))
    found.receive(beat("runner", "runner-0", second + 2, detail={"done": second, "running": 3, "slots": 16}))
    step = {"progress": second, "step": second, "place": here}
    found.receive(beat("trainer", "trainer-0", second + 2, state="idle", detail=step))
    sync = 4.0 if second % 9 == 0 else 0.1
    found.receive(metrics("trainer", second, **{"trainer/idle_frac": 0.4, "time/batch": 1.0, "time/sync": sync}))
    found.set_depths({"tasks.train": 0, "tasks.eval": 0, "closed": 2 if second % 7 == 0 else 0})
    found.page.tick()


def test_the_verdict_on_a_healthy_run_does_not_change() -> None:
    found = Observed()
    seen: list[tuple[str | None, str, str | None]] = []
    for second in range(300):
        healthy(found, second)
        state = found.shown()
        limit = state["bottleneck"] and state["bottleneck"]["stage"]
        verdict = (limit, state["finding"]["state"], state["finding"]["culprit"])
        if not seen or verdict != seen[-1]:
            seen.append(verdict)
    assert seen == [(None, "moving", None), ("engine", "moving", None)]
    assert "engines limit it" in found.shown()["finding"]["sentence"], "both tell the same"


def test_a_stage_that_stays_the_limit_is_named_and_a_standstill_soon() -> None:
    found = Observed()
    for second in range(60):
        healthy(found, second)
    values = {"trainer/idle_frac": 0.01, "time/batch": 9.0, "time/sync": 0.1}
    for second in range(60, 180):
        healthy(found, second)
        for _ in range(3):
            found.receive(metrics("trainer", second, **values))
    assert found.shown()["bottleneck"]["stage"] == "trainer"
    for second in range(15):
        found.now += 1
        found.receive(beat("trainer", "trainer-0", 200 + second, detail={"progress": 180}))
        found.page.tick()
        named = found.shown()["finding"]["culprit"]
        assert named is None or second >= 8
    assert named == "explorer-0", "its heartbeats have ceased"


@pytest.mark.parametrize(
    ("room", "place", "words"),
    [
        (frozenset[Room](), socket.gethostname(), "lower model.max_response_tokens; explorer.over"),
        (frozenset[Room]({"devices"}), socket.gethostname(), "raise explorer.rollout_model.engine_num; or lower"),
        (frozenset[Room](), "elsewhere", "where the machine has free cores or GPUs, raise explorer.rollout_model.eng"),
        (None, socket.gethostname(), "where the machine has free cores or GPUs, raise explorer.rollout_model.eng"),
    ],
    ids=["full", "free", "another machine", "not known"],
)
def test_the_advice_is_one_that_the_machine_can_follow(room: frozenset[Room] | None, place: str, words: str) -> None:
    found = Observed(room)
    for second in range(60):
        healthy(found, second)
        detail = {"opened": second, "closed": second, "open": ["t"], "place": f"{place}:/runs/r"}
        found.receive(beat("explorer", "explorer-0", 1000 + second, detail=detail))
    limit = found.shown()["bottleneck"]
    assert limit["stage"] == "engine"
    assert words in limit["lever"]
    assert room != frozenset() or place == "elsewhere" or "engine_num" not in limit["lever"]


def test_news_have_the_time_at_which_they_happened() -> None:
    found = Observed()
    failures = [{"text": "KeyError: 'a'", "count": 3, "failed": 3, "first": "task 2 of batch 1"}]
    found.receive(beat("explorer", "explorer-0", 500, detail={"failures": failures}))
    found.set_depths({"dead": 2})
    for step, at in ((5, 100.0), (10, 200.0)):
        found.state.receive(metrics("explorer", step, **{"eval/held_out/accuracy/mean@1": 0.5}), at)
    found.now += 7
    found.receive(beat("explorer", "explorer-0", 501, detail={"failures": [{**failures[0], "text": "NameError: 'b'"}]}))
    found.set_depths({"dead": None})  # the broker is away
    found.set_depths({"dead": 2})
    found.set_depths({"dead": 3})
    news = [(at, text.partition(":")[0]) for at, text in found.shown()["news"]]
    assert news == [
        (100.0, "evaluation at step 5"),
        (200.0, "evaluation at step 10"),
        (None, "3 slices failed"),
        (None, "2 dead letters"),
        (1007.0, "3 slices failed"),
        (1007.0, "3 dead letters"),
    ]


def test_runs_on_a_broker_are_known_by_the_names_of_queues() -> None:
    queues = [
        {"name": "tmq.one.tasks.train", "messages": 3, "consumers": 2},
        {"name": "tmq.one.dead", "messages": 1, "consumers": 0},
        {"name": "tmq.two.ready", "messages": 9},
        {"name": "somebody.elses", "messages": 7, "consumers": 7},
    ]
    assert runs_of(queues) == [
        {"run": "one", "messages": 4, "dead": 1, "consumers": 2, "queues": 2},
        {"run": "two", "messages": 9, "dead": 0, "consumers": 0, "queues": 1},
    ]


async def test_a_broker_without_management_says_so() -> None:
    [port] = free_ports(1)
    found, why = await broker_runs(f"amqp://u:p@127.0.0.1:{port}/v")
    assert found == []
    assert "no management API" in why
    assert "p@" not in why


def test_a_run_is_over_once_every_agent_has_ended() -> None:
    found = Observed()
    for seq, state in enumerate(("working", "finished"), 1):
        found.receive(beat("explorer", "explorer-0", seq, state=state))
        assert found.shown()["over"] is (state == "finished")
