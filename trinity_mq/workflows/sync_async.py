"""One body for the synchronous and the asynchronous form of a workflow: a coroutine that never waits in the synchronous
form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from trinity_mq.experience import Experience
from trinity_mq.runtime.threads import in_thread
from trinity_mq.telemetry.trace import span
from trinity_mq.workflows.workflow import Workflow

T = TypeVar("T")


class DualWorkflow(Workflow):
    """A workflow usable in both forms: write :meth:`body`, and set ``is_async`` in a subclass for the asynchronous
    form.

    The asynchronous form awaits the body. The synchronous form runs the body in the workflow's thread without an event
    loop: there, the functions below make blocking calls, so the body never waits.
    """

    def run(self) -> list[Experience]:
        return run_to_completion(self.body())

    async def run_async(self) -> list[Experience]:
        return await self.body()

    async def body(self) -> list[Experience]:
        """Run the task and return at least one experience with a reward."""
        raise NotImplementedError(f"{type(self).__name__} has no body(); write it")


def run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError(
        "the body of a synchronous workflow awaited something else than call() and the other helpers of this module"
    )


async def call(asynchronous: bool, owner: Any, name: str, *args: Any, **keywords: Any) -> Any:
    """Call the method ``name`` of ``owner``, or its asynchronous form ``{name}_async``."""
    if asynchronous:
        return await getattr(owner, f"{name}_async")(*args, **keywords)
    return getattr(owner, name)(*args, **keywords)


async def run_in_thread_if_async(asynchronous: bool, function: Callable[[], T], name: str) -> T:
    """Return the result of a computing function. On an event loop, the function runs in a thread called ``name``."""

    def computed() -> T:
        with span(f"compute {name}"):
            return function()

    with span(f"await {name}", wait=True):
        return await in_thread(computed, name) if asynchronous else computed()


async def gather(asynchronous: bool, coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines, run concurrently on an event loop. The first error cancels the others and
    is raised.
    """
    if not asynchronous:
        return [await coroutine for coroutine in coroutines]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
