"""One body for the synchronous and the asynchronous form of a workflow: a coroutine that never waits in the synchronous
form.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from trinity_mq.experience import Experience
from trinity_mq.runtime.threads import in_thread
from trinity_mq.telemetry.trace import span
from trinity_mq.workflows.workflow import Workflow

T = TypeVar("T")

_OLDER_HELPERS = {
    "body": ("_dual_body", True, ("self",)),
    "take_step": ("_agent_step", True, ("self", "step_num")),
    "final_reward": ("_run_reward", True, ("self", "exps")),
    "rewarded": ("_rewarded_responses", False, ("self", "responses")),
}
"""Helpers by their names in release 0.2.0: the current name, whether it is a coroutine function, and its parameters."""


class DualWorkflow(Workflow):
    """A workflow with a synchronous and an asynchronous form: write :meth:`_dual_body`; a subclass with ``is_async =
    True`` is the asynchronous form.

    The asynchronous form awaits the body. The synchronous form runs the body in the workflow's thread without an event
    loop: there, the functions below make blocking calls, so the body never waits.

    The names of the helpers of all subclasses begin with an underscore: a workflow of a user may have attributes and
    methods with any public name. A method with the name that a helper had in release 0.2.0 still overrides the helper.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let methods with older names of helpers override these helpers."""
        super().__init_subclass__(**keywords)
        for older, helper in _older_helpers(cls).items():
            warnings.warn(
                f"{cls.__qualname__}.{older} overrides a helper that is now {helper}: rename the method; the older "
                "name goes with release 0.3",
                DeprecationWarning,
                stacklevel=2,
            )
            setattr(cls, helper, vars(cls)[older])

    def run(self) -> list[Experience]:
        return run_to_completion(self._dual_body())

    async def run_async(self) -> list[Experience]:
        return await self._dual_body()

    async def _dual_body(self) -> list[Experience]:
        """Run the task and return at least one experience with a reward."""
        raise NotImplementedError(f"{type(self).__name__} has no _dual_body(); write it")


def _older_helpers(kind: type[DualWorkflow]) -> dict[str, str]:
    """Return the helpers that a class overrides by their older names: current names by older names. An override is a
    method with the helper's parameters, and a coroutine function if the helper is. A class with its own ``run`` or
    ``run_async`` does not use the helpers, so it overrides none.
    """
    helpers: dict[str, str] = {}
    if "run" in vars(kind) or "run_async" in vars(kind):
        return helpers
    for older, (helper, is_coroutine, parameters) in _OLDER_HELPERS.items():
        method = vars(kind).get(older)
        if (
            inspect.isfunction(method)
            and inspect.iscoroutinefunction(method) is is_coroutine
            and tuple(inspect.signature(method).parameters) == parameters
            and hasattr(kind, helper)
        ):
            helpers[older] = helper
    return helpers


def run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits.

    Raises:
        RuntimeError: The coroutine waits.
    """
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
    """Call the method ``name`` of ``owner`` or, if ``asynchronous``, its form ``{name}_async``."""
    if asynchronous:
        return await getattr(owner, f"{name}_async")(*args, **keywords)
    return getattr(owner, name)(*args, **keywords)


async def run_in_thread_if_async(asynchronous: bool, function: Callable[[], T], name: str) -> T:
    """Return the result of ``function``, which blocks. If ``asynchronous``, it runs in a thread called ``name``."""

    def computed() -> T:
        with span(f"compute {name}"):
            return function()

    with span(f"await {name}", wait=True):
        return await in_thread(computed, name) if asynchronous else computed()


async def gather(asynchronous: bool, coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines, which run concurrently if ``asynchronous``, else in turn. The first error
    is raised; it cancels coroutines that still run.
    """
    if not asynchronous:
        return [await coroutine for coroutine in coroutines]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
