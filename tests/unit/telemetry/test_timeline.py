"""The timeline read from metrics and drawn."""

from __future__ import annotations

import itertools
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.telemetry import timeline
from trinity_mq.telemetry.timeline import Span, draw, lanes, spans

SVG = "{http://www.w3.org/2000/svg}"


def line(role: str, step: int, at: float, **values: float) -> dict[str, Any]:
    return {"time": at, "role": role, "agent": f"{role}-0", "step": step, **values}


PERIOD = [
    line("explorer", 1, 1002.0, **{"time/explore": 2.0, "rollout/reward/mean": 0.5}),
    line("operator", 1, 1002.5, **{"time/operators": 0.25}),
    line("trainer", 1, 1004.0, **{"time/batch": 1.5, "time/train_step": 1.4, "sample/skipped_step": 0.0}),
    line("trainer", 1, 1004.5, **{"time/sync_weight": 0.5, "sync/pause_ms": 3.0, "sync/transfer_ms": 400.0}),
    line("explorer", 1, 1006.0, **{"time/eval": 1.0}),
    line("trainer", 2, 1006.5, **{"time/batch": 0.5, "sample/skipped_step": 1.0}),
    line("trainer", 2, 1007.0, **{"time/save_checkpoint": 0.25}),
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


def test_a_sync_tells_its_phases_to_whoever_points_at_it() -> None:
    (sync,) = (span for span in spans(PERIOD) if span.what == "sync")
    assert sync.words == "sync, progress 1: 0.500 s (pause 3 ms, transfer 400 ms)"


def bars(picture: str) -> list[tuple[str, float, float, float]]:
    """``(words, x, y, width)`` of every bar."""
    found = []
    for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            found.append((str(title.text), *(float(rect.attrib[name]) for name in ("x", "y", "width"))))
    return found


def test_the_picture_has_a_bar_for_each_to_scale_and_the_sync_in_the_explorers_row_too() -> None:
    picture = draw("a <run> & more", spans(PERIOD))
    drawn = {words: (x, y, width) for words, x, y, width in bars(picture)}
    explore, train = drawn["explore, batch 1: 2.000 s"], drawn["train, progress 1: 1.500 s"]
    assert train[2] / explore[2] == pytest.approx(0.75, rel=0.01)
    assert train[0] == pytest.approx(explore[0] + 1.25 * explore[2], abs=0.1), "begins 2.5 s after it"
    syncs = [(x, y) for words, x, y, _ in bars(picture) if words.startswith("sync")]
    assert len(syncs) == 2
    assert syncs[0][0] == syncs[1][0]
    assert {y for _, y in syncs} == {explore[1], train[1]}
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert "a <run> & more: 7.0 s" in texts
    assert {"explorer-0", "operator-0", "trainer-0"} <= set(texts)
    dashes = [one for one in ElementTree.fromstring(picture).iter(f"{SVG}line") if "stroke-dasharray" in one.attrib]
    assert len(dashes) == 1


def test_a_very_long_run_is_drawn_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 5)
    many = spans(line("trainer", n, 1000.0 + n, **{"time/batch": 0.5}) for n in range(20))
    picture = draw("r", many)
    assert "the last 5 of 20 spans" in picture
    assert [words for words, *_ in bars(picture)] == [f"train, progress {n}: 0.500 s" for n in range(15, 20)]


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw("r", [])


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), max_size=40))
def test_no_span_covers_another_in_its_lane_and_none_is_lost(times: list[tuple[float, float]]) -> None:
    every = sorted(
        (Span("a", "explorer", "explore", n, start, start + seconds) for n, (start, seconds) in enumerate(times)),
        key=lambda span: (span.start, span.end),
    )
    spread = lanes(every)
    assert sorted(span.step for lane in spread for span in lane) == list(range(len(times)))
    for lane in spread:
        for before, after in itertools.pairwise(lane):
            assert before.end <= after.start + timeline.SLACK
    if every:
        picture = draw("r", every)
        assert len(bars(picture)) == len(every)
