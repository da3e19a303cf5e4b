"""Why a process ended, from what it printed: the signal or the line of the user's file, never a progress bar."""

from __future__ import annotations

import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from trinity_mq.runtime.processes.exit_reasons import exit_reason

BAR = "\rLoading weights:  42%|████▏     | 122/290 [00:01<00:02, 77.3it/s, Materializing param=model.norm]"
ENDLESS = "\r1021it [00:03, 340.1it/s]"
LIBRARY = sysconfig.get_path("stdlib")
TRACEBACK = f"""Traceback (most recent call last):
  File "{LIBRARY}/asyncio/runners.py", line 118, in run
    return self._loop.run_until_complete(task)
  File "/users/me/my_reward.py", line 17, in judge
    return truths[answer]
           ~~~~~~^^^^^^^^
KeyError: 'answer'
"""
STACKS = f"""Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "/users/me/other.py", line 3 in wait
  File "{LIBRARY}/threading.py", line 982 in run

Current thread 0x00007f2 (most recent call first):
  File "{LIBRARY}/ctypes/__init__.py", line 519 in string_at
  File "/users/me/my_operator.py", line 8 in process
  File "/users/me/main.py", line 1 in main

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""

BLOCKED = f"""Current thread 0x00007f2 (most recent call first):
  File "{LIBRARY}/threading.py", line 982 in run

Thread 0x00007f1 (most recent call first):
  File "{LIBRARY}/ssl.py", line 1166 in read
  File "/users/me/my_workflow.py", line 5 in run_async
"""


@pytest.mark.parametrize(
    ("printed", "code", "said"),
    [
        ("one\nthe disk is full\n\n", 1, "the disk is full"),
        ("x1" * 16_000, 1, "x1" * 1000),
        (BAR, 1, ""),
        (f"no room on the device\n{BAR}{BAR}\n", 1, "no room on the device"),
        (f"no room on the device\n{ENDLESS}", 1, "no room on the device"),
        ("no room\nMap \x1b[31m━━━━━━━━\x1b[0m 40% 0:00:01", 1, "no room"),
        (f"{BAR}no room on the device\n{BAR}", 1, "no room on the device"),
        (TRACEBACK, 1, "KeyError: 'answer' (my_reward.py:17)"),
        (f"{BAR}{TRACEBACK}{BAR}\n", 1, "KeyError: 'answer' (my_reward.py:17)"),
        (
            f"{TRACEBACK}trainer: ValueError: 3 (my.py:4) (agent_ends agent=t code=1)\n{BAR}\nwarning: 1 leaked\n",
            1,
            "trainer: ValueError: 3 (my.py:4) (agent_ends agent=t code=1)",
        ),
        (f"runner: event_loop_blocked\n{BLOCKED}", 75, "runner: event_loop_blocked (my_workflow.py:5)"),
    ],
)
def test_what_a_process_said_last(printed: str, code: int, said: str) -> None:
    assert exit_reason(printed, code) == said


def test_a_signal_is_named_before_all_else() -> None:
    killed = exit_reason(BAR, 128 + signal.SIGKILL)
    assert killed.startswith("killed by SIGKILL: ")
    assert "%" not in killed
    assert exit_reason("", 128 + signal.SIGABRT) == "killed by SIGABRT"
    said = "killed by SIGSEGV; its last output: Fatal Python error: Segmentation fault (my_operator.py:8)"
    assert exit_reason(STACKS, 128 + signal.SIGSEGV) == said


def test_a_real_crash_and_a_real_traceback(tmp_path: Path) -> None:
    """As this Python and this tqdm write them."""
    bar = "import faulthandler, os, tqdm\nfaulthandler.enable()\nbar = tqdm.tqdm(total=3)\n"
    bar += "bar.update(1) or bar.refresh()\n"
    for name, last, said in (
        ("crash.py", "os.abort()", "killed by SIGABRT; its last output: Fatal Python error: Aborted (crash.py:5)"),
        ("wrong.py", "{}['answer']", "KeyError: 'answer' (wrong.py:5)"),
    ):
        (tmp_path / name).write_text(f"{bar}{last}\n")
        done = subprocess.run([sys.executable, tmp_path / name], stderr=subprocess.PIPE, text=True, check=False)
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        assert "33%" in done.stderr
        assert exit_reason(done.stderr, code) == said
