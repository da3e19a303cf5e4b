"""An operator on a real broker: a failing chain, repaired and run again; human review by a plain AMQP client, the
command line and the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.broker_fixtures import connected
from tests.unit.agents.world import a_slice, experience
from tests.waiting import until
from trinity_agents.operator.agent import Operator
from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.cli.main import main as command
from trinity_mq.config import BrokerConfig, load_config
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import Accepted, BatchClosed, BatchReady, DecodeError, decode
from trinity_mq.observability.experiences.token_texts import TokenTexts
from trinity_mq.observability.history import RunHistory
from trinity_mq.observability.run_state import RunState
from trinity_mq.observability.sources import BrokerSource
from trinity_mq.page.access import PageAccess
from trinity_mq.page.actions import BrokerActions
from trinity_mq.page.app import DashApp
from trinity_mq.page.run_page import RunPage
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.targets.connection import Target
from trinity_mq.transport.experience_parts import part_message

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120), pytest.mark.usefixtures("logs", "fresh_imports")]

OPERATORS = """
from pathlib import Path
from trinity_mq.operators import ExperienceOperatorV1

HERE = Path(__file__).parent

class Choosy(ExperienceOperatorV1):
    async def process(self, exps):
        if exps[0].eid.batch == 1 and not (HERE / "repaired").exists():
            raise ArithmeticError("not this one")
        return exps, {}
"""


@dataclass
class Stage:
    bus: Bus
    topology: Topology
    url: str

    async def closed(self, batch: int, runs: int = 2) -> None:
        """A batch whose parts are in its queue, closed."""
        ticket = f"t{batch}"
        queue = self.topology.batch_queue(batch, ticket)
        await self.bus.declare(queue)
        key = self.topology.batch_routing_key(batch, ticket)
        for run in range(runs):
            body = Experience.serialize_many([experience(run=run, eid=EID(batch=batch, task=0, run=run))])
            mail = part_message(a_slice(batch=batch, ticket=ticket), f"a{run}", 0, 1, body)
            assert await self.bus.publish(self.topology.exchange("experiences"), key, mail)
        await self.bus.unbind(queue)
        accepted = [Accepted(task_id=0, run_base=run, attempt=f"a{run}", runs=[run], parts=1) for run in range(runs)]
        mail = envelope(BatchClosed(batch=batch, ticket=ticket, accepted=accepted), message_id=f"closed-{ticket}")
        assert await self.bus.publish(self.topology.exchange("batches"), "closed", mail)

    async def decided(self, count: int) -> list[BatchReady]:
        """The first so many decisions on the ready stream."""
        found: list[BatchReady] = []
        async with await self.bus.consume(self.topology.ready, offset=0) as feed, asyncio.timeout(80):
            while len(found) < count:
                delivery = await anext(feed)
                with contextlib.suppress(DecodeError):  # chunks are on it too
                    found.append(decode(delivery.body, BatchReady, delivery.content_type))
        return found

    def source(self) -> StreamSource:
        """What a trainer reads from."""
        return StreamSource(self.bus, self.topology, "trainer-0")

    async def command(self, action: str, *words: str) -> int:
        """Run a command, such as ``dead list RUN ...``."""
        line = [*action.split(), self.topology.run, *words, "--broker", self.url]
        return await asyncio.to_thread(command, line)

    async def rewards(self) -> dict[int, float | None]:
        """The rewards that a trainer reads, by run."""
        found: dict[int, float | None] = {}
        async with await self.bus.consume(self.topology.ready, offset=0) as feed:
            while (delivery := await next_or_quiet(self.bus, feed, 2.0)) is not None:
                if delivery.content_type == EXPERIENCES:
                    found |= {exp.eid.run: exp.reward for exp in Experience.deserialize_many(delivery.body)}
        return found


class Page:
    def __init__(self, client: TestClient[Any, Any], access: PageAccess) -> None:
        self._client, self._key = client, {"X-TMQ-Key": access.key}

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
            yield Page(client, access)
        finally:
            following.cancel()
            await asyncio.wait([following])


async def taken(source: StreamSource, count: int) -> list[tuple[int, str, list[tuple[int, str, int]]]]:
    """The next so many batches, each with the repaired ones that come with it: number, state, experiences."""
    found = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        reading = group.create_task(source.run())
        for _ in range(count):
            batch = await source.next()
            repaired = [(one.batch, one.state, len(one.experiences)) for one in batch.others]
            found.append((batch.batch, batch.state, repaired))
            source.consumed()
        reading.cancel()
    return found


@asynccontextmanager
async def operators(
    folder: Path, topology: Topology, url: str, chain: dict[str, Any], **sections: object
) -> AsyncIterator[Stage]:
    (folder / "my_operators.py").write_text(OPERATORS)
    settings = {
        "name": topology.run,
        "model": {"tiny": {}},
        "run_dir": str(folder / "run"),
        "algorithm": {"min_group_runs": 1},
        "plugin_dirs": [str(folder)],
        "operator": {"operators": [chain]},
        **sections,
    }
    config = load_config(settings, [f"broker.url={url}"])
    add_plugins(config.plugin_dirs)
    own = create_bus(config.broker, topology, "operator-0")
    operator = Operator(config, bus=own, topology=topology, agent_id="operator-0")
    async with connected(url, topology) as bus:
        await bus.declare(*topology.durable)
        working = asyncio.ensure_future(operator.run())
        try:
            yield Stage(bus, topology, url)
        finally:
            operator.drain()
            await working


async def test_a_failing_batch_is_parked_the_run_goes_on_and_a_replay_does_it(
    broker_url: str,
    topology: Topology,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # a table that folds nothing
    broker = {"delivery_limit": 2}
    async with (
        operators(tmp_path, topology, broker_url, {"name": "my_operators.Choosy"}, broker=broker) as stage,
        page_of(stage) as page,
    ):
        for batch in (1, 2):
            await stage.closed(batch)
        states = {ready.batch: ready for ready in await stage.decided(2)}
        assert {batch: ready.state for batch, ready in states.items()} == {1: "failed", 2: "ready"}
        assert "operator 0_Choosy: ArithmeticError: not this one" in str(states[1].reason)
        async with await stage.bus.consume(topology.dead, prefetch=1) as feed, asyncio.timeout(20):
            assert (await anext(feed)).headers["operator"] == "0_Choosy"
        assert await stage.bus.depth(topology.batch_queue(1, "t1").name) == 2, "kept for the replay"
        assert await stage.command("dead list") == 0
        listed = "".join(capsys.readouterr().out.split())
        assert "batch_closed" in listed
        assert "0_Choosy" in listed

        assert await stage.command("review list") == 2
        assert "none of its operators requests reviews" in capsys.readouterr().err

        async def shown() -> bool:
            return [letter["operator"] for letter in (await page.get("/api/dead"))["letters"]] == ["0_Choosy"]

        await until(shown, 30)
        assert await shown(), "looking takes nothing away"
        assert len((await page.get("/api/samples"))["rows"]) == 2, "experiences of batch 2, from the stream"
        (tmp_path / "repaired").touch()
        done = await page.post("/api/dead/replay", {"batches": [1]})
        assert (len(done["republished"]), done["problems"], done["kept"]) == (1, [], 0)
        again = (await stage.decided(3))[2]
        assert (again.batch, again.state, again.experiences) == (1, "ready", 2)
        assert await stage.bus.depth(topology.dead.name) == 0
        await stage.closed(3)
        assert [ready.state for ready in (await stage.decided(4))[3:]] == ["ready"]
        # a trainer passes batch 1 as failed, and takes it along with the one that came after its repair: once
        first, again = stage.source(), stage.source()
        assert await taken(first, 2) == [(1, "failed", []), (2, "ready", [])]
        again.restore(first.state())
        assert await taken(again, 1) == [(3, "ready", [(1, "ready", 2)])]
        whole = stage.source()
        assert [repaired for _, _, repaired in await taken(whole, 3)] == [[], [], [(1, "ready", 2)]]
        assert whole.state()["consumed"] == again.state()["consumed"] == {"t1": 1, "t2": 2, "t3": 3}


async def test_verdicts_of_a_plain_client_of_the_command_line_and_of_the_page_count(
    broker_url: str, topology: Topology, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    review = {"name": "human_review", "args": {"choose": {"fraction": 1.0}, "seconds": 60, "default": "drop"}}
    async with (
        operators(tmp_path, topology, broker_url, review) as stage,
        page_of(stage) as page,
    ):
        listed: list[dict[str, Any]] = []

        async def asked() -> bool:
            code = await stage.command("review list", "--json")
            out = capsys.readouterr().out
            listed[:] = json.loads(out) if code == 0 else []
            return len(listed) == len((await page.get("/api/reviews"))["reviews"]) == 3

        await stage.closed(1, runs=3)
        await until(asked, 60.0)
        first, second, third = sorted(listed, key=lambda request: request["uid"])
        assert first["ticket"] == "t1"
        assert first["reasons"] == ["one of 1 of all runs"]
        assert 0 < first["seconds_left"] <= 60

        async with await aio_pika.connect(broker_url) as connection:
            channel = await connection.channel()
            exchange = await channel.get_exchange(f"tmq.{topology.run}.review")
            body = json.dumps({"request": first["request"], "verdict": "reward", "reward": 0.25, "by": "a program"})
            message = aio_pika.Message(body.encode(), content_type="application/json")
            await exchange.publish(message, routing_key="verdict")
        code = await stage.command("review keep", second["request"][:12], "--by", "ann", "--json")
        verdict = json.loads(capsys.readouterr().out)
        assert (code, verdict["counts"], verdict["closed"]["by"]) == (0, True, "ann")
        on_page = {"verdict": "reward", "reward": 0.75, "note": "half right"}
        assert (await page.post(f"/api/reviews/{third['request']}", on_page))["taken"] == "new"
        (decided,) = await stage.decided(1)
        assert (decided.state, decided.experiences) == ("ready", 3)
        assert {name: value for name, value in decided.metrics.items() if name.startswith("review/")} == {
            "review/asked": 3.0,
            "review/not_asked": 0.0,
            "review/kept": 1.0,
            "review/dropped": 0.0,
            "review/rewarded": 2.0,
            "review/timed_out": 0.0,
        }
        assert await stage.rewards() == {0: 0.25, 1: 1.0, 2: 0.75}

        assert await stage.command("review drop", second["request"], "--by", "bob") == 1
        assert "does not count: it is closed: keep by ann" in capsys.readouterr().err
        late = await page.post(f"/api/reviews/{first['request']}", {"verdict": "drop"})
        assert (late["taken"], "it is closed" in late["reason"]) == ("refused", True)
        assert await stage.command("review show", first["request"]) == 0
        assert "decided: reward 0.25 by a program" in capsys.readouterr().out
        assert await stage.command("review list") == 0
        assert capsys.readouterr().out == "no run waits for a verdict\n"
    assert await stage.command("clean") == 0
    async with await aio_pika.connect(broker_url) as connection:
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await (await connection.channel()).get_queue(topology.review.name)
