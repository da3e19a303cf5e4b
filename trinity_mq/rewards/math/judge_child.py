"""Compares the pairs of :class:`trinity_mq.rewards.math.answers.AnswerComparer`, by math-verify or by a named rule.

It runs as a file, without torch, so that it starts fast.

The kernel ends it by SIGPROF when a pair takes more processor time than allowed, even inside one multiplication of huge
numbers, which no Python code could interrupt.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable

from trinity_mq.runtime.processes.children import limit_memory, serve


def main(cpu_seconds: float, memory: int) -> None:
    """Answer ``[rule, response, truth]`` by ``[right, answer]`` until the input ends. The rule ``latex`` compares two
    answers in LaTeX, the others are :data:`trinity_mq.rewards.math.trinity_answers.RULES`.
    """
    logging.disable(logging.CRITICAL)
    limit_memory(memory)
    from math_verify import LatexExtractionConfig, parse, verify

    # ExprExtractionConfig is not used: it passes text to sympy's parser, which evaluates it as Python.
    targets = (LatexExtractionConfig(boxed_match_priority=0),)

    def latex(answer: str, truth: str) -> tuple[bool, str | None]:
        expected = parse(f"\\boxed{{{truth}}}", targets, parsing_timeout=None)
        actual = parse(f"\\boxed{{{answer}}}", targets, parsing_timeout=None)
        return bool(expected and actual and verify(expected, actual, timeout_seconds=None)), None

    def find_rule(name: str) -> Callable[[str, str], tuple[bool, str | None]]:
        if name == "latex":
            return latex
        from trinity_mq.rewards.math.trinity_answers import RULES

        return RULES[name]

    def answer(question: bytes) -> bytes:
        name, *pair = json.loads(question)
        rule = find_rule(name)  # before the time counts, because it may import
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            result = rule(*pair)
        except Exception:  # hostile text may raise any error in a parser; it is not the right answer
            result = (False, None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return json.dumps(result).encode()

    serve(answer)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
