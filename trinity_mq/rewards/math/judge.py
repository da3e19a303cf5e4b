"""Compares two answers mathematically: math-verify in child processes, behind limits of processor time and memory."""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import signal
import weakref
from pathlib import Path

import structlog

from trinity_mq.rewards.registry import RewardError
from trinity_mq.runtime.processes.children import ChildEndedError, ChildNotStartedError, ChildServer

log = structlog.get_logger(__name__)

LONGEST = 500
"""Upper bound of the characters of an answer; a longer one is no answer."""
CPU_SECONDS = 2.0
"""Processor time for one pair. Not wall time: a busy machine must not turn right answers into wrong ones."""
MEMORY = 2 * 2**30
"""Bytes that the child may allocate."""
SILENCE = 120.0
"""Seconds without an answer after which the machine has failed, and not the answer."""
CHILD = Path(__file__).with_name("judge_child.py")


class Judge:
    """Compares answers in child processes. Safe to share between threads: each pair that is compared at the same time
    has a process of its own, up to ``processes``; more wait. One that compares one after the other needs one.

    math-verify limits its time by signals, which only reach main threads and no long computation in C; here the kernel
    ends the child.

    Args:
        cpu_seconds: Processor time for one pair.
        memory: Bytes that a child may allocate.
        silence: Seconds without an answer after which a child is killed.
        processes: Most child processes; None for one for each core that this process may use.
    """

    def __init__(
        self,
        cpu_seconds: float = CPU_SECONDS,
        memory: int = MEMORY,
        silence: float = SILENCE,
        processes: int | None = None,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        count = processes or len(os.sched_getaffinity(0))
        self._children = [ChildServer(CHILD, cpu_seconds, memory, silence=silence) for _ in range(count)]
        self._fill()
        fill = weakref.WeakMethod(self._fill)
        os.register_at_fork(after_in_child=lambda: (method := fill()) and method())

    def _fill(self) -> None:
        """Make all children idle: at first, and in a forked process, where no thread asks them."""
        self._idle: queue.LifoQueue[ChildServer] = queue.LifoQueue()  # the last in is one that has started
        for child in reversed(self._children):
            self._idle.put(child)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run: those that were needed so far, but for pairs that ended theirs."""
        return [child.pid for child in self._children if child.pid is not None]

    def same(self, truth: str, answer: str) -> bool:
        """Return whether two answers in LaTeX are mathematically the same; a pair that takes too much is not.

        Raises:
            ChildSilentError: The child does not answer, on a machine without time for it; trying again may help.
            RewardError: It cannot be started.
        """
        idle = self._idle
        child = idle.get()
        try:
            return self._ask(child, truth, answer)
        finally:
            idle.put(child)

    def _ask(self, child: ChildServer, truth: str, answer: str) -> bool:
        question = json.dumps([truth, answer]).encode()
        for _ in range(2):
            try:
                return child.ask(question) == b"true"
            except ChildEndedError as error:
                if error.exitcode == -signal.SIGPROF:
                    log.info("answer_too_costly", answer=answer[:80], limit=self._cpu_seconds)
                    return False
            except ChildNotStartedError as error:
                raise RewardError(
                    f"the process that compares answers: {error}, wanted it to import math_verify: see whether "
                    "`python -c 'import math_verify'` works there, and whether it may allocate 2 GiB"
                ) from error
        log.warning("answer_ends_its_judge", answer=answer[:80])
        return False

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            child.close()


_judge = Judge()
atexit.register(_judge.close)


@functools.lru_cache(maxsize=4096)
def same(truth: str, answer: str) -> bool:
    """Return :meth:`Judge.same` of this process's judge; the runs of a group often give the same answers.

    Raises:
        ChildSilentError, RewardError: As there.
    """
    if len(truth) > LONGEST or len(answer) > LONGEST:
        return False
    return _judge.same(truth, answer)
