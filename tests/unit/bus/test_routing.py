"""Names and routing: within a broker's limits, reversible, and matched as a regular expression does."""

from __future__ import annotations

import re
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.bus.routing import routing_problem, topic_matches
from trinity_mq.bus.topology import Queue, Topology, batch_key
from trinity_mq.config import load_config
from trinity_mq.messages import Mark, RunEnd, encode

WORDS = st.lists(st.sampled_from(["a", "b", "train", "3%2Ex"]), max_size=5)
PATTERNS = st.lists(st.sampled_from(["a", "b", "train", "3%2Ex", "*", "#"]), max_size=5)


def by_regex(pattern: list[str], key: list[str]) -> bool:
    parts = {"*": r"\.[^.]+", "#": r"(?:\.[^.]+)*"}
    wanted = "".join(parts.get(word, re.escape(f".{word}")) for word in pattern)
    return re.fullmatch(wanted, "".join(f".{word}" for word in key)) is not None


@given(PATTERNS, WORDS)
def test_matches_as_a_regular_expression_does(pattern: list[str], key: list[str]) -> None:
    assert topic_matches(".".join(pattern), ".".join(key)) == by_regex(pattern, key)


RUN = Topology("r")
MOVED = {"x-first-death-queue": "tmq.r.replies.submit.mine"}


@pytest.mark.parametrize(
    ("queue", "exchange", "key", "headers", "problem"),
    [
        (RUN.tasks_train, "tmq.r.tasks", "train.1", {}, None),
        (RUN.tasks_train, "tmq.r.tasks", "submit", {"CC": ["train.1"]}, "not bound"),
        (RUN.tasks_train, "", "tmq.r.tasks.train", {}, None),
        (RUN.tasks_train, "", "tmq.r.tasks.train", MOVED, "moved here"),
        (RUN.tasks_train, "", "tmq.r.replies.submit.mine", {"CC": ["tmq.r.tasks.train"]}, "not bound"),
        (RUN.tasks_train, "tmq.r.tasks", "train.1", MOVED, "moved here"),
        (RUN.submitted, "tmq.r.tasks", "session", MOVED, "moved here"),
        (RUN.ready, "tmq.r.telemetry.mine", "17", {}, "not bound"),
        (RUN.ready, "tmq.r.ready", "17", {}, None),
        (RUN.dead, "tmq.r.dead", "train.1", {"x-first-death-queue": "tmq.r.tasks.train"}, None),
        (RUN.listener("explorer", "1", "control", "dropped.dead"), "tmq.r.control", "dropped.dead", MOVED, None),
        (RUN.listener("submit", "1", "replies"), "", "tmq.r.replies.submit.1", {}, None),
    ],
)
def test_a_message_is_for_the_queues_that_its_own_routing_key_is_bound_to(
    queue: Queue, exchange: str, key: str, headers: dict[str, object], problem: str | None
) -> None:
    found = routing_problem(queue, exchange, key, headers, b"x", None)
    assert found is None if problem is None else problem in str(found)


def test_nothing_but_a_mark_travels_with_the_routing_key_of_marks() -> None:
    def found(body: bytes, content_type: str = "application/msgpack") -> str | None:
        return routing_problem(RUN.ready, "tmq.r.ready", "mark", {"kind": "mark"}, body, content_type)

    assert found(encode(Mark(nonce="n"))) is None
    assert found(b"{}", "text/plain") is None, "the readers set it aside"
    assert "a run_end" in str(found(encode(RunEnd(batches=1))))
    assert "a run_end" in str(found(b'{"kind": "run_end", "batches": 1}', "application/json"))
    assert found(b"TMQX", "application/vnd.trinity-mq.experiences") is not None


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
