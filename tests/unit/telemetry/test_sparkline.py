from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.telemetry import sparkline


def test_rises_with_the_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"


def test_long_series_are_averaged() -> None:
    assert sparkline([0, 0, 0, 8, 8, 8], width=2) == "▁█"


def test_what_is_not_finite_is_left_out_and_constants_are_low() -> None:
    assert sparkline([0.0, math.nan, 1.0]) == "▁█"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline([math.inf]) == ""
    assert sparkline([]) == ""


def test_the_greatest_numbers_there_are() -> None:
    great = 1.7e308
    assert sparkline([great, -great]) == "█▁"
    assert sparkline([great, great, -great, -great], width=2) == "█▁"


@given(st.lists(st.floats()), st.integers(1, 80))
def test_never_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, sum(map(math.isfinite, values)))
