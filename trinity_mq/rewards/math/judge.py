"""Compares two answers mathematically: math-verify in child processes, with limits on processor time and memory."""

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
"""Maximum characters of an answer; a longer answer is never equal."""
CPU_SECONDS = 2.0
"""Processor seconds for one pair. The limit is not wall time, because a busy machine must not turn a right answer into
a wrong answer.
"""
MEMORY = 2 * 2**30
"""Maximum bytes that a child may allocate."""
SILENCE = 120.0
"""Seconds without an answer after which the machine counts as failed, not the answer as wrong."""
CHILD = Path(__file__).with_name("judge_child.py")


class AnswerComparer:
    """Compares answers in child processes. It is safe to share between threads: each concurrent pair has its own
    process, up to ``processes``; further pairs wait. Sequential comparisons start only one process.

    math-verify limits its time by signals. Signals reach only main threads and cannot interrupt a long computation in
    C. Here the kernel ends the child instead.

    Args:
        cpu_seconds: Processor seconds for one pair.
        memory: Maximum bytes that a child may allocate.
        silence: Seconds without an answer after which a child is killed.
        processes: Maximum number of child processes. None: one per core that this process may use.
        program: Python file of a child.
    """

    def __init__(
        self,
        cpu_seconds: float = CPU_SECONDS,
        memory: int = MEMORY,
        silence: float = SILENCE,
        processes: int | None = None,
        program: Path = CHILD,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        count = processes or len(os.sched_getaffinity(0))
        self._children = [ChildServer(program, cpu_seconds, memory, silence=silence) for _ in range(count)]
        self._mark_idle()
        fill = weakref.WeakMethod(self._mark_idle)
        os.register_at_fork(after_in_child=lambda: (method := fill()) and method())

    def _mark_idle(self) -> None:
        """Mark all children idle: at the start, and in a forked process, where no thread uses them."""
        # last in, first out: prefers a child that has started
        self._idle: queue.LifoQueue[ChildServer] = queue.LifoQueue()
        for child in reversed(self._children):
            self._idle.put(child)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running children: all that were needed so far, except children that a pair ended."""
        return [child.pid for child in self._children if child.pid is not None]

    def same(self, truth: str, answer: str) -> bool:
        """Return whether two answers in LaTeX are mathematically equal. A pair that exceeds a limit is not equal.

        Raises:
            ChildTimeoutError: The child does not answer on an overloaded machine. A retry may help.
            RewardError: The child cannot be started.
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
                    log.info("comparison_over_cpu_limit", answer=answer[:80], limit=self._cpu_seconds)
                    return False
            except ChildNotStartedError as error:
                raise RewardError(
                    f"the process that compares answers cannot start: {error}. Check that `python -c 'import "
                    "math_verify'` works there, and that the process may allocate 2 GiB"
                ) from error
        log.warning("comparison_process_killed", answer=answer[:80])
        return False

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            child.close()


_judge = AnswerComparer()
atexit.register(_judge.close)


@functools.lru_cache(maxsize=4096)
def same(truth: str, answer: str) -> bool:
    """Return :meth:`AnswerComparer.same` of this process's judge. Results are cached, because the runs of a group often
    give the same answers.

    Raises:
        ChildTimeoutError, RewardError: See :meth:`AnswerComparer.same`.
    """
    if len(truth) > LONGEST or len(answer) > LONGEST:
        return False
    return _judge.same(truth, answer)
