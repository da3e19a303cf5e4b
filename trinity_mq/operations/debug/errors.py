"""Records the exception that a workflow raises, with its traceback."""

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
from trinity_mq.rollout.attempts import engine_unavailable_error
from trinity_mq.rollout.failures import describe
from trinity_mq.workflows import RunFailedError, Workflow


@dataclass(frozen=True)
class WorkflowFailure:
    """The reason why the workflow's rollout failed."""

    type: str
    message: str
    file: str
    line: int
    function: str
    """Function name. Together with ``file`` and ``line`` it is the innermost frame in the workflow's own file, else the
    innermost frame."""
    was_interrupted: bool
    """True if the rollout was cancelled at this place, as at its time limit, instead of raising an error."""
    traceback: str


class ErrorRecorder:
    """Keeps the last exception raised by a workflow of class ``kind``."""

    def __init__(self, kind: type[Workflow]) -> None:
        self._file = inspect.getsourcefile(kind) or ""
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record and re-raise exceptions. Engine errors become RunFailedError, because after an engine error the runner
        would wait for an engine.
        """
        try:
            yield
        except BaseException as error:
            self._error = error
            if engine_unavailable_error(error) is not None:
                raise RunFailedError(describe(error)) from None
            raise

    def failure(self) -> WorkflowFailure | None:
        """Return the recorded failure; None if no exception was recorded."""
        error = self._error
        if error is None:
            return None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        workflow_frames = [frame for frame in frames if frame.filename == self._file]
        place = (workflow_frames or frames or [traceback.FrameSummary("?", 0, "?")])[-1]
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list(
            [frame for frame in shown.stack if frame.filename not in {__file__, contextlib.__file__}]
        )
        return WorkflowFailure(
            type=type(error).__name__,
            message=" ".join(str(error).split()),
            file=place.filename,
            line=place.lineno or 0,
            function=place.name,
            was_interrupted=isinstance(error, asyncio.CancelledError),
            traceback="".join(shown.format()),
        )


def recording_errors(kind: type[Workflow], errors: ErrorRecorder) -> type[Workflow]:
    """Return a subclass of ``kind`` that records its exceptions in ``errors``."""

    def __init__(self: Any, **arguments: Any) -> None:  # noqa: N807
        with errors.recording():
            kind.__init__(self, **arguments)

    def run(self: Any) -> list[Experience]:
        with errors.recording():
            return kind.run(self)

    async def run_async(self: Any) -> list[Experience]:
        with errors.recording():
            return await kind.run_async(self)

    body = {"__init__": __init__, "run": run, "run_async": run_async, "__module__": kind.__module__}
    made: type[Workflow] = types.new_class(kind.__name__, (kind,), exec_body=lambda names: names.update(body))
    return made
