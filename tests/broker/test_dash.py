"""The page on a real broker: it replays what an operator could not do, and gives the verdict that one waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.broker.test_operator_failures import Stage, operators
from tests.waiting import until
from trinity_mq.bus import Topology
from trinity_mq.config import BrokerConfig
from trinity_mq.observability.experiences.token_texts import TokenTexts
from trinity_mq.observability.history import RunHistory
from trinity_mq.observability.run_state import RunState
from trinity_mq.observability.sources import BrokerSource
from trinity_mq.page.access import PageAccess
from trinity_mq.page.actions import BrokerActions
from trinity_mq.page.app import DashApp
from trinity_mq.page.run_page import RunPage
from trinity_mq.targets.connection import Target

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


class Page:
    def __init__(self, client: TestClient[Any, Any], access: PageAccess, state: RunState) -> None:
        self._client, self._key, self.state = client, {"X-TMQ-Key": access.key}, state

    async def get(self, path: str) -> dict[str, Any]:
        async with self._client.get(path) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._client.post(path, json=body, headers=self._key) as answer:
            found: dict[str, Any] = await answer.json()
            assert answer.status == 200, found
            return found


@contextlib.asynccontextmanager
async def page_of(stage: Stage) -> AsyncIterator[Page]:
    state, history = RunState(stage.topology.run), RunHistory()
    target = Target(stage.topology.run, BrokerConfig(url=stage.url))
    source = BrokerSource(lambda: target, state, {"metrics", "samples", "reviews"}, history)
    access = PageAccess("127.0.0.1", operate=True)
    app = DashApp(RunPage(state, history), BrokerActions(source), access, lambda: TokenTexts(None))
    async with TestClient(TestServer(app.application())) as client:
        following = asyncio.create_task(source.run())
        try:
            await until(lambda: source.bus is not None, 30)
            yield Page(client, access, state)
        finally:
            following.cancel()
            await asyncio.wait([following])


async def test_a_dead_batch_is_replayed(broker_url: str, topology: Topology, tmp_path: Path) -> None:
    broker = {"delivery_limit": 2}
    async with (
        operators(tmp_path, topology, broker_url, "Choosy", "operator-0", broker=broker) as stage,
        page_of(stage) as page,
    ):
        for batch in (1, 2):
            await stage.closed(batch)
        await stage.decided(2)

        async def listed() -> bool:
            return [one["operator"] for one in (await page.get("/api/dead"))["letters"]] == ["0_Choosy"]

        await until(listed, 30)
        assert await listed(), "looking takes nothing away"
        assert len((await page.get("/api/samples"))["rows"]) == 2, "experiences of batch 2, from the stream"
        (tmp_path / "repaired").touch()
        done = await page.post("/api/dead/replay", {"batches": [1]})
        assert (len(done["republished"]), done["problems"], done["kept"]) == (1, [], 0)
        again = (await stage.decided(3))[2]
        assert (again.batch, again.state, again.experiences) == (1, "ready", 2)
        assert (await page.get("/api/dead")) == {"letters": []}


async def test_a_verdict_counts(broker_url: str, topology: Topology, tmp_path: Path) -> None:
    review = {"name": "human_review", "args": {"choose": {"fraction": 1.0}, "seconds": 60, "default": "drop"}}
    chain: dict[str, Any] = {"operators": [review]}
    async with (
        operators(tmp_path, topology, broker_url, "", "operator-0", operator=chain) as stage,
        page_of(stage) as page,
    ):
        await stage.closed(1)

        async def asked() -> bool:
            return page.state.reviews == 2

        await until(asked, 60)
        first, second = sorted((await page.get("/api/reviews"))["reviews"], key=lambda one: one["uid"])
        verdict = {"verdict": "reward", "reward": 0.25, "note": "half right"}
        assert (await page.post(f"/api/reviews/{first['request']}", verdict))["taken"] == "new"
        assert (await page.post(f"/api/reviews/{second['request']}", {"verdict": "keep"}))["taken"] == "new"
        (decided,) = await stage.decided(1)
        assert (decided.state, decided.experiences) == ("ready", 2)
        assert (decided.metrics["review/rewarded"], decided.metrics["review/kept"]) == (1.0, 1.0)
        late = await page.post(f"/api/reviews/{first['request']}", {"verdict": "drop"})
        assert late["taken"] == "refused"
        assert "it is closed" in late["reason"]
