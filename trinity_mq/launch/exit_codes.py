"""The exit codes of ``trinity-mq run`` and the closing line that explains them. Pure functions."""

from __future__ import annotations

TRAINED = 0
ENDED_EARLY = 3
TRAINED_NOTHING = 4
EPILOG = (
    "exit codes: 0 done as asked; 3 ended early, after at least one train step or in a mode that does not train; "
    "4 trained nothing; 2 not started, and the line on stderr says what to change; 130, 143 interrupted by Ctrl-C or "
    "SIGTERM"
)


def exit_code(*, finished: bool, steps: int | None, trains: bool = True) -> int:
    """Return the exit code of a run that was not interrupted.

    Args:
        trains: True if the mode trains. In other modes, zero train steps are not a failure, and a resume keeps the
            results.
        finished: True if the run reached its end and no process failed permanently.
        steps: Number of train steps that changed the weights, over all starts of the run. None: the trainer reported no
            number.
    """
    if finished and (steps != 0 or not trains):
        return TRAINED
    return ENDED_EARLY if steps or not trains else TRAINED_NOTHING


def closing_line(code: int, command: str, *, finished: bool, curable: bool = True) -> str | None:
    """Return a line that says what to do after a run that ended with ``code``, or None after success.

    Args:
        code: Exit code of the run.
        command: Command line of the run.
        finished: True if the run reached its end.
        curable: True if no agent failed with an error that would recur after a restart.
    """
    if code == TRAINED:
        return None
    if finished:
        return (
            f"trained nothing (exit code {code}): no batch had an experience to train on, and the model is "
            "unchanged. Fix the cause, then start over with --fresh"
        )
    if code == TRAINED_NOTHING:
        return f"trained nothing (exit code {code}); fix the cause, then start over: {command} --fresh"
    if not curable:
        return (
            f"not finished (exit code {code}); the same command would fail again. Fix the cause first, then "
            f"run: {command}"
        )
    return f"not finished (exit code {code}); resume with the same command: {command}"
