"""What the benchmark of overlapping makes of a run's metrics."""

import pytest

from benchmarks.bench_overlap import measured


def line(role: str, step: int, end: float, **values: float) -> dict[str, object]:
    return {"agent": f"{role}-0", "role": role, "step": step, "time": end} | values


def train(step: int, end: float, seconds: float, waited: float) -> dict[str, object]:
    values = {"trainer/step": float(step), "time/batch": seconds, "time/wait_data": waited}
    return line("trainer", step, end, **values)


def test_one_after_the_other_both_are_idle_half_of_the_time():
    lines = []
    for step in (1, 2, 3):
        lines.append(line("explorer", step, 2.0 * step - 1, **{"time/explore": 1.0}))
        lines.append(train(step, 2.0 * step, 0.9, 1.0))
        lines.append(line("trainer", step, 2.0 * step + 0.1, **{"time/sync": 0.1}))
    found = measured(lines)
    assert found.seconds == pytest.approx(4.0), "from the end of the first step"
    assert found.trainer_idle == pytest.approx(0.5)
    assert found.runners_idle == pytest.approx(0.5)
    assert (found.train, found.rollout, found.sync) == pytest.approx((0.9, 1.0, 0.1))


def test_batches_that_overlap_each_other_count_once_and_only_within_the_time_measured():
    lines = [train(1, 10.0, 1.0, 5.0), train(2, 12.0, 2.0, 0.0), train(3, 14.0, 2.0, 0.5)]
    lines.append(line("trainer", 2, 12.2, **{"time/sync": 0.2}))
    lines.append(line("explorer", 2, 11.0, **{"time/explore": 3.0}))  # from 8, two seconds too early
    lines.append(line("explorer", 3, 12.0, **{"time/explore": 1.5}))  # from 10.5, while batch 2 is open
    lines.append(line("explorer", 4, 15.0, **{"time/explore": 2.0}))  # from 13 to beyond the last step
    found = measured(lines)
    assert found.runners_idle == pytest.approx(0.25), "from 12 to 13 of 10 to 14"
    assert found.trainer_idle == pytest.approx(0.125), "what the first step waited for is before the time measured"


def test_the_warm_up_is_left_out():
    lines = [train(step, end, 9.0 if step < 3 else 1.0, 0.0) for step, end in ((1, 9.0), (2, 18.0), (3, 20.0))]
    for step in (1, 2, 3):
        lines.append(line("explorer", step, 10.0 * step - 10.5, **{"time/explore": 1.0}))
        lines.append(line("trainer", step, 10.0 * step - 10.5, **{"time/sync": 0.1}))
    found = measured(lines, 2)
    assert (found.seconds, found.train) == pytest.approx((2.0, 1.0))
