import asyncio
import socket
from collections import Counter

import pytest

from tests.unit.rollout.scripted_engine import scripted_engine
from trinity_mq.config import Config
from trinity_mq.messages import Heartbeat, TaskBody, TaskSlice
from trinity_mq.models import InferenceModel
from trinity_mq.models.engine_selection import BACKOFF, STALE, EngineSelector
from trinity_mq.models.errors import EngineLost
from trinity_mq.rollout.workflow_runner import WorkflowRunner
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.workflows import Workflow


class Engines:
    """Beats that a test sends, and who is chosen."""

    def __init__(self):
        self.beats, self.seq = {}, 0
        self.choice = EngineSelector(self.beats.values)

    def beat(self, name, **detail):
        self.seq += 1
        found = {"id": name, "url": f"http://{name}", "name": "m", "role": "rollout", "version": [1, 0], **detail}
        self.beats[name] = Heartbeat(
            role="engine", id=name, seq=self.seq, incarnation="x", lease=10.0, state="working", detail=found
        )
        self.choice.receive()

    def chosen(self, times=20):
        return Counter(self.choice().id for _ in range(times))


def test_load_decides_and_what_was_sent_since_the_beat_counts():
    async def main():
        engines = Engines()
        engines.beat("busy", load=10)
        engines.beat("free", load=0)
        assert engines.chosen(10) == {"free": 10}
        assert engines.chosen(20) == {"free": 10, "busy": 10}
        engines.beat("free", load=0)  # it has done with them
        assert engines.chosen(5) == {"free": 5}

    run_virtually(main())


def test_one_that_is_silent_comes_last_and_is_asked_where_all_are():
    async def main():
        engines = Engines()
        engines.beat("silent", load=0)
        engines.beat("other", load=50)
        await asyncio.sleep(STALE + 0.1)
        assert engines.chosen() == {"silent": 20}
        engines.beat("other", load=50)
        assert engines.chosen() == {"other": 20}
        engines.beat("silent", load=0)
        assert engines.chosen() == {"silent": 20}

    run_virtually(main())


def test_one_that_did_not_answer_is_left_out_for_a_while_and_longer_the_second_time():
    async def main():
        engines = Engines()

        def all_beat():
            engines.beat("bad", load=0)
            engines.beat("good", load=30)

        all_beat()
        bad = engines.choice()
        assert bad.id == "bad"
        for _ in range(5):  # many had asked it at the same time
            engines.choice.lost(bad)
        assert engines.chosen() == {"good": 20}
        await asyncio.sleep(BACKOFF - 0.1)
        all_beat()
        assert engines.chosen() == {"good": 20}  # its beats say nothing of whether it answers
        await asyncio.sleep(0.2)
        assert engines.chosen(5) == {"bad": 5}
        engines.choice.lost(bad)
        await asyncio.sleep(2 * BACKOFF - 0.1)
        all_beat()
        assert engines.chosen() == {"good": 20}
        engines.beat("bad", load=0, url="http://elsewhere")  # restarted
        assert engines.chosen(5) == {"bad": 5}

    run_virtually(main())


def test_without_weights_or_role_or_address():
    async def main():
        engines = Engines()
        with pytest.raises(EngineLost):
            engines.choice()
        engines.beat("judge", role="auxiliary")
        engines.beat("odd", role="of a later release")
        engines.beat("nowhere", url=None)
        with pytest.raises(EngineLost):
            engines.choice()
        engines.beat("empty", version=None)
        assert engines.chosen(2) == {"empty": 2}
        engines.beat("serves", load=90)
        assert engines.chosen() == {"serves": 20}
        del engines.beats["serves"]
        engines.choice.receive()
        assert engines.chosen(2) == {"empty": 2}

    run_virtually(main())


class Asks(Workflow):
    is_async = True

    async def run_async(self):
        experiences = await self.model.chat_async([{"role": "user", "content": "q"}])
        for experience in experiences:
            experience.reward = 1.0
        return experiences


async def test_runs_on_an_engine_that_dies_go_elsewhere_at_the_cost_of_no_attempt():
    config = Config.model_validate({"model": {"tiny": {}}})
    task = TaskBody(workflow=f"{__name__}.Asks")
    piece = TaskSlice(
        batch=1, ticket="t", task_id=0, repeat_times=8, task=task, max_timeout=20, slice_timeout=20, max_retry_times=0
    )
    engines, runner = Engines(), WorkflowRunner(config)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    async with scripted_engine("lives") as lives:
        engines.beat("lives", url=lives.model.url, load=1)
        engines.beat("dies", url=f"http://127.0.0.1:{port}", load=0)
        asked = []

        class Noted:
            def __call__(self):
                asked.append(engines.choice())
                return asked[-1]

            def lost(self, engine: InferenceModel):
                engines.choice.lost(engine)

        outcome = await runner.run_slice(piece, Noted())
        assert (outcome.runs, outcome.message) == (list(range(8)), None)
        assert len(lives.requests) == 8
        first_round = Counter(model.id for model in asked[:8])
        assert first_round["dies"] >= 3
        assert all(model.id == "lives" for model in asked[8:])
        outcome = await runner.run_slice(piece, Noted())  # left out from now on
        assert Counter(model.id for model in asked[-8:]) == {"lives": 8}
    await runner.close()
