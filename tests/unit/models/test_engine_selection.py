import asyncio
from collections import Counter

import pytest
from tenacity import AsyncRetrying

from trinity_mq.messages import Heartbeat
from trinity_mq.models.engine_selection import BACKOFF, STALE, EngineSelector
from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.models.retried import engine_retries
from trinity_mq.testing.virtual_time import run_virtually


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


def test_retries_for_an_engine_without_weights_end_by_the_clock_of_the_loop():
    async def refuse():
        raise EngineNotReady("it has no weights", retry_after=1.0)

    async def main():
        with pytest.raises(EngineNotReady):
            await AsyncRetrying(**engine_retries(20.0))(refuse)
        assert asyncio.get_running_loop().time() == 20.0

    run_virtually(main(), limit=100.0)
