"""Runs tasks of `verifiers` for :mod:`trinity_mq.workflows.sessions.verifiers`, in the environment's own Python.

This module imports nothing from trinity_mq, because that Python may not have it. A line of JSON on the standard input
requests one rollout. A line on the standard output answers it; answers come in the order in which rollouts end. Prints
of the environment go to the standard error.
"""

import os
import sys

if sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:  # modules in this folder must not shadow its imports
    del sys.path[0]

import argparse
import asyncio
import importlib
import json
from typing import Any

OURS = "TRINITY_MQ_UNUSED_KEY"
"""Name of an environment variable with a placeholder for the key: the key itself is sent in a header."""
INFRASTRUCTURE = {
    "SandboxError": "sandbox",
    "ProviderError": "provider",
    "InterceptionError": "environment",
    "TunnelError": "environment",
    "ToolsetError": "tool",
    "HarnessError": "environment",
    "EnvError": "environment",
}
"""Kinds of the failures that are not the task's fault, by class name of the error."""


def import_object(path: str) -> Any:
    """Return the object that ``module:name`` refers to."""
    module, _, name = path.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


async def rollout(request: dict[str, Any], make_task: Any, harness: str) -> dict[str, Any]:
    """Run the agent once and return the result of its trace."""
    import verifiers.v1 as vf  # it is installed only in that Python

    os.environ.setdefault(OURS, "none")
    client = vf.EvalClientConfig(
        base_url=request["base_url"], api_key_var=OURS, headers={"X-Session-Key": request["key"]}
    )
    config = vf.AgentConfig.model_validate(
        {
            "harness": {"id": harness},
            "runtime": vf.SubprocessConfig(),
            "client": client,
            "model": request["model"],
            "max_turns": request.get("max_turns"),
        }
    )
    trace = await vf.make_agent(config).run(make_task(request["task"]))
    error = next(iter(getattr(trace, "errors", None) or ()), None)
    kind = type(error).__name__ if isinstance(error, Exception) else str(getattr(error, "type", "") or "")
    return {
        "ok": bool(trace.ok),
        "reward": None if trace.reward is None else float(trace.reward),
        "metrics": {name: float(value) for name, value in dict(getattr(trace, "metrics", None) or {}).items()},
        "error": None if error is None else f"{kind}: {getattr(error, 'message', error)}"[:500],
        "kind": INFRASTRUCTURE.get(kind),
    }


async def answer(request: dict[str, Any], make_task: Any, harness: str, out: Any, free: asyncio.Semaphore) -> None:
    """Run the rollout of a request when a slot is free; write its result, or its error, as the answer."""
    try:
        async with free:
            result = await rollout(request, make_task, harness)
    except Exception as error:
        kind = INFRASTRUCTURE.get(type(error).__name__)
        result = {"ok": False, "reward": None, "error": f"{type(error).__name__}: {error}"[:500], "kind": kind}
    out.write(json.dumps({"id": request["id"], **result}) + "\n")
    out.flush()


async def main() -> None:
    """Answer requests until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True, help="module:function that makes a verifiers Task of a record")
    parser.add_argument("--harness", default="null", help="id of the harness")
    parser.add_argument("--at-once", type=int, default=8, help="maximum number of rollouts at a time")
    options = parser.parse_args()
    free = asyncio.Semaphore(options.at_once)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints must not mix with answers
    make_task = import_object(options.task)
    out.write(json.dumps({"ready": True}) + "\n")
    out.flush()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(answer(json.loads(line), make_task, options.harness, out, free))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
