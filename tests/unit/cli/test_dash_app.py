"""The page's HTTP routes: what is shown to whom, and errors that say what to do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp.test_utils import TestClient, TestServer

from tests.unit.cli.test_dash_data import body
from tests.unit.cli.test_run_view import beat, metrics
from trinity_mq.cli.dash.access import KEY_COOKIE, POLICY, PageAccess
from trinity_mq.cli.dash.actions import Actions
from trinity_mq.cli.dash.app import PAGE_FILES, STATIC, DashApp
from trinity_mq.cli.inspect.token_texts import TokenTexts
from trinity_mq.cli.observe.curves import Curves
from trinity_mq.cli.observe.observatory import Observatory
from trinity_mq.cli.observe.sources import BrokerSource, FolderSource
from trinity_mq.telemetry import MetricsWriter

PAGE_BYTES = 300_000


class Served(NamedTuple):
    client: TestClient[Any, Any]
    observatory: Observatory
    access: PageAccess
    app: DashApp


@contextlib.asynccontextmanager
async def served(
    *,
    host: str = "127.0.0.1",
    operate: bool = False,
    others: dict[str, Curves] | None = None,
) -> AsyncIterator[Served]:
    observatory = Observatory("r", 10)
    access = PageAccess(host, operate=operate)
    actions = Actions(BrokerSource(lambda: None, observatory))
    app = DashApp(observatory, actions, access, lambda: TokenTexts(None), others=others)
    async with TestClient(TestServer(app.application())) as client:
        app.renew()
        yield Served(client, observatory, access, app)


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
    async with served(others={"before": beside}) as (client, observatory, _, _):
        observatory.samples.put(body(3), 4)
        observatory.samples.put(body(3)[:-20], 5)
        observatory.receive(metrics("explorer", 1, **{"rollout/reward/mean": 0.5}))
        rows = await (await client.get("/api/samples?after=2")).json()
        assert [row[0] for row in rows["rows"]] == [3, 4]
        assert (rows["last"], rows["seen"]) == (4, 2)
        assert "samples of step 5 cannot be read" in observatory.problems[0]
        uid = rows["rows"][0][rows["columns"].index("uid")]
        sample = await (await client.get("/api/sample", params={"uid": uid})).json()
        assert (sample["uid"], len(sample["tokens"])) == (uid, len(sample["token_texts"]))
        curves = await (await client.get("/api/curves")).json()
        assert curves["pictures"][0]["curves"] == {"rollout/reward/mean": [[1, 0.5]]}
        assert curves["others"]["before"][0]["curves"] == {"rollout/reward/mean": [[1, 0.9]]}
        curve = await (await client.get("/api/curve", params={"name": "rollout/reward/mean"})).json()
        assert curve["points"] == [[1, 0.5]]


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
    async with served() as (client, observatory, _, _):
        await FolderSource(tmp_path, observatory).read()
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
    async with served() as (client, observatory, _, app):
        response = await client.get("/events")
        assert response.content_type == "text/event-stream"
        for name in (None, "runner-0"):
            lines = [(await response.content.readline()).decode() for _ in range(3)]
            assert (lines[0], lines[2]) == ("event: state\n", "\n")
            agents = json.loads(lines[1].removeprefix("data: "))["agents"]
            assert agents == [] if name is None else agents[0]["id"] == name
            observatory.receive(beat("runner", "runner-0", detail={"running": 2}))
            app.renew()
