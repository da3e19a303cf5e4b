"""Single calls made as one: what is asked for while a call is under way goes along with the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class BatchedPublish(Generic[Key, Item, Answer]):
    """Makes one call of many, key by key. Alone, an item goes at once.

    Args:
        call: Does some items of one key, and returns an answer for each. What it raises, all of them get.
        most: Weight of the items that go together, at most; one goes whatever it weighs.
        weight: Of an item.
        linger: Says how many seconds to wait for company before a call.
    """

    def __init__(
        self,
        call: Callable[[Key, list[Item]], Awaitable[Sequence[Answer]]],
        *,
        most: int,
        weight: Callable[[Item], int] = lambda item: 1,
        linger: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._call, self._most, self._weight, self._linger = call, most, weight, linger
        self._waiting: dict[Key, deque[tuple[Item, asyncio.Future[Answer]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, key: Key, item: Item) -> Answer:
        """Have ``item`` done and return its answer. Who is cancelled meanwhile does not learn whether it was done."""
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
        """Cancel what is under way, and all that waits."""
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
                if (seconds := self._linger()) > 0.0:
                    await asyncio.sleep(seconds)
                group = self._next(waiting)
                try:
                    answers = await self._call(key, [item for item, _ in group])
                    answered = list(zip(group, answers, strict=True))
                except Exception as error:
                    for _, future in group:
                        if not future.done():
                            future.set_exception(error)
                else:
                    for (_, future), answer in answered:
                        if not future.done():
                            future.set_result(answer)
        finally:
            del self._waiting[key]
            for _, future in (*group, *waiting):
                future.cancel()

    def _next(self, waiting: deque[tuple[Item, asyncio.Future[Answer]]]) -> list[tuple[Item, asyncio.Future[Answer]]]:
        group = [waiting.popleft()]
        total = self._weight(group[0][0])
        while waiting and (total := total + self._weight(waiting[0][0])) <= self._most:
            group.append(waiting.popleft())
        return group
