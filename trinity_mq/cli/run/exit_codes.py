"""The exit codes of ``trinity-mq run``, and the line that explains one at the end. Pure."""

from __future__ import annotations

TRAINED = 0
ENDED_EARLY = 3
TRAINED_NOTHING = 4
EPILOG = (
    "exit codes: 0 done as asked; 3 ended early, after at least one train step; 4 trained nothing; 2 not started, "
    "and the line on stderr says what to change; 130, 143 interrupted by Ctrl-C or SIGTERM"
)


def exit_code(*, finished: bool, steps: int | None, trains: bool = True) -> int:
    """Return the exit code of a run that nobody interrupted.

    Args:
        trains: Its mode is one that trains; where none is wanted, no train step is no failure.
        finished: It came to its end without a process that failed for good.
        steps: Train steps that changed the weights, over all starts of the run; None: the trainer reported none.
    """
    if finished and (steps != 0 or not trains):
        return TRAINED
    return ENDED_EARLY if steps else TRAINED_NOTHING


def closing_line(code: int, again: str, *, finished: bool, curable: bool = True) -> str | None:
    """Return what to do after a run that ended with ``code``.

    Args:
        code: Its exit code.
        again: Its command line.
        finished: It came to its end.
        curable: No agent failed with an error that a restart meets again.
    """
    if code == TRAINED:
        return None
    if finished:
        return (
            f"trained nothing (exit code {code}): every batch was without anything to train on, and the model is as it "
            "was. When the cause is mended, train anew with --fresh"
        )
    if code == TRAINED_NOTHING:
        return f"trained nothing (exit code {code}); when the cause is mended, start it with the same command: {again}"
    if not curable:
        return (
            f"not finished (exit code {code}); the same command would fail again. When the cause is mended it goes "
            f"on with the run: {again}"
        )
    return f"not finished (exit code {code}); resume with the same command: {again}"
