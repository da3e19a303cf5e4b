"""Compares the pairs of :class:`trinity_mq.rewards.math.answers.AnswerComparer`.

It runs as a file, without torch, so that it starts fast.

The kernel ends it by SIGPROF when a pair takes more processor time than allowed, even inside one multiplication of huge
numbers, which no Python code could interrupt.
"""

from __future__ import annotations

import json
import logging
import signal
import sys

from trinity_mq.runtime.processes.children import limit_memory, serve


def main(cpu_seconds: float, memory: int) -> None:
    """Answer ``[truth, answer]`` by ``true`` or ``false`` until the input ends."""
    logging.disable(logging.CRITICAL)
    limit_memory(memory)
    from math_verify import LatexExtractionConfig, parse, verify

    # ExprExtractionConfig is not used: it passes text to sympy's parser, which evaluates it as Python.
    targets = (LatexExtractionConfig(boxed_match_priority=0),)

    def same(truth: str, answer: str) -> bool:
        expected = parse(f"\\boxed{{{truth}}}", targets, parsing_timeout=None)
        actual = parse(f"\\boxed{{{answer}}}", targets, parsing_timeout=None)
        return bool(expected and actual and verify(expected, actual, timeout_seconds=None))

    def answer(question: bytes) -> bytes:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            is_same = same(*json.loads(question))
        except Exception:  # hostile text may raise any error in a parser; it is not the right answer
            is_same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        return json.dumps(is_same).encode()

    serve(answer)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
