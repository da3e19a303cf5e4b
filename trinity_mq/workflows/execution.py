"""Executes a workflow once, on the event loop or in a thread, and checks its result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from trinity_mq.experience import Experience
from trinity_mq.experience.fields import short_repr
from trinity_mq.runtime.threads import in_thread, interrupt
from trinity_mq.workflows.errors import RunFailedError
from trinity_mq.workflows.workflow import Workflow


async def execute(
    make: Callable[[], Workflow],
    kind: type[Workflow],
    *,
    close: Callable[[], Awaitable[None]] | None = None,
    own_loop: bool = False,
) -> list[Experience]:
    """Run the workflow from ``make`` once; return its experiences.

    An asynchronous workflow is created and run on the event loop, or with ``own_loop`` on a loop in its own thread; any
    other workflow is run in its own thread. On cancellation, a thread is interrupted as soon as it executes Python
    code, and is not awaited.

    Args:
        make: Returns the workflow instance.
        kind: Class of the instance.
        close: Awaited at the end, also after an error, on the event loop where an asynchronous workflow ran.
        own_loop: Run an asynchronous workflow in its own thread, on an event loop of that thread.

    Raises:
        RunFailedError: The workflow did not return a list of experiences, returned an empty list, or tried to end the
            process or its own task.
        Exception: Any error that the workflow raises.
    """
    try:
        if kind.is_async and own_loop:
            alone = _OwnLoop(make, close)
            result = await in_thread(alone.run, kind.__name__, alone.stop)
        else:
            try:
                if kind.is_async:
                    result = await make().run_async()
                else:
                    result = await in_thread(lambda: make().run(), kind.__name__, interrupt)
            finally:
                if close is not None:
                    await close()
    except SystemExit as error:
        raise RunFailedError(
            f"{kind.__name__} called sys.exit({error.code!r}); a workflow reports failure by raising an exception"
        ) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RunFailedError(f"{kind.__name__} cancelled itself") from None
    if not isinstance(result, list) or not all(isinstance(item, Experience) for item in result):
        raise RunFailedError(f"{kind.__name__} returned {short_repr(result)}, wanted a list of experiences")
    if not result:
        raise RunFailedError(f"{kind.__name__} returned no experience; a run gives at least one")
    return result


class _OwnLoop:
    """An asynchronous workflow that runs in a thread on its own event loop."""

    def __init__(self, make: Callable[[], Workflow], close: Callable[[], Awaitable[None]] | None) -> None:
        self._make, self._close = make, close
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[list[Experience]] | None = None
        self._stopped = False

    def run(self) -> list[Experience]:
        """Run the workflow. Blocks until it ends."""
        return asyncio.run(self._main())

    async def _main(self) -> list[Experience]:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self._stopped:
            raise asyncio.CancelledError
        try:
            return await self._make().run_async()
        finally:
            if self._close is not None:
                await self._close()

    def stop(self, thread: int) -> None:
        """Cancel the workflow from another thread."""
        self._stopped = True
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
