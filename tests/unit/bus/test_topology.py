"""Names: reversible, within a broker's limits, and never a user's text in a queue's name."""

from __future__ import annotations

import re
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.bus.topology import Topology, batch_key
from trinity_mq.config import load_config

TOPOLOGY = Topology("run-1")


@given(
    st.one_of(
        st.integers(), st.tuples(st.integers(0), st.text(min_size=1, max_size=30)).map(lambda p: f"{p[0]}/{p[1]}")
    )
)
def test_batch_keys_are_reversible_topic_words_and_queue_names_hold_what_clients_accept(batch: int | str) -> None:
    key = batch_key(batch)
    for queue in (*TOPOLOGY.durable, TOPOLOGY.batch_queue(batch, "0f3e"), TOPOLOGY.listener("a", "1", "sync", "w.*")):
        assert re.fullmatch(r"tmq\.run-1\.[a-z0-9.-]+", queue.name), queue.name
        assert all(binding.exchange in TOPOLOGY.exchanges for binding in queue.bindings)
    assert urllib.parse.unquote(key.replace(".", "/")) == str(batch)
    assert not re.search(r"[*#/\s]", key)
    assert key.isascii()


@pytest.mark.parametrize("run", ["", "A", "a b", "a.b", "x" * 41])
def test_a_run_name_that_does_not_fit_is_refused(run: str) -> None:
    with pytest.raises(ValueError, match="1 to 40"):
        Topology(run)


def test_what_each_kind_of_queue_declares() -> None:
    batch = TOPOLOGY.batch_queue(1, "t")
    assert batch.arguments["x-single-active-consumer"] is True
    assert batch.arguments["x-delivery-limit"] == 1_000_000
    assert batch.arguments["x-dead-letter-exchange"] == TOPOLOGY.exchange("dead")
    assert batch.redeclare is False
    assert "x-consumer-timeout" not in batch.arguments
    limits = {"submitted_max_bytes": 100 * 1024**2, "dead_max_bytes": 200 * 1024**2, "consumer_timeout": 7200}
    config = load_config({"name": "r", "model": {"tiny": {}}, "broker": limits})
    run = Topology.of(config)
    held = (run.tasks_train, run.tasks_eval, run.closed, run.submitted, run.batch_queue(1, "t"))
    assert {queue.arguments["x-consumer-timeout"] for queue in held} == {7_200_000}
    assert not any("x-consumer-timeout" in queue.arguments for queue in (run.ready, run.results, run.dead))
    bounds = [
        (queue.arguments["x-max-length-bytes"], queue.arguments["x-overflow"]) for queue in (run.submitted, run.dead)
    ]
    assert bounds == [(100 * 1024**2, "reject-publish"), (200 * 1024**2, "drop-head")], "what outsiders can fill"
    for queue in (run.tasks_train, run.tasks_eval, run.closed, run.batch_queue(1, "t")):
        assert "x-max-length-bytes" not in queue.arguments, "nothing of these may be lost"
    assert "x-expires" not in TOPOLOGY.ready.arguments
    assert "x-delivery-limit" not in TOPOLOGY.ready.arguments
    assert TOPOLOGY.listener("a", "1", "sync").arguments == {}
