"""Verdicts that change only once another one has lasted."""

from __future__ import annotations

import pytest

from trinity_mq.observability.diagnosis import Bottleneck, RunFinding, bottleneck_filter, finding_filter
from trinity_mq.observability.diagnosis.flicker_filter import FINDING_SECONDS, LIMIT_SECONDS

ENGINE, SYNC = Bottleneck("engine", "engines", ""), Bottleneck("sync", "syncs", "")


def test_a_limit_is_named_once_it_has_lasted() -> None:
    steady = bottleneck_filter()
    assert steady.read(ENGINE, 100.0) is None
    assert steady.read(ENGINE, 100.0 + LIMIT_SECONDS - 1) is None
    assert steady.read(ENGINE, 100.0 + LIMIT_SECONDS) is ENGINE


@pytest.mark.parametrize("other", [SYNC, None], ids=["another stage", "no stage"])
def test_a_limit_that_is_not_read_now_and_then_stays(other: Bottleneck | None) -> None:
    steady = bottleneck_filter()
    for second in range(200):
        shown = steady.read(other if second % 2 and second > LIMIT_SECONDS else ENGINE, float(second))
        assert shown == (None if second < LIMIT_SECONDS else ENGINE)
    for second in range(200, 200 + int(LIMIT_SECONDS)):
        shown = steady.read(other, float(second))
    assert shown == other


def test_readings_that_come_up_now_and_then_do_not_keep_a_limit_from_being_named() -> None:
    steady = bottleneck_filter()
    for second in range(int(LIMIT_SECONDS) + 1):
        shown = steady.read(SYNC if second % 7 == 0 else ENGINE, float(second))
    assert shown == ENGINE


def test_the_words_of_the_same_verdict_are_the_latest() -> None:
    steady = bottleneck_filter()
    steady.shown = ENGINE
    later = Bottleneck("engine", "engines, 90 %", "")
    assert steady.read(later, 1.0) is later


def test_a_finding_changes_soon_and_the_end_of_a_run_at_once() -> None:
    steady = finding_filter()
    moving, waiting, over = RunFinding("moving", ""), RunFinding("waiting", "", "trainer-0"), RunFinding("over", "")
    for second in range(20):
        assert steady.read(waiting if second % 3 == 2 else moving, float(second)) is moving
    shown = [steady.read(waiting, float(second)) is waiting for second in range(20, 20 + int(FINDING_SECONDS))]
    assert not shown[0]
    assert shown[-1]
    assert steady.read(moving, 26.0) is waiting
    assert steady.read(over, 27.0) is over
