"""Are two answers mathematically the same: math-verify behind limits of time and memory that hold in any thread."""

from __future__ import annotations

import atexit
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import structlog

from trinity_mq.rewards.registry import RewardError

log = structlog.get_logger(__name__)

LONGEST = 500
"""Characters of an answer that are looked at; a longer one is no answer."""
CPU_SECONDS = 2.0
"""Processor time for one pair. Not wall time: a busy machine must not turn right answers into wrong ones."""
MEMORY = 2 * 2**30
"""Bytes of address space."""
SILENCE = 120.0
"""Seconds without an answer, also to the start, until it is the machine that fails and not the answer."""
CHILD = Path(__file__).with_name("judge_child.py")


class JudgeSilentError(RuntimeError):
    """No verdict, for a reason that is not the answer's; trying again may help."""


class Judge:
    """A child process that compares answers, one pair at a time; started on first use, again when it was killed.

    math-verify limits its time by signals, which only reach main threads and no long computation in C; here the kernel
    ends the child. Safe to share between threads.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, memory: int = MEMORY, silence: float = SILENCE) -> None:
        self._command = [sys.executable, "-P", str(CHILD), str(cpu_seconds), str(memory)]
        self._silence = silence
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, None before the first question and after a pair that ended it."""
        return self._child.pid if self._child else None

    def same(self, truth: str, answer: str, *, marked: bool = True) -> bool:
        """Return whether the two are mathematically the same; a pair that takes too much is not.

        Args:
            truth: LaTeX of the right answer.
            answer: LaTeX of an answer; unless ``marked``, text with LaTeX in it, whose last formula counts.
            marked: See ``answer``.

        Raises:
            JudgeSilentError: The child does not answer, on a machine without time for it.
            RewardError: It cannot be started.
        """
        with self._lock:
            for _ in range(2):
                try:
                    verdict = self._ask([truth, answer, marked])
                except BaseException:  # an interrupted question's answer must not reach the next
                    self._end()
                    raise
                if verdict is not None:
                    return verdict
                if self._end() == -signal.SIGPROF:
                    log.info("answer_too_costly", answer=answer[:80], limit=self._command[-2])
                    return False
            log.warning("answer_ends_its_judge", answer=answer[:80])
            return False

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _ask(self, question: list[object]) -> bool | None:
        """Return the child's verdict, None if it ended instead."""
        child = self._child or self._start()
        assert child.stdin is not None
        self._asked += 1
        try:
            child.stdin.write(json.dumps([self._asked, *question]).encode() + b"\n")
        except BrokenPipeError:
            return None
        line = self._line(child)
        if not line:
            return None
        number, verdict = json.loads(line)
        if number != self._asked:
            raise JudgeSilentError(f"an answer to question {number} came, wanted that to {self._asked}; try again")
        return bool(verdict)

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(self._command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        if self._line(self._child) != b"ready\n":
            raise RewardError(
                f"the process that compares answers ended with code {self._end()} before it was ready, wanted it to "
                "import math_verify: see whether `python -c 'import math_verify'` works there, and whether 2 GiB of "
                "address space are allowed"
            )
        return self._child

    def _line(self, child: subprocess.Popen[bytes]) -> bytes:
        """Return the next line, less if the child has ended."""
        assert child.stdout is not None
        line, deadline = b"", time.monotonic() + self._silence
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise JudgeSilentError(f"no verdict in {self._silence:g} s: the machine has no time for it")
                read = child.stdout.read(4096)
                if not read:
                    break
                line += read
        return line

    def _end(self) -> int | None:
        """Kill the child, and return how it ended."""
        child, self._child = self._child, None
        if child is None:
            return None
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        try:
            return child.wait(0.2)  # it ends by itself when its input does, or has ended
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


_judges = [Judge()]
"""The last one is this process's; those before it belong to the processes it was forked from."""


def _close() -> None:
    _judges[-1].close()


atexit.register(_close)
os.register_at_fork(after_in_child=lambda: _judges.append(Judge()))


@functools.lru_cache(maxsize=4096)
def same(truth: str, answer: str, marked: bool = True) -> bool:
    """Return :meth:`Judge.same` of this process's judge; the runs of a group often give the same answers.

    Raises:
        JudgeSilentError, RewardError: As there.
    """
    if len(truth) > LONGEST or len(answer) > LONGEST:
        return False
    return _judges[-1].same(truth, answer, marked=marked)
