"""The processes below another."""

from __future__ import annotations

import contextlib

import psutil


def descendants(pid: int) -> list[tuple[psutil.Process, list[str]]]:
    """Return the processes that process ``pid`` and those below it have started, each with its command line.

    One that ends meanwhile is left out.
    """
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((one, one.cmdline()))
    return found


def gone(pid: int) -> bool:
    """Say whether process ``pid`` has ended, waited for or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
