"""Topic matching against a second definition of it: a regular expression."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.bus.routing import routing_problem, topic_matches
from trinity_mq.bus.topology import Queue, Topology
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
