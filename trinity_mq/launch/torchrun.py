"""Torchrun as a child of the supervisor: ``python -m trinity_mq.launch.torchrun OPTIONS -m MODULE WORDS...``.

Torchrun ends with the supervisor, and its ranks end with torchrun.
"""

from __future__ import annotations

import os
import runpy
import sys

from trinity_mq.runtime.process import die_with_parent
from trinity_mq.runtime.processes.supervisor import PARENT_VARIABLE


def main() -> None:
    """Run torchrun in this process, as the parent that its ranks expect."""
    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent))
        os.environ[PARENT_VARIABLE] = str(os.getpid())
    sys.argv[0] = "torchrun"
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
