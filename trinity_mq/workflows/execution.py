"""One go at a workflow, where it belongs, and a check of what it gave back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trinity_mq.experience import Experience
from trinity_mq.workflows.threads import in_thread
from trinity_mq.workflows.workflow import Workflow


class RunFailedError(Exception):
    """A run of a workflow gave nothing that can be used; the message says why."""


async def execute(make: Callable[[], Workflow], kind: type[Workflow]) -> list[Experience]:
    """Return the experiences of one go at the workflow that ``make`` returns, of class ``kind``.

    An asynchronous workflow is made and run on the event loop, any other in a thread of its own.

    Raises:
        RunFailedError: It returned no list of experiences or an empty one, or tried to end the process or its own task.
        Exception: Whatever the workflow raises.
    """
    try:
        if kind.is_async:
            result = await make().run_async()
        else:
            result = await in_thread(lambda: make().run(), kind.__name__)
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
        raise RunFailedError(f"{kind.__name__} returned {_short(result)}, wanted a list of experiences")
    if not result:
        raise RunFailedError(f"{kind.__name__} returned no experience; a run gives at least one")
    return result


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
