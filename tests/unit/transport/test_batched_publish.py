from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from trinity_agents.runner.result_publisher import BatchedPublish


class Calls:
    """Answers each item by itself and its key, when let."""

    def __init__(self) -> None:
        self.made: list[tuple[str, list[str]]] = []
        self.gate = asyncio.Event()
        self.failing: Exception | None = None

    async def __call__(self, key: str, items: list[str]) -> Sequence[str]:
        self.made.append((key, list(items)))
        await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        return [f"{key}:{item}" for item in items]


def made(
    calls: Calls, *, max_batch_size: int = 100, size_of: Callable[[str], int] = len
) -> BatchedPublish[str, str, str]:
    return BatchedPublish(calls, max_batch_size=max_batch_size, size_of=size_of)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_alone_an_item_goes_at_once() -> None:
    calls = Calls()
    calls.gate.set()
    together = made(calls)
    assert await together.publish("k", "a") == "k:a"
    assert await together.publish("k", "b") == "k:b"
    assert calls.made == [("k", ["a"]), ("k", ["b"])]


async def test_what_comes_during_a_call_goes_along_with_the_next_key_by_key() -> None:
    calls = Calls()
    together = made(calls)
    asked = [asyncio.ensure_future(together.publish("k", "a"))]
    await turns()
    asked += [
        asyncio.ensure_future(together.publish(key, item)) for key, item in [("k", "b"), ("other", "c"), ("k", "d")]
    ]
    await turns()
    assert calls.made == [("k", ["a"]), ("other", ["c"])]
    calls.gate.set()
    assert await asyncio.gather(*asked) == ["k:a", "k:b", "other:c", "k:d"]
    assert calls.made[2:] == [("k", ["b", "d"])]


async def test_no_call_weighs_more_than_it_may_but_a_single_item_may() -> None:
    calls = Calls()
    together = made(calls, max_batch_size=3)
    asked = [asyncio.ensure_future(together.publish("k", item)) for item in ("aa", "b", "cc", "dd", "eeeee", "f")]
    calls.gate.set()
    await asyncio.gather(*asked)
    assert [items for _, items in calls.made] == [["aa", "b"], ["cc"], ["dd"], ["eeeee"], ["f"]]


async def test_a_failure_is_everybodys_who_was_in_that_call_and_nobody_elses() -> None:
    calls = Calls()
    together = made(calls, max_batch_size=2)
    asked = [asyncio.ensure_future(together.publish("k", item)) for item in "abc"]
    await turns()
    calls.failing = ValueError("no")
    calls.gate.set()
    await asyncio.wait(asked[:2])
    calls.failing = None
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(answer) for answer in answers[:2]] == [ValueError, ValueError]
    calls.gate.set()
    assert await together.publish("k", "d") == "k:d"


async def test_one_who_leaves_takes_nobody_along() -> None:
    calls = Calls()
    together = made(calls)
    first, second = (asyncio.ensure_future(together.publish("k", item)) for item in "ab")
    await turns()
    first.cancel()
    await turns()
    calls.gate.set()
    assert await second == "k:b"
    assert first.cancelled()


async def test_closing_ends_what_waits_and_leaves_no_task() -> None:
    calls = Calls()
    together = made(calls, max_batch_size=1)
    asked = [asyncio.ensure_future(together.publish("k", item)) for item in "abc"]
    await turns()
    await together.close()
    await asyncio.wait(asked)
    assert all(each.cancelled() for each in asked)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_lingering_gathers_what_comes_apart_in_time() -> None:
    calls = Calls()
    calls.gate.set()
    seconds = [0.05]
    together: BatchedPublish[str, str, str] = BatchedPublish(
        calls, max_batch_size=10, linger_seconds=lambda: seconds[0]
    )

    async def later() -> str:
        await asyncio.sleep(0.005)
        return await together.publish("k", "b")

    assert await asyncio.gather(together.publish("k", "a"), later()) == ["k:a", "k:b"]
    assert calls.made == [("k", ["a", "b"])]
    seconds[0] = 0.0
    await asyncio.gather(together.publish("k", "a"), later())
    assert calls.made[1:] == [("k", ["a"]), ("k", ["b"])]


async def test_a_wrong_number_of_answers_is_an_error() -> None:
    async def short(key: str, items: list[str]) -> list[str]:
        return items[:-1]

    together: BatchedPublish[str, str, str] = BatchedPublish(short, max_batch_size=10)
    with pytest.raises(ValueError, match="zip"):
        await together.publish("k", "a")
