"""Torchrun as a child of the supervisor: ``python -m trinity_mq.launch.torchrun FOLDER OPTIONS -m MODULE WORDS``.

Torchrun ends with the supervisor, and its ranks end with torchrun. If torchrun succeeds although the run is not over,
for example because rank 0 ended the ranks of this machine, the exit code asks for a restart.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from trinity_mq.runtime.errors import EXIT_RESTART
from trinity_mq.runtime.process import die_with_parent, is_run_over
from trinity_mq.runtime.processes.supervisor import PARENT_VARIABLE

MARK_SECONDS = 10.0
"""Seconds within which the explorer, or in mode train the trainer, marks a finished run as over."""


def main() -> int:
    """Run torchrun in this process, so that its ranks end with this process; return the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent))
        os.environ[PARENT_VARIABLE] = str(os.getpid())
    folder = Path(sys.argv.pop(1))
    sys.argv[0] = "torchrun"
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except SignalException as error:
        return 128 + int(error.sigval)
    ends = time.monotonic() + MARK_SECONDS
    while not is_run_over(folder):
        if time.monotonic() > ends:
            return EXIT_RESTART
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
