"""Which acknowledgement frames go out; what a broker makes of them is tested in tests/broker."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from aiormq.exceptions import ChannelInvalidStateError

from trinity_mq.bus.rabbit.acknowledgements import Acknowledgements


class Channel:
    """Keeps the books of a broker: which deliveries are not answered yet."""

    def __init__(self, delivered: int = 100) -> None:
        self.open = set(range(1, delivered + 1))
        self.acked: set[int] = set()
        self.frames: list[tuple[str, int, bool]] = []
        self.is_closed = False

    async def basic_ack(self, tag: int, multiple: bool = False, wait: bool = True) -> None:
        if self.is_closed:
            raise ChannelInvalidStateError("closed")
        assert tag in self.open, f"{tag}: the broker closes a channel over an unknown delivery tag"
        self.frames.append(("ack", tag, multiple))
        meant = {each for each in self.open if each <= tag} if multiple else {tag}
        self.open -= meant
        self.acked |= meant

    async def basic_nack(self, tag: int, requeue: bool, wait: bool = True) -> None:
        self.frames.append(("nack", tag, False))
        self.open.remove(tag)

    async def basic_reject(self, tag: int, requeue: bool, wait: bool = True) -> None:
        self.frames.append(("reject", tag, False))
        self.open.remove(tag)


def answers(channel: Channel) -> Acknowledgements:
    given: Any = channel
    return Acknowledgements(given)


async def test_what_is_done_in_one_turn_without_a_gap_is_one_frame() -> None:
    channel = Channel()
    mine = answers(channel)
    for tag in (2, 1, 3):
        mine.ack(tag)
    await mine.flush()
    mine.ack(4)
    await mine.flush()
    assert channel.frames == [("ack", 3, True), ("ack", 4, False)]


async def test_behind_a_gap_each_has_its_own_frame_at_once() -> None:
    channel = Channel()
    mine = answers(channel)
    for tag in (1, 2, 5, 7):
        mine.ack(tag)
    await mine.flush()
    assert channel.frames == [("ack", 2, True), ("ack", 5, False), ("ack", 7, False)]
    for tag in (3, 4, 6):
        mine.ack(tag)
    await mine.flush()
    assert channel.frames[3:] == [("ack", 6, True)]
    assert channel.acked == {1, 2, 3, 4, 5, 6, 7}


async def test_what_was_given_back_is_never_acknowledged_by_a_later_frame() -> None:
    channel = Channel()
    mine = answers(channel)
    await mine.requeue(1)
    await mine.reject(3)
    for tag in (2, 4, 5):
        mine.ack(tag)
    await mine.flush()
    assert channel.acked == {2, 4, 5}
    assert [frame[0] for frame in channel.frames] == ["nack", "reject", "ack"]


async def test_any_order_acknowledges_exactly_what_was_done() -> None:
    dice = random.Random(7)
    for _ in range(200):
        channel = Channel(30)
        mine, left = answers(channel), list(range(1, 31))
        dice.shuffle(left)
        kept, done = left[:5], left[5:]
        for tag in done:
            if dice.random() < 0.1:
                await mine.requeue(tag)
            else:
                mine.ack(tag)
            if dice.random() < 0.4:
                await asyncio.sleep(0)
        await mine.flush()
        assert channel.open == set(kept)


async def test_a_closed_channel_is_no_error() -> None:
    channel = Channel()
    mine = answers(channel)
    mine.ack(1)
    channel.is_closed = True
    await mine.flush()
    assert mine.lost
    assert channel.frames == []
