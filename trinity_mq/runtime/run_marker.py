"""The mark of a run that is over, in its folder: an agent that is started after that finds nothing left to do."""

from __future__ import annotations

import json
import time
from pathlib import Path

from trinity_mq.runtime.process import write_atomic

_MARK = "finished"


def is_over(folder: Path) -> bool:
    """Say whether the run in ``folder`` came to its end."""
    return (folder / _MARK).exists()


def mark_over(folder: Path) -> None:
    """Note that the run in ``folder`` came to its end; on disk on return.

    Raises:
        OSError: It cannot be noted there.
    """
    write_atomic(folder / _MARK, json.dumps({"time": time.time()}).encode())
