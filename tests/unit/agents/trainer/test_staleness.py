"""Stale data goes by whole groups."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_agents.trainer.batch_result import drop_stale, staleness
from trinity_mq.experience import EID, Experience


def one(task: int, run: int, *steps: int) -> Experience:
    """An experience whose tokens were sampled at these steps, one token each."""
    return Experience(
        eid=EID(batch=1, task=task, run=run),
        tokens=torch.tensor([3, *range(4, 4 + max(1, len(steps)))], dtype=torch.int32),
        prompt_length=1,
        logprobs=torch.zeros(max(1, len(steps))),
        reward=1.0,
        versions=[(n, 1, step) for n, step in enumerate(steps)] or None,
    )


def test_the_oldest_token_decides_and_nothing_is_younger_than_zero() -> None:
    assert staleness(one(0, 0, 5, 3, 4).versions, 6) == 3
    assert staleness(one(0, 0, 9).versions, 6) == 0
    assert staleness(one(0, 0).versions, 6) == 0, "not sampled by this policy"


def test_one_old_run_takes_its_whole_group_along_and_no_other() -> None:
    experiences = [one(0, 0, 4), one(0, 1, 1, 4), one(1, 0, 3), one(1, 1, 4)]
    kept, metrics = drop_stale(experiences, 4, 2)
    assert [(e.eid.task, e.eid.run) for e in kept] == [(1, 0), (1, 1)]
    assert metrics == {
        "sample/dropped_stale_groups": 1.0,
        "sample/dropped_stale_experiences": 2.0,
        "sample/experiences": 2.0,
        "sample/staleness/mean": 0.5,
        "sample/staleness/max": 1.0,
        "sample/staleness/groups/mean": 1.0,
    }


def test_with_nothing_left_there_is_no_age() -> None:
    kept, metrics = drop_stale([one(0, 0, 0)], 4, 3)
    assert len(kept) == 0
    assert metrics["sample/experiences"] == 0.0
    assert "sample/staleness/max" not in metrics


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12),
    now=st.integers(0, 9),
    limit=st.integers(0, 5),
)
def test_what_is_kept_is_fit_and_what_is_dropped_has_an_unfit_one_in_its_group(
    steps: list[tuple[int, int]], now: int, limit: int
) -> None:
    experiences = [one(task, run, step) for run, (task, step) in enumerate(steps)]
    kept, metrics = drop_stale(experiences, now, limit)
    assert all(staleness(e.versions, now) <= limit for e in kept)
    assert metrics["sample/experiences"] + metrics["sample/dropped_stale_experiences"] == len(experiences)
    left = {e.eid.task for e in kept}
    for e in experiences:
        group_is_fit = all(staleness(o.versions, now) <= limit for o in experiences if o.eid.task == e.eid.task)
        assert (e.eid.task in left) is group_is_fit
