"""Verdicts a second of ``accuracy_reward``, beside math-verify called directly in the same run.

``numbers``: answers in words, currency and simple formulas, which are read without a judge process. ``formulas``: pairs
that only math-verify can compare, from one thread and from one for each core.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from trinity_mq.rewards.math.rewards import accuracy_reward

Pair = tuple[str, str]
"""A response and the right answer."""


def numbers(count: int) -> list[Pair]:
    return [(f"{i} hens at ${i + 2} make $ {i} * 3 = {i * 3}$. She has $18{i} a day.", str(i)) for i in range(count)]


def formulas(count: int, root: int) -> list[Pair]:
    right = f"\\sqrt{{{root}}}}}{{{root}}}"
    return [(f"\\boxed{{\\frac{{{i}}}{{\\sqrt{{{root}}}}}}}", f"\\frac{{{i}{right}") for i in range(1, count + 1)]


def directly(pairs: Iterable[Pair]) -> None:
    from math_verify import LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0),)
    for response, truth in pairs:
        wanted = parse(f"\\boxed{{{truth}}}", targets, parsing_timeout=None)
        verify(wanted, parse(response, targets, parsing_timeout=None), timeout_seconds=None)


def by_reward(pairs: Iterable[Pair], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda pair: accuracy_reward(*pair, finished=True), pairs))


def rate(count: int, work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    count = parser.parse_args().count
    logging.disable(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0))
    directly(formulas(5, 2))  # imports and warms up, as the judge's start does
    by_reward(formulas(2 * cores, 2), cores)
    for name, base, cases in (
        ("numbers", numbers(count), [(1, numbers(count))]),
        ("formulas", formulas(count, 3), [(1, formulas(count, 3)), (cores, formulas(count, 5))]),
    ):
        bare = rate(count, lambda base=base: directly(base))  # type: ignore[misc]
        print(f"{name}: math-verify directly {bare:.0f}/s")
        for threads, pairs in cases:
            found = rate(count, lambda pairs=pairs, threads=threads: by_reward(pairs, threads))  # type: ignore[misc]
            print(f"{name}: accuracy_reward, {threads} threads: {found:.0f}/s, {found / bare:.2f} of that")


if __name__ == "__main__":
    main()
