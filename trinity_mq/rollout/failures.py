"""Failures of runs: their kind, whether a retry can help, and messages with the reason and the line in the author's
file.
"""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import Sequence

from trinity_mq.algorithms.estimators.runs import is_finite
from trinity_mq.experience import Experience
from trinity_mq.experience.fields import short_repr
from trinity_mq.experience.rules import REWARD_FAULT
from trinity_mq.models.errors import EngineError, EngineRefused, ModelError
from trinity_mq.rewards import RewardError, UnknownNameError
from trinity_mq.rollout.status import RunFailure
from trinity_mq.runtime.errors import display_path, first_leaf, place
from trinity_mq.workflows import RunFailedError, SandboxFailed, TaskError, Workflow
from trinity_mq.workflows.auxiliary import AuxiliaryError
from trinity_mq.workflows.errors import causes
from trinity_mq.workflows.step_wise import TOO_LONG, prompt_too_long

MAX_ERROR = 500
"""Maximum characters kept of an exception's own text, so that the line number after it is not cut off."""
_RAISED = re.compile(r"(\w+)(?:: .*)? \(([^()]+:\d+)[^()]*\)", re.DOTALL)


INCURABLE = (TaskError, UnknownNameError, RewardError, ModelError, EngineRefused)
"""Errors that every further attempt would raise again."""

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (ModelError, "engine"),
    (EngineError, "engine"),
    (TaskError, "task"),
    (UnknownNameError, "task"),
    (RewardError, "task"),
    (TimeoutError, "timeout"),
    (ConnectionError, "environment"),
    (socket.gaierror, "environment"),
)
"""Failure kinds of exception classes that do not carry a kind themselves; the first match counts."""


def failure_of(error: BaseException, workflow: type[Workflow] | None = None) -> RunFailure:
    """Return the failure that describes an exception of an attempt; see :func:`describe`, :func:`kind_of`."""
    return RunFailure(describe(error, workflow), kind_of(error), is_retryable(error))


def kind_of(error: BaseException) -> str:
    """Return the failure kind of ``error`` or of one of its causes. Return ``workflow``, an error in the author's own
    code, if no cause has a kind.

    >>> kind_of(KeyError("answer")), kind_of(SandboxFailed("no answer", kind="tool"))
    ('workflow', 'tool')
    """
    for cause in causes(error):
        if isinstance(cause, RunFailedError):
            return cause.kind
        if isinstance(cause, AuxiliaryError) and cause.lost is not None:
            return "provider"
        if getattr(cause, "code", None) == TOO_LONG:
            return "task"
        for exception, kind in _KINDS:
            if isinstance(cause, exception):
                return kind
    return "workflow"


def is_retryable(error: BaseException) -> bool:
    """Return whether a further attempt may succeed. It cannot succeed if ``error`` or one of its causes was declared
    final, or if every further attempt would raise the error again. Of an exception group, its first exception decides.
    """
    final = any(isinstance(cause, RunFailedError) and not cause.retryable for cause in causes(error))
    incurable = isinstance(first_leaf(error), INCURABLE)
    return isinstance(error, Exception) and not (final or prompt_too_long(error) or incurable)


def describe(error: BaseException, kind: type[Workflow] | None = None) -> str:
    """Return error and place in one line, such as ``KeyError: 'answer' (my_workflow.py:17)``. For an exception group,
    they are of its first exception.

    The place is the innermost line of the author's own code. For a :class:`SandboxFailed` the text begins with its kind
    instead of its class: ``sandbox: connection refused (my_workflow.py:17)``. For any other :class:`RunFailedError` the
    text does not name a class, and the place is the line at which the workflow class ``kind`` defines its run method;
    without ``kind`` the text has no place.
    """
    error = first_leaf(error)
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."
    if isinstance(error, SandboxFailed):
        return f"{error.kind}: {text or type(error).__name__}{place(error)}"
    if isinstance(error, RunFailedError):
        return text if kind is None else f"{text}{_place_of(kind)}"
    name = type(error).__name__
    return f"{name}: {text}{place(error)}" if text else f"{name}{place(error)}"


def failure_key(text: str) -> str:
    """Return a key that is equal for failures of the same kind: the exception's type and place, else the text without
    its numbers.

    >>> failure_key("KeyError: 'a' (my.py:17)") == failure_key("KeyError: 'b' (my.py:17)")
    True
    """
    raised = _RAISED.fullmatch(text)
    return f"{raised[1]} {raised[2]}" if raised else re.sub(r"\d+", "#", text)


def reward_fault(kind: type[Workflow], experiences: Sequence[Experience], *, needed: bool) -> str | None:
    """Return the reason why a finished run cannot be trained on, or None if its rewards are valid.

    Args:
        kind: The workflow.
        experiences: Experiences of the run, in the order in which the workflow returned them.
        needed: Whether the experience of the last workflow step must have a reward.
    """
    for experience in experiences:
        if experience.reward is not None and not is_finite(experience.reward):
            fault = f"{kind.__name__} returned the reward {short_repr(experience.reward)}, wanted a finite number"
            return str(experience.info.get(REWARD_FAULT) or f"{fault}{_place_of(kind)}")
    if needed and last_step(experiences).reward is None:
        return f"{kind.__name__} returned no reward; set experience.reward to a number{_place_of(kind)}"
    return None


def last_step(experiences: Sequence[Experience]) -> Experience:
    """Return the experience of a run's last workflow step: it has the largest ``eid.step``, of several such experiences
    it is the last in the list.
    """
    if len(experiences) == 1:
        return experiences[0]
    return max(reversed(experiences), key=lambda experience: experience.eid.step)


def _place_of(kind: type[Workflow]) -> str:
    function = inspect.unwrap(kind.run_async if kind.is_async else kind.run)
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({display_path(code.co_filename)}:{code.co_firstlineno})"
