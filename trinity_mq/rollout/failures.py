"""Texts that say how a run of a workflow failed and where in its author's file, and which of them are of one kind."""

from __future__ import annotations

import inspect
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from trinity_mq.algorithms.estimators.runs import is_finite
from trinity_mq.experience import Experience
from trinity_mq.experience.fields import short
from trinity_mq.workflows import RunFailedError, Workflow

MAX_ERROR = 500
"""Characters of an exception's own text that are kept, so that the place behind it is."""
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},)
_PROJECT = tuple(str(Path(__file__).parents[2] / package) + "/" for package in ("trinity_mq", "agents/trinity_agents"))
_RAISED = re.compile(r"(\w+)(?:: .*)? \(([^()]+:\d+)[^()]*\)", re.DOTALL)


def describe(error: BaseException, kind: type[Workflow] | None = None) -> str:
    """Return error and place in one line, such as ``KeyError: 'answer' (my_workflow.py:17)``.

    The place is the innermost line of the author's own code; without one, as where a workflow returned nothing, the
    line at which the workflow's class ``kind`` defines its run.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."
    if isinstance(error, RunFailedError):
        return text if kind is None else f"{text}{_place_of(kind)}"
    name = type(error).__name__
    return f"{name}: {text}{_place(error)}" if text else f"{name}{_place(error)}"


def failure_key(text: str) -> str:
    """Return what texts of failures of one kind have in common: the exception's type and place, else the text without
    its numbers.

    >>> failure_key("KeyError: 'a' (my.py:17)") == failure_key("KeyError: 'b' (my.py:17)")
    True
    """
    raised = _RAISED.fullmatch(text)
    return f"{raised[1]} {raised[2]}" if raised else re.sub(r"\d+", "#", text)


def reward_fault(kind: type[Workflow], experiences: Sequence[Experience], *, needed: bool) -> str | None:
    """Return why one run will not be trained on although it is finished, None if its rewards are in order.

    Args:
        kind: The workflow.
        experiences: Of the run, in the order in which the workflow returned them.
        needed: The last step must have a reward.
    """
    for experience in experiences:
        if experience.reward is not None and not is_finite(experience.reward):
            fault = f"returned the reward {short(experience.reward)}, wanted a finite number"
            return f"{kind.__name__} {fault}{_place_of(kind)}"
    if needed and last_step(experiences).reward is None:
        return f"{kind.__name__} returned no reward; set experience.reward to a number{_place_of(kind)}"
    return None


def last_step(experiences: Sequence[Experience]) -> Experience:
    """Return the last step of a run: that of the largest ``eid.step``, of equals the one listed last."""
    if len(experiences) == 1:
        return experiences[0]
    return max(reversed(experiences), key=lambda one: one.eid.step)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    raised = frames[-1]
    own = next((frame for frame in reversed(frames) if _is_own(frame.filename)), raised)
    if own is raised:
        return f" ({_shown(own.filename)}:{own.lineno})"
    return f" ({_shown(own.filename)}:{own.lineno}, raised in {Path(raised.filename).name}:{raised.lineno})"


def _place_of(kind: type[Workflow]) -> str:
    function = inspect.unwrap(kind.run_async if kind.is_async else kind.run)
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({_shown(code.co_filename)}:{code.co_firstlineno})"


def _is_own(file: str) -> bool:
    return not file.startswith(("<", *_LIBRARIES, *_PROJECT))


def _shown(file: str) -> str:
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or the working directory is gone
        return path.name
