"""The rules of pacing, explored exhaustively: every interleaving of an explorer and a trainer that follow them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from trinity_mq.config import ConfigError, SyncConfig, load_config
from trinity_mq.dispatch.pacing import (
    Boundary,
    TrainerCounters,
    has_room,
    last_with_room,
    may_open,
    must_ask,
    required_answer,
    sync_due,
)

STYLES = ("fixed", "trainer_driven", "explorer_driven", "fully_async")
BATCHES = 10


@dataclass(frozen=True)
class World:
    """An explorer and a trainer between two events. Batches are trained in the order in which they were opened."""

    opened: int = 0
    stamps: tuple[int, ...] = ()
    """Steps behind the weights on which each batch not yet consumed was opened."""
    progress: int = 0
    step: int = 0
    committed: int = 0
    committed_progress: int = 0
    wants: int = 0
    answered: int = 0

    @property
    def counters(self) -> TrainerCounters:
        return TrainerCounters(self.progress, self.committed_progress, self.answered)

    def due(self, config: SyncConfig) -> bool:
        version, committed = (1, self.step), (1, self.committed)
        at_end = self.progress == BATCHES
        return sync_due(
            Boundary(
                self.progress, version, committed, self.committed_progress, self.wants, self.answered, at_end=at_end
            ),
            config,
        )

    def next(self, config: SyncConfig) -> Iterator[World]:
        """All that can happen now."""
        batch = self.opened + 1
        if self.opened < BATCHES and may_open(batch, self.counters, config):
            yield replace(self, opened=batch, stamps=(*self.stamps, self.committed))
        elif self.opened < BATCHES and must_ask(batch, self.counters, config):
            asked = required_answer(batch, config)
            if asked > self.wants:
                yield replace(self, wants=asked)
        if self.due(config):
            yield replace(self, committed=self.step, committed_progress=self.progress, answered=self.wants)
        elif self.stamps:
            rest = replace(self, stamps=self.stamps[1:], progress=self.progress + 1)
            yield replace(rest, step=self.step + 1)
            yield rest  # empty, failed, dropped

    @property
    def is_over(self) -> bool:
        return self.progress == BATCHES and self.committed == self.step


def explore(config: SyncConfig) -> tuple[set[World], int]:
    """Return every state there is, and the greatest staleness of a batch when its turn to be trained has come."""
    todo, seen, oldest = [World()], {World()}, 0
    while todo:
        world = todo.pop()
        following = list(world.next(config))
        assert following or world.is_over, f"nothing can happen any more: {world}"
        if world.stamps and not world.due(config):
            oldest = max(oldest, world.step - world.stamps[0])
        fresh = [one for one in following if one not in seen]
        seen.update(fresh)
        todo += fresh
    return seen, oldest


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("interval", "ahead"), list(itertools.product(range(1, 5), range(5))))
def test_no_order_of_events_hangs_or_makes_older_data_than_promised(style: str, interval: int, ahead: int) -> None:
    name = "sync_offset" if style == "fixed" else "pipeline_depth"
    config = SyncConfig.model_validate({"sync_style": style, "sync_interval": interval, name: ahead})
    seen, oldest = explore(config)
    assert oldest == config.inherent_staleness, "never more, and as much is possible"
    for counters in {world.counters for world in seen}:
        last = last_with_room(counters, config)
        assert has_room(last, counters, config)
        assert not has_room(last + 1, counters, config)
    depth = interval + ahead if style == "fixed" else ahead + 1
    assert last_with_room(TrainerCounters(), config) == depth
    assert max(len(world.stamps) for world in seen) == min(depth, BATCHES), "how far the explorer runs ahead"


@pytest.mark.parametrize("interval", range(1, 5))
def test_on_fixed_without_offset_every_batch_of_a_period_has_the_same_weights(interval: int) -> None:
    config = SyncConfig(sync_interval=interval)
    seen, _ = explore(config)
    for world in seen:
        if world.stamps and world.step == world.progress:  # nothing was left out so far
            first = world.progress // interval * interval
            assert set(world.stamps) <= {first}, world


def test_explorer_driven_asks_once_every_interval_and_never_for_the_first_weights() -> None:
    config = SyncConfig(sync_style="explorer_driven", sync_interval=3)
    assert [required_answer(batch, config) for batch in range(1, 9)] == [0, 0, 0, 4, 4, 4, 7, 7]
    ready = TrainerCounters(progress=5)
    assert must_ask(4, ready, config)
    assert not may_open(4, ready, config)
    assert may_open(4, replace(ready, answered=4), config)
    assert not must_ask(4, TrainerCounters(progress=1), config), (
        "there is no room for it: weights would be old when there is"
    )


def test_a_new_life_of_the_trainer_waits_for_members_no_later_than_after_an_interval() -> None:
    for style in ("trainer_driven", "fully_async"):
        config = SyncConfig.model_validate({"sync_style": style, "sync_interval": 2})
        fresh = Boundary(progress=8, version=(2, 8), committed=None, committed_progress=0, first_step=7)
        assert not sync_due(fresh, config)
        assert sync_due(replace(fresh, version=(2, 9)), config)
        assert sync_due(replace(fresh, at_end=True), config), "the engines must hold the final weights"


def test_what_is_asked_for_at_the_end_is_answered_too() -> None:
    config = SyncConfig(sync_style="explorer_driven")
    end = Boundary(
        progress=4, version=(1, 4), committed=(1, 4), committed_progress=4, wanted=4, answered=0, at_end=True
    )
    assert sync_due(end, config)
    assert not sync_due(replace(end, answered=4), config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync_style": "trainer_driven", "sync_offset": 1}, "pipeline_depth says"),
        ({"sync_interval": 2, "sync_offset": 1, "max_staleness": 1}, "up to 2 steps old"),
        ({"sync_style": "fully_async", "sync_interval": 4, "max_staleness": 2}, "no further step would be possible"),
        ({"sync_interval": 0}, "greater than or equal to 1"),
        ({"sync_style": "fuly_async"}, "fully_async"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_with_the_reason(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({"name": "x", "model": {"tiny": {}}, "synchronizer": settings})


def test_outside_fixed_a_smaller_bound_than_the_styles_own_may_be_asked_for() -> None:
    config = SyncConfig(sync_style="fully_async", sync_interval=2, pipeline_depth=2, max_staleness=1)
    assert (config.inherent_staleness, config.effective_max_staleness) == (4, 1)
    assert SyncConfig(sync_style="fully_async").effective_max_staleness == 2
    assert SyncConfig(sync_style="explorer_driven").effective_max_staleness == 1
    # the names that Trinity uses are taken too
    for name, style in (("dynamic_by_trainer", "trainer_driven"), ("dynamic_by_explorer", "explorer_driven")):
        assert SyncConfig.model_validate({"sync_style": name}).sync_style == style
