"""Compares answers, one pair a line, in a process of its own: run as a file by :mod:`trinity_mq.rewards.math.judge`.

It imports nothing of ours, so that it starts fast. The kernel ends it when a pair takes more processor time than it may
(SIGPROF), wherever it is: also inside one multiplication of huge numbers, which no Python code could interrupt.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys


def main(cpu_seconds: float, memory: int) -> None:
    """Answer ``[number, truth, answer, marked]`` by ``[number, same]`` until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # nothing that prints can get between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks; our input ends with them
    logging.disable(logging.CRITICAL)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = [memory, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(allowed), hard))
    from math_verify import LatexExtractionConfig, parse, verify

    # Not ExprExtractionConfig: it hands text to sympy's parser, which evaluates it as Python.
    targets = (LatexExtractionConfig(boxed_match_priority=0),)

    def same(truth: str, answer: str, marked: bool) -> bool:
        wanted = parse(f"\\boxed{{{truth}}}", targets, parsing_timeout=None)
        seen = parse(f"\\boxed{{{answer}}}" if marked else answer, targets, parsing_timeout=None)
        return bool(wanted and seen and verify(wanted, seen, timeout_seconds=None))

    def say(text: str) -> None:
        answers.write(text + "\n")
        answers.flush()

    say("ready")
    for line in sys.stdin.buffer:
        number, *question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            found = same(*question)
        except Exception:  # whatever hostile text does to a parser: it is not the right answer
            found = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(json.dumps([number, found]))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
