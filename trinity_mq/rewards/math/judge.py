"""Compares two answers mathematically: math-verify in a child process, behind limits of processor time and memory."""

from __future__ import annotations

import atexit
import functools
import json
import signal
from pathlib import Path

import structlog

from trinity_mq.rewards.registry import RewardError
from trinity_mq.runtime.children import ChildEndedError, ChildNotStartedError, ChildServer

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
    """Compares answers in a child process, one pair at a time. Safe to share between threads.

    math-verify limits its time by signals, which only reach main threads and no long computation in C; here the kernel
    ends the child.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, memory: int = MEMORY, silence: float = SILENCE) -> None:
        self._cpu_seconds = cpu_seconds
        self._child = ChildServer(CHILD, cpu_seconds, memory, silence=silence)

    @property
    def pid(self) -> int | None:
        """The child's process id, None before the first pair and after a pair that ended it."""
        return self._child.pid

    def same(self, truth: str, answer: str, *, marked: bool = True) -> bool:
        """Return whether the two are mathematically the same; a pair that takes too much is not.

        Args:
            truth: LaTeX of the right answer.
            answer: LaTeX of an answer; unless ``marked``, text with LaTeX in it, whose last formula counts.
            marked: See ``answer``.

        Raises:
            ChildSilentError: The child does not answer, on a machine without time for it; trying again may help.
            RewardError: It cannot be started.
        """
        question = json.dumps([truth, answer, marked]).encode()
        for _ in range(2):
            try:
                return self._child.ask(question) == b"true"
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
        """End the child."""
        self._child.close()


_judge = Judge()
atexit.register(_judge.close)


@functools.lru_cache(maxsize=4096)
def same(truth: str, answer: str, marked: bool = True) -> bool:
    """Return :meth:`Judge.same` of this process's judge; the runs of a group often give the same answers.

    Raises:
        ChildSilentError, RewardError: As there.
    """
    if len(truth) > LONGEST or len(answer) > LONGEST:
        return False
    return _judge.same(truth, answer, marked=marked)
