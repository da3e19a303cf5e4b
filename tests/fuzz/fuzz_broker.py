"""Fuzz the readers of every queue and stream on a real broker of its own, with hostile properties and bodies.

    python tests/fuzz/fuzz_broker.py [--minutes 20] [--seed 1]

Wants RabbitMQ or Docker. It ends by itself, and prints the tries by consumer and outcome; it exits with 1
where an agent ended, lost its connection or no longer handles good messages, and prints the messages of that round.
"""

# ruff: noqa: T201  # a tool for the terminal
from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "agents")]


async def fuzz(minutes: float, seed: int, folder: Path) -> int:
    """Fuzz on a broker in ``folder``; return the exit code."""
    from tests.fuzz.broker_run import FuzzedRun, FuzzError, quiet
    from trinity_mq.local_broker.choose import local_broker

    node = await local_broker(folder / "b")
    (folder / "run").mkdir()
    code = 0
    try:
        run = FuzzedRun(folder / "run", url=node.url, name="fuzz", seed=seed)
        try:
            with quiet():
                async with run.running():
                    await run.fuzz(minutes * 60)
        except FuzzError as error:
            print(error)
            code = 1
        print(run.summary())
    finally:
        await node.kill()
    return code


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        return asyncio.run(fuzz(arguments.minutes, arguments.seed, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
