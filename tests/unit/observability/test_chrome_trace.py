"""The timeline read from metrics and written as a Chrome trace."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.observability import timeline
from trinity_mq.observability.timeline import Span, chrome_trace, spans, tracks


def line(role: str, step: int, at: float, **values: float) -> dict[str, Any]:
    return {"time": at, "role": role, "agent": f"{role}-0", "step": step, **values}


PERIOD = [
    line("explorer", 1, 1002.0, **{"time/explore": 2.0, "rollout/reward/mean": 0.5}),
    line("operator", 1, 1002.5, **{"time/operators": 0.25}),
    line("trainer", 1, 1004.0, **{"time/batch": 1.5, "time/train_step": 1.4, "sample/skipped_step": 0.0}),
    line("trainer", 1, 1004.5, **{"time/sync": 0.5, "sync/pause_ms": 3.0, "sync/transfer_ms": 400.0}),
    line("explorer", 1, 1006.0, **{"time/eval": 1.0}),
    line("trainer", 2, 1006.5, **{"time/batch": 0.5, "sample/skipped_step": 1.0}),
    line("trainer", 2, 1007.0, **{"time/save": 0.25}),
]


def test_each_line_that_says_how_long_something_took_is_a_span_that_ended_then() -> None:
    found = [(span.what, span.agent, span.step, span.start, span.end) for span in spans(PERIOD)]
    assert found == [
        ("explore", "explorer-0", 1, 1000.0, 1002.0),
        ("operators", "operator-0", 1, 1002.25, 1002.5),
        ("train", "trainer-0", 1, 1002.5, 1004.0),
        ("sync", "trainer-0", 1, 1004.0, 1004.5),
        ("eval", "explorer-0", 1, 1005.0, 1006.0),
        ("skip", "trainer-0", 2, 1006.0, 1006.5),
        ("save", "trainer-0", 2, 1006.75, 1007.0),
    ]


def test_lines_of_others_and_nonsense_tell_nothing() -> None:
    odd = [
        {},
        line("runner", 1, 1000.0, **{"time/explore": 2.0}),
        line("trainer", 1, 1000.0, **{"time/explore": 2.0}),
        line("trainer", 1, 1000.0, **{"time/batch": float("nan")}),
        line("trainer", 1, 1000.0, **{"time/batch": -1.0}),
        {**line("trainer", 1, 1000.0, **{"time/batch": 1.0}), "time": "noon"},
        {**line("trainer", 1, 1000.0, **{"time/batch": 1.0}), "step": None},
        {**line("trainer", 1, 1000.0), "time/batch": True},
        {**line("trainer", 1, 1000.0), "time/batch": None},
    ]
    assert spans(odd) == []


def events(lines: list[dict[str, Any]]) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """``(names of processes, activities)`` of the trace."""
    every = json.loads(chrome_trace(spans(lines)))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in every if event["name"] == "process_name"}
    return names, [event for event in every if event["ph"] == "X"]


def test_the_trace_has_each_activity_in_microseconds_and_a_sync_with_the_explorer_too() -> None:
    processes, found = events(PERIOD)
    assert set(processes.values()) == {"explorer-0", "operator-0", "trainer-0"}
    shown = {(processes[event["pid"]], event["name"]): event for event in found}
    assert len(shown) == len(found) == 8
    explore, train = shown["explorer-0", "explore 1"], shown["trainer-0", "train 1"]
    assert (explore["ts"], explore["dur"], explore["args"]) == (0, 2_000_000, {"batch": 1})
    assert (train["ts"], train["dur"], train["args"]) == (2_500_000, 1_500_000, {"progress": 1})
    theirs, ours = shown["trainer-0", "sync 1"], shown["explorer-0", "sync 1"]
    assert theirs["args"] == {"progress": 1, "pause_ms": 3.0, "transfer_ms": 400.0}
    assert (theirs["ts"], theirs["dur"]) == (ours["ts"], ours["dur"]) == (4_000_000, 500_000)


def test_batches_explored_at_the_same_time_have_threads_of_their_own() -> None:
    _, found = events([line("explorer", n, 1000.0 + n, **{"time/explore": 1.5}) for n in range(4)])
    assert [(event["name"], event["tid"]) for event in sorted(found, key=lambda event: event["ts"])] == [
        ("explore 0", 0),
        ("explore 1", 1),
        ("explore 2", 0),
        ("explore 3", 1),
    ]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), max_size=40))
def test_no_span_covers_another_in_its_track_and_none_is_lost(times: list[tuple[float, float]]) -> None:
    every = [Span("a", "explorer", "explore", n, start, start + seconds) for n, (start, seconds) in enumerate(times)]
    spread = tracks(every)
    assert sorted(span.step for track in spread for span in track) == list(range(len(times)))
    for track in spread:
        for before, after in itertools.pairwise(track):
            assert before.end <= after.start + timeline.SLACK
