"""What a workflow raises, kept with its place before anything above makes one line of it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trinity_mq.experience import Experience
from trinity_mq.rollout.attempts import describe, engine_trouble
from trinity_mq.workflows import RunFailedError, Workflow


@dataclass(frozen=True)
class Trouble:
    """Why a run failed."""

    type: str
    message: str
    file: str
    line: int
    function: str
    """Where: the innermost place in the workflow's own file, else the innermost of all."""
    was_interrupted: bool
    """It raised nothing: it was there when its time was up."""
    traceback: str


class Caught:
    """The last exception that left a workflow of class ``kind``."""

    def __init__(self, kind: type[Workflow]) -> None:
        self._file = inspect.getsourcefile(kind) or ""
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what is raised inside, and let it pass; a runner would wait for an engine that does not answer, here
        that is the end.
        """
        try:
            yield
        except BaseException as error:
            self._error = error
            if engine_trouble(error) is not None:
                raise RunFailedError(describe(error)) from None
            raise

    def trouble(self) -> Trouble | None:
        """Return what was caught, None if nothing was."""
        error = self._error
        if error is None:
            return None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        own = [frame for frame in frames if frame.filename == self._file]
        place = (own or frames or [traceback.FrameSummary("?", 0, "?")])[-1]
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list(
            [frame for frame in shown.stack if frame.filename not in {__file__, contextlib.__file__}]
        )
        return Trouble(
            type=type(error).__name__,
            message=" ".join(str(error).split()),
            file=place.filename,
            line=place.lineno or 0,
            function=place.name,
            was_interrupted=isinstance(error, asyncio.CancelledError),
            traceback="".join(shown.format()),
        )


def watched(kind: type[Workflow], caught: Caught) -> type[Workflow]:
    """Return a workflow class that does what ``kind`` does, and keeps what it raises."""

    def __init__(self: Any, **given: Any) -> None:  # noqa: N807
        with caught.keeping():
            kind.__init__(self, **given)

    def run(self: Any) -> list[Experience]:
        with caught.keeping():
            return kind.run(self)

    async def run_async(self: Any) -> list[Experience]:
        with caught.keeping():
            return await kind.run_async(self)

    body = {"__init__": __init__, "run": run, "run_async": run_async, "__module__": kind.__module__}
    made: type[Workflow] = types.new_class(kind.__name__, (kind,), exec_body=lambda names: names.update(body))
    return made
