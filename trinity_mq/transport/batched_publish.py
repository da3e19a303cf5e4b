"""Coalesces concurrent calls per key into one batched call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class BatchedPublish(Generic[Key, Item, Answer]):
    """Batches items per key: items that arrive during a call are sent with the next call. A single item is sent at
    once.

    Args:
        call: Processes several items of one key. It returns an answer or an exception for each item. If it raises, its
            exception is raised for every item.
        max_batch_size: Maximum total size of the items of one call. A single item may be larger.
        size_of: Returns the size of an item.
        linger_seconds: Returns the seconds to wait for further items before a call.
    """

    def __init__(
        self,
        call: Callable[[Key, list[Item]], Awaitable[Sequence[Answer | Exception]]],
        *,
        max_batch_size: int,
        size_of: Callable[[Item], int] = lambda item: 1,
        linger_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._call, self._max_batch_size = call, max_batch_size
        self._size_of, self._linger_seconds = size_of, linger_seconds
        self._waiting: dict[Key, deque[tuple[Item, asyncio.Future[Answer]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(self, key: Key, item: Item) -> Answer:
        """Process ``item`` in a batch and return its answer. A cancelled caller does not learn the outcome."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if key in self._waiting:
            self._waiting[key].append((item, future))
        else:
            self._waiting[key] = deque([(item, future)])
            task = asyncio.create_task(self._serve(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def close(self) -> None:
        """Cancel the running calls and all waiting items."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, key: Key) -> None:
        waiting = self._waiting[key]
        group: list[tuple[Item, asyncio.Future[Answer]]] = []
        try:
            while waiting:
                if (seconds := self._linger_seconds()) > 0.0:
                    await asyncio.sleep(seconds)
                group = self._next(waiting)
                answered: list[tuple[tuple[Item, asyncio.Future[Answer]], Answer | Exception]]
                try:
                    answers = await self._call(key, [item for item, _ in group])
                    answered = list(zip(group, answers, strict=True))
                except Exception as error:
                    answered = [(entry, error) for entry in group]
                for (_, future), answer in answered:
                    if future.done():
                        continue
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        finally:
            del self._waiting[key]
            for _, future in (*group, *waiting):
                future.cancel()

    def _next(self, waiting: deque[tuple[Item, asyncio.Future[Answer]]]) -> list[tuple[Item, asyncio.Future[Answer]]]:
        group = [waiting.popleft()]
        total = self._size_of(group[0][0])
        while waiting and (total := total + self._size_of(waiting[0][0])) <= self._max_batch_size:
            group.append(waiting.popleft())
        return group
