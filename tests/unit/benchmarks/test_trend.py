"""A series that grows is told from one that is noisy."""

from __future__ import annotations

import random

import pytest

from benchmarks.trend import LEAST_POINTS, trend


def series(growth: float, noise: float, *, level: float = 300.0, points: int = 600) -> list[tuple[float, float]]:
    chance = random.Random(7)
    return [(5.0 * n, level + growth * n / points + chance.gauss(0, noise)) for n in range(points)]


@pytest.mark.parametrize(("growth", "noise", "flat"), [(0, 1, True), (2, 3, True), (20, 3, False), (-20, 3, True)])
def test_growth_is_told_from_noise(growth: float, noise: float, flat: bool) -> None:
    found = trend(series(growth, noise))
    assert found is not None
    assert found.is_flat is flat
    assert found.growth == pytest.approx(growth, abs=noise)
    assert found.noise == pytest.approx(2 * noise, rel=0.5)
    assert found.an_hour == pytest.approx(found.growth * 3600 / found.seconds)


def test_outliers_do_not_count_and_stairs_do() -> None:
    outliers = [(at, value + (400 if n % 50 == 0 else 0)) for n, (at, value) in enumerate(series(0, 1))]
    flat = trend(outliers)
    assert flat is not None
    assert flat.is_flat
    stairs = trend([(float(n), 100.0 + 10 * (n // 50)) for n in range(500)])
    assert stairs is not None
    assert not stairs.is_flat


def test_too_few_points_say_nothing() -> None:
    assert trend([(float(n), 1.0) for n in range(LEAST_POINTS - 1)]) is None
