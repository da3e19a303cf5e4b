"""Advisory locks on open files."""

from __future__ import annotations

import fcntl
from typing import IO


def try_lock(file: int | IO[str], *, shared: bool = False) -> bool:
    """Lock a file until it is closed. Return False if another process holds a lock that excludes this lock.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
