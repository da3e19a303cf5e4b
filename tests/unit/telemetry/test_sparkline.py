from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.telemetry import sparkline


def test_rises_with_the_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"


def test_long_series_are_averaged() -> None:
    assert sparkline([0, 0, 0, 8, 8, 8], width=2) == "▁█"


def test_gaps_and_constants() -> None:
    assert sparkline([0.0, None, math.nan, 1.0]) == "▁  █"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline([None, math.inf]) == "  "
    assert sparkline([]) == ""


def test_fixed_ends() -> None:
    assert sparkline([0.5], low=0, high=1) == "▅"
    assert sparkline([-1, 2], low=0, high=1) == "▁█"


def test_the_greatest_numbers_there_are() -> None:
    great = 1.7e308
    assert sparkline([great, -great]) == "█▁"
    assert sparkline([great, great, -great, -great], width=2) == "█▁"


def test_width_must_hold_a_bar() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        sparkline([1], width=0)


@given(st.lists(st.one_of(st.none(), st.floats())), st.integers(1, 80))
def test_never_wider_than_asked(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))
