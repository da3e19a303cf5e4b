"""The page's HTTP routes: what is shown to whom, and errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.unit.agents.world import experience
from tests.unit.observability.test_run_state import beat, metrics
from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.memory.queues import StreamQueue
from trinity_mq.config import BrokerConfig, load_config
from trinity_mq.experience import ExperienceBatch
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.messages import Metrics
from trinity_mq.observability import samples
from trinity_mq.observability.curves import Curves
from trinity_mq.observability.diagnosis import Room
from trinity_mq.observability.experiences.token_texts import TokenTexts
from trinity_mq.observability.history import KEPT_SECONDS, RunHistory
from trinity_mq.observability.run_state import AgentRow, RunState
from trinity_mq.observability.samples import COLUMNS, SampleStore, decoded, experience_at
from trinity_mq.observability.sources import BrokerSource, FolderSource
from trinity_mq.page import actions
from trinity_mq.page.access import KEY_COOKIE, POLICY, PageAccess
from trinity_mq.page.actions import BrokerActions, broker_runs, runs_of
from trinity_mq.page.app import PAGE_FILES, STATIC, DashApp
from trinity_mq.page.run_page import RunPage
from trinity_mq.targets.connection import Target
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.telemetry.evaluations.log import (
    Evaluation,
    EvaluationAnswer,
    EvaluationLog,
    EvaluationQuestion,
    read_evaluations,
)
from trinity_mq.telemetry.jsonline import dump_line
from trinity_mq.testing.virtual_time import run_virtually

PAGE_BYTES = 300_000


class Served(NamedTuple):
    client: TestClient[Any, Any]
    run: RunPage
    access: PageAccess
    app: DashApp


@contextlib.asynccontextmanager
async def served(
    *,
    host: str = "127.0.0.1",
    operate: bool = False,
    others: dict[str, Curves] | None = None,
    stopped: Callable[[], Target | None] = lambda: None,
    folder: Path = Path("/nowhere"),
) -> AsyncIterator[Served]:
    run = RunPage(RunState("r", 10), RunHistory())
    access = PageAccess(host, operate=operate)
    asked = BrokerActions(BrokerSource(lambda: None, run.state), stopped)
    evaluations = functools.partial(read_evaluations, folder)
    app = DashApp(run, asked, access, lambda: TokenTexts(None), evaluations=evaluations, others=others)
    async with TestClient(TestServer(app.application())) as client:
        app.renew()
        yield Served(client, run, access, app)


async def test_the_page_and_its_files_are_small_and_load_nothing_from_elsewhere() -> None:
    async with served() as (client, _, _, _):
        page = await client.get("/")
        assert page.headers["Content-Security-Policy"] == POLICY
        for name, kind in PAGE_FILES.items():
            answer = await client.get(f"/static/{name}")
            assert (answer.status, answer.content_type) == (200, kind)
        assert (await client.get("/static/..%2Fapp.py")).status == 404
        assert (await client.get("/static/command.py")).status == 404
    assert sum(len((STATIC / name).read_bytes()) for name in PAGE_FILES) < PAGE_BYTES
    assert "http://" not in (STATIC / "dash.js").read_text().replace("http://www.w3.org/2000/svg", "")


async def test_samples_and_curves() -> None:
    beside = Curves()
    beside.add(metrics("explorer", 1, **{"rollout/reward/mean": 0.9}))
    async with served(others={"before": beside}) as (client, run, _, _):
        run.history.samples.put(body(3, info={"truth": "7"}), 4)
        run.history.samples.put(body(3)[:-20], 5)
        run.history.receive(metrics("explorer", 1, **{"rollout/reward/mean": 0.5}), 1.0)
        rows = await (await client.get("/api/samples?after=2")).json()
        assert [row[0] for row in rows["rows"]] == [3, 4]
        assert (rows["last"], rows["seen"]) == (4, 2)
        assert "samples of step 5 cannot be read" in run.state.problems[0]
        uid = rows["rows"][0][rows["columns"].index("uid")]
        sample = await (await client.get("/api/sample", params={"uid": uid})).json()
        assert (sample["uid"], len(sample["tokens"])) == (uid, len(sample["token_texts"]))
        assert sample["info"]["truth"] == "7"
        script = (STATIC / "dash.js").read_text()
        assert "expected(one.info?.truth)" in script, "shown as the expected answer"
        assert "reward: reward.valueAsNumber" in script, "which is null in JSON if the field is empty, so it is refused"
        curves = await (await client.get("/api/curves")).json()
        assert curves["pictures"][0]["curves"] == {"rollout/reward/mean": [[1, 0.5]]}
        assert curves["others"]["before"][0]["curves"] == {"rollout/reward/mean": [[1, 0.9]]}
        curve = await (await client.get("/api/curve", params={"name": "rollout/reward/mean"})).json()
        assert curve["points"] == [[1, 0.5]]


async def test_answers_to_evaluations_by_question(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path, 2**20)
    for label, rewards in ((0, (0.0, 0.0)), (5, (1.0, 0.0))):
        answers = [EvaluationAnswer(run=run, answer=f"{run}", reward=reward) for run, reward in enumerate(rewards)]
        questions = [
            EvaluationQuestion(task=n, question="q" * 200, expected="7", answers=answers) for n in range(1 + label)
        ]
        log.append(Evaluation(set="sums", label=label, time=9.0, questions=questions, left_out=3))
    async with served(folder=tmp_path) as (client, _, _, _):
        [found] = (await (await client.get("/api/evaluations")).json())["sets"]
        assert (found["set"], found["labels"], found["left_out"], len(found["questions"])) == ("sums", [0, 5], 3, 6)
        assert [one["rewards"] for one in found["questions"][:2]] == [[0.0, 0.5], [None, 0.5]]
        question = await (await client.get("/api/evaluation?set=sums&task=0")).json()
        assert [(one["label"], one["expected"]) for one in question["evaluations"]] == [(0, "7"), (5, "7")]
        assert [one["reward"] for one in question["evaluations"][1]["answers"]] == [1.0, 0.0]
        assert (await client.get("/api/evaluation?set=sums&task=9")).status == 404
    async with served() as (client, _, _, _):
        assert (await (await client.get("/api/evaluations")).json()) == {"sets": []}


async def test_dead_letters_of_a_run_that_is_over_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config({"name": "r", "model": {"tiny": {}}, "run_dir": str(tmp_path)})
    target, starts = Target("r", config.broker, config), [0]
    topology, broker = Topology("r"), MemoryBroker()

    @contextlib.asynccontextmanager
    async def started(of: Target, who: str) -> AsyncIterator[tuple[MemoryBus, Topology]]:
        assert of is target
        starts[0] += 1
        with RunFolder(config).locked():
            bus = MemoryBus(broker, topology, config=config.broker)
            await bus.connect()
            await bus.declare(topology.dead)
            if starts[0] == 1:
                letter = Envelope(body=b"x", kind="odd", message_id="m", headers={"kind": "odd", "dead-reason": "why"})
                await bus.publish(topology.exchange("dead"), "odd", letter)
            yield bus, topology
            await bus.close()

    monkeypatch.setattr(actions, "open_bus", started)
    async with served(stopped=lambda: target) as (client, _, _, _):
        for _ in range(3):
            [letter] = (await (await client.get("/api/dead")).json())["letters"]
            assert (letter["kind"], letter["reason"]) == ("odd", "why")
        assert starts == [1]
        os.utime(tmp_path / "lock", ns=(1, 1))  # another process has had the run's folder
        assert len((await (await client.get("/api/dead")).json())["letters"]) == 1
        assert starts == [2]


async def test_a_run_that_is_started_meanwhile_is_an_error_that_says_so(tmp_path: Path) -> None:
    config = load_config({"name": "r", "model": {"tiny": {}}, "run_dir": str(tmp_path)})
    with RunFolder(config).locked():
        async with served(stopped=lambda: Target("r", config.broker, config)) as (client, _, _, _):
            answer = await client.get("/api/dead")
            assert answer.status == 409
            assert f"is in use by process {os.getpid()}" in (await answer.json())["error"]


async def test_errors_say_what_was_wrong() -> None:
    async with served(operate=True) as (client, _, access, _):
        key = {"X-TMQ-Key": access.key, "Content-Type": "application/json"}
        for path, status, words in (
            ("/api/samples?after=x", 400, "wanted a number"),
            ("/api/sample?uid=none", 404, "is not kept"),
            ("/api/dead", 409, "no connection"),
        ):
            answer = await client.get(path)
            assert answer.status == status
            assert words in (await answer.json())["error"]
        for path, data, status, words in (
            ("/api/dead/replay", '{"batches": 3}', 400, "wanted a list"),
            ("/api/dead/replay", "[]", 400, "wanted a JSON object"),
            ("/api/dead/replay", "{", 400, ""),
            ("/api/agents/runner-0/explode", "{}", 409, "wanted one of restart"),
        ):
            answer = await client.post(path, data=data, headers=key)
            assert answer.status == status, await answer.text()
            assert words in (await answer.json())["error"]


async def test_the_timeline_of_a_folder_ends_with_its_last_activity(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"time/batch": 0.5})
    writer.close()
    async with served() as (client, run, _, _):
        await FolderSource(tmp_path, run.state, run.history).read()
        found = await (await client.get("/api/timeline?seconds=60")).json()
    [span] = found["spans"]
    assert (span["what"], span["agent"]) == ("train", "trainer-0")
    assert found["end"] == span["end"]


async def test_who_only_looks_changes_nothing() -> None:
    async with served() as (client, _, access, _):
        answer = await client.post("/api/dead/replay", json={}, headers={"X-TMQ-Key": access.key})
        assert answer.status == 403
        assert "--operate" in await answer.text()


async def test_who_acts_needs_the_key_in_a_header_that_no_other_page_can_send() -> None:
    async with served(operate=True) as (client, _, access, _):
        for headers in ({}, {"X-TMQ-Key": "guess"}, {"Cookie": f"{KEY_COOKIE}={access.key}"}):
            assert (await client.post("/api/dead/replay", json={}, headers=headers)).status == 401
        assert (await client.post("/api/dead/replay", json={}, headers={"X-TMQ-Key": access.key})).status == 409


async def test_a_name_of_elsewhere_that_leads_to_this_machine_is_refused() -> None:
    async with served() as (client, _, _, _):
        assert (await client.get("/api/state", headers={"Host": "evil.example:8720"})).status == 403
        for host in ("localhost:1", "127.0.0.1", "[::1]:8720"):
            assert (await client.get("/api/curves", headers={"Host": host})).status == 200


async def test_from_other_machines_everything_needs_the_key() -> None:
    async with served(host="0.0.0.0") as (client, _, access, _):
        assert (await client.get("/")).status == 401
        assert (await client.get("/?key=guess")).status == 401
        page = await client.get(f"/?key={access.key}")
        assert page.status == 200
        assert page.cookies[KEY_COOKIE]["httponly"]
        assert (await client.get("/api/curves")).status == 200, "the cookie is the key from now on"


async def test_the_state_comes_as_events() -> None:
    async with served() as (client, run, _, app):
        response = await client.get("/events")
        assert response.content_type == "text/event-stream"
        for name in (None, "runner-0"):
            lines = [(await response.content.readline()).decode() for _ in range(3)]
            assert (lines[0], lines[2]) == ("event: state\n", "\n")
            agents = json.loads(lines[1].removeprefix("data: "))["agents"]
            assert agents == [] if name is None else agents[0]["id"] == name
            run.state.receive(beat("runner", "runner-0", detail={"running": 2}), time.time())
            app.renew()


def test_curves_are_bounded_and_a_later_value_of_a_step_replaces_the_earlier_one() -> None:
    found = Curves(max_points=100)
    for step in (1, 2, 3):
        found.add(metrics("explorer", step, **{"rollout/reward/mean": step / 10}))
    found.add(metrics("explorer", 2, **{"rollout/reward/mean": 0.9}))
    assert found.named("rollout/reward/mean") == [(1, 0.1), (2, 0.9), (3, 0.3)]
    [picture] = found.pictures()
    assert picture["title"] == "Reward"
    for step in range(1000):
        found.add(metrics("trainer", step, **{"actor/entropy": float(step), "odd": float("nan")}))
    points = found.named("actor/entropy")
    assert len(points) <= 100
    assert points[-1] == (999, 999.0)
    assert "odd" not in found.names


def test_equal_observations_are_one_interval_and_old_ones_are_forgotten() -> None:
    found, runner = RunHistory(), beat("runner", "runner-0")
    for now in range(10):
        row = AgentRow(runner, "working") if now < 5 else AgentRow(runner, "idle", "a slice")
        found.observe([row], float(now))
    [lane] = found.lanes(0.0)
    assert lane["intervals"] == [[0.0, 5.0, "working", None], [5.0, 9.0, "idle", "a slice"]]
    for now in (10.0, 11.0, KEPT_SECONDS + 20):
        roles = ("trainer", "explorer", "supervisor")
        found.observe([AgentRow(beat(role, role), f"{now}") for role in roles], now)
    assert [lane["agent"] for lane in found.lanes(10.0)] == ["explorer", "runner-0", "trainer", "supervisor"]
    assert found.lanes(10.0)[0]["intervals"][0][0] == 11.0


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
    assert store.add(decoded(body(7), 9, {})) == 0, "the same sample is shown once"
    assert store.add(decoded(body(8), 9, {})) == 4
    assert [row[0] for row in store.rows(after=4)] == [5, 6, 7, 8], "only what is new"


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


def test_reviews_that_nobody_reads_any_more_take_no_verdict() -> None:
    """Retention cuts unread events in an outage, and an alarm then keeps the reader from asking anew."""
    config, topology, broker = BrokerConfig(), Topology("r"), MemoryBroker()
    source = BrokerSource(lambda: None, RunState("r", 10))

    async def story() -> None:
        bus, operator = (MemoryBus(broker, topology, config=config) for _ in range(2))
        await bus.connect()
        await operator.connect()
        await operator.declare(topology.review)
        reading = asyncio.create_task(source._reviews(bus, topology))
        await asyncio.sleep(10)
        assert source.reviews is not None
        broker.drop(bus, delay=5.0)
        for _ in range(2):
            await operator.publish(topology.exchange("review"), "request", Envelope(body=b"x", kind="review_request"))
        stream = broker.queues[topology.review.name]
        assert isinstance(stream, StreamQueue)
        stream.trim(stream.depth - 1)
        broker.block()
        await asyncio.sleep(config.publish_timeout + 10)
        assert source.reviews is None
        broker.unblock()
        await asyncio.sleep(10)
        assert source.reviews is not None
        reading.cancel()

    run_virtually(story(), limit=1000)


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
