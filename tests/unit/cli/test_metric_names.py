from __future__ import annotations

import pytest

from trinity_mq.cli.run.metric_names import curve, distinct, duration, evaluation_curves, evaluations, lost


def test_evaluations_take_accuracy_before_reward() -> None:
    values = {
        "eval/ops3/accuracy/mean@1": 0.5,
        "eval/ops3/reward/mean@1": 0.7,
        "eval/ops3/accuracy/std@1": 0.1,
        "eval/deep/set/reward/mean@4": 0.2,
        "eval/detailed/accuracy/mean@8/mean": 0.25,
        "eval/detailed/accuracy/mean@8/max": 1.0,
        "eval/other/time/mean@1": 3.0,
        "rollout/accuracy/mean": 0.9,
        "eval/text/accuracy/mean@1": "x",
    }
    assert evaluations(values) == {"ops3": 0.5, "deep/set": 0.2, "detailed": 0.25}


def test_steps_that_were_done_again_count_once() -> None:
    lines = [
        {"role": "trainer", "step": 1, "a": 1.0},
        {"role": "trainer", "step": 2, "a": 2.0},
        {"role": "explorer", "step": 1, "b": 5.0},
        {"role": "trainer", "step": 1, "a": 10.0},
        {"role": "explorer", "step": 1, "c": 6.0},
        {"step": 3, "a": 9.0},
        {"role": "trainer", "a": 9.0},
    ]
    found = distinct(lines)
    assert curve(found, "a") == [(1, 10.0), (2, 2.0)]
    assert curve(found, "b") == [(1, 5.0)]
    assert curve(found, "c") == [(1, 6.0)]


def test_curves_leave_out_what_is_not_known() -> None:
    assert curve([{"step": 1, "a": None}, {"step": 2}, {"step": 3, "a": 1}], "a") == [(3, 1.0)]
    assert evaluation_curves(
        [{"step": 0, "eval/x/accuracy/mean@1": 0.0}, {"step": 50, "eval/x/accuracy/mean@1": 0.5}]
    ) == {"x": [(0, 0.0), (50, 0.5)]}


def test_lost_counts_only_what_is_there() -> None:
    lines = [
        {"step": 1, "sample/skipped_step": 1, "rollout/slices/failed": 0},
        {"step": 2, "sample/skipped_step": 1.0, "sample/dropped_stale_groups": 3},
    ]
    lines += [{"step": 2, "sample/dropped_stale_groups": 3}]  # another agent says the same
    assert lost(lines) == {"steps skipped": 2, "groups too old": 3}
    assert lost([]) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (65, "1 min 05 s"), (3600, "1 h 00 min"), (7265, "2 h 01 min"), (-3, "0 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
