"""The table of evaluations: what is in it, in which order, as text and as CSV."""

from __future__ import annotations

from trinity_mq.observability.report.evaluations import evaluation_table


def test_a_row_for_each_step_and_a_column_for_each_figure() -> None:
    lines = [
        {
            "step": 10,
            "eval/b/reward/mean@4": 0.5,
            "eval/b/accuracy/mean@4": 0.25,
            "eval/b/pass@4": 0.75,
            "time/eval": 1.0,
        },
        {"step": 0, "eval/b/accuracy/mean@4": 0.0, "eval/b/pass@2": 0.1, "eval/a/reward/mean@1": 1 / 3},
        {"step": 10, "eval/b/accuracy/mean@4": 0.5, "eval/b/accuracy/std@4": 9.0, "eval/b/version/max": 3.0},
    ]
    table = evaluation_table(lines)
    assert table.columns == [
        ("a", "reward/mean@1"),
        ("b", "accuracy/mean@4"),
        ("b", "pass@2"),
        ("b", "pass@4"),
        ("b", "reward/mean@4"),
    ]
    assert list(table.rows) == [0, 10]
    assert table.rows[10] == [None, 0.5, None, 0.75, 0.5]
    text = table.as_text()
    assert text[0].split() == [
        "step",
        "a",
        "reward/mean@1",
        "b",
        "accuracy/mean@4",
        "b",
        "pass@2",
        "b",
        "pass@4",
        "b",
        "reward/mean@4",
    ]
    assert text[2].split() == ["10", "-", "0.500", "-", "0.750", "0.500"]
    assert len(set(map(len, text))) == 1
    assert table.as_csv().splitlines()[1] == "0,0.3333333333333333,0.0,0.1,,"


def test_nothing_to_show() -> None:
    table = evaluation_table([{"step": 1, "rollout/reward/mean": 1.0}, {"step": 2, "eval/x/accuracy/mean@1": None}])
    assert table.as_text() == []
