"""The page's HTTP routes: what is shown to whom, and errors that say what to do."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.unit.observability.test_run_state import beat, metrics
from tests.unit.page.test_dash_data import body
from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import BrokerConfig, load_config
from trinity_mq.errors import CommandError
from trinity_mq.observability.curves import Curves
from trinity_mq.observability.experiences.token_texts import TokenTexts
from trinity_mq.observability.history import RunHistory
from trinity_mq.observability.run_state import RunState
from trinity_mq.observability.sources import BrokerSource, FolderSource
from trinity_mq.page import actions
from trinity_mq.page.access import KEY_COOKIE, POLICY, PageAccess
from trinity_mq.page.actions import BrokerActions
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
        assert sample["info"]["truth"] == "7", "the page shows it as the expected answer"
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


async def test_a_run_that_is_started_meanwhile_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def in_use(of: Target, who: str) -> AsyncIterator[None]:
        raise CommandError("run folder is in use by process 5")
        yield

    monkeypatch.setattr(actions, "open_bus", in_use)
    async with served(stopped=lambda: Target("r", BrokerConfig())) as (client, _, _, _):
        answer = await client.get("/api/dead")
        assert (answer.status, (await answer.json())["error"]) == (409, "run folder is in use by process 5")


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
