"""Answers the rollouts of ``program_workflow`` with ``keep: true`` by a function, in the Python of a harness.

Only the standard library is needed. The folder of this file is in ``PYTHONPATH`` (``workflow_args.env``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def serve(reward_of: Callable[[dict[str, Any]], float], *, at_once: int = 8) -> None:
    """Answer each line of the standard input, until its end.

    Args:
        reward_of: Function that runs the agent on a rollout (``task``, ``base_url``, ``url``, ``key``, ``model``) and
            returns the reward. Mistakes of the model have a reward. An exception means that something else failed: the
            rollout is tried again.
        at_once: Number of threads that call the function.
    """
    # only answers may be written to the standard output, and libraries print to it
    answers, sys.stdout = sys.stdout, sys.stderr

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def answer(line: str) -> None:
        rollout = json.loads(line)
        try:
            result: dict[str, Any] = {"reward": reward_of(rollout)}
        except Exception as error:
            result = {"kind": "tool", "error": f"{type(error).__name__}: {error}"}
        write({"id": rollout.get("id"), **result})

    write({"ready": True})
    with ThreadPoolExecutor(at_once) as threads:
        for line in sys.stdin:
            threads.submit(answer, line)
