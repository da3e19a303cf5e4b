"""An engine's process that its host leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

LEAVES = """
import os, signal, subprocess, sys
from trinity_mq.engines.host.process import EngineProcess

quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
children = [subprocess.Popen(["sleep", "60"], **quiet) for _ in range(2)]
for child in children:
    EngineProcess(None, child).detach()
os.kill(children[1].pid, signal.SIGKILL)  # by somebody else: nobody here has waited for it
print(children[0].pid)
"""


def test_it_lives_on_and_no_forgotten_child_is_complained_about() -> None:
    done = subprocess.run([sys.executable, "-X", "dev", "-c", LEAVES], capture_output=True, text=True, check=False)
    os.kill(int(done.stdout), signal.SIGKILL)  # it lives
    assert (done.returncode, done.stderr) == (0, "")
