"""The benchmark of observability: its reading of a run's metrics."""

import pytest

from benchmarks.bench_observability import tokens_a_second


def test_tokens_of_the_steps_after_the_first_ones_count():
    lines = [{"trainer/step": n, "time": 10.0 + 2 * n, "data/trained_tokens": 100.0 * n} for n in (1, 2, 3, 4, 5, 6)]
    lines.append({"time": 90.0, "time/sync": 1.0})
    assert tokens_a_second(lines) == pytest.approx((300 + 400 + 500 + 600) / 8)
