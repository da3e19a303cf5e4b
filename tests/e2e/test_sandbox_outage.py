"""A whole run whose workflow asks a sandbox over TCP, a process that is killed and started again: no task is lost."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import pytest
import yaml

from trinity_agents.trainer.history import lineage
from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]
BATCHES, TASKS, RUNS = 24, 4, 8
SANDBOX = """
import socketserver, sys

class Judge(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            digits, _, answer = line.decode().strip().partition("=")
            self.wfile.write(b"right\\n" if answer == max(digits.split(",")) else b"wrong\\n")

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

with Server(("127.0.0.1", int(sys.argv[1])), Judge) as server:
    print("ready", flush=True)
    server.serve_forever()
"""
WORKFLOW = """
import asyncio
from trinity_mq.workflows import SandboxFailed, Workflow

class Judged(Workflow):
    is_async = can_repeat = True

    async def run_async(self):
        question = self.task.raw_task["question"]
        experiences = await self.model.chat_async([{"role": "user", "content": question}], n=self.repeat_times)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.workflow_args["port"])
            for run, experience in enumerate(experiences, start=self.run_id_base):
                experience.eid.run = run
                writer.write(f"{question.removesuffix('=')}={experience.response_text[:1]}\\n".encode())
                said = await asyncio.wait_for(reader.readline(), 5.0)
                if not said:
                    raise ConnectionResetError("the connection was closed")
                experience.reward = float(said == b"right\\n")
            writer.close()
        except OSError as error:
            raise SandboxFailed(f"the judge does not answer: {error.strerror or error}") from error
        return experiences
"""

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.timeout(300)]


async def sandbox(script: Path, port: int) -> asyncio.subprocess.Process:
    """Start the sandbox; return it once it answers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(port), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


def events(folder: Path) -> list[str]:
    """Return the events in the logs of all runners, in no order."""
    lines = [line for log in (folder / "logs").glob("runner-*.jsonl") for line in log.read_text().splitlines()]
    return [json.loads(line).get("event", "") for line in lines if line.endswith("}")]


async def test_a_sandbox_that_dies_and_comes_back_costs_no_task(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "judged.py").write_text(WORKFLOW)
    script = tmp_path / "sandbox.py"
    script.write_text(SANDBOX)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = yaml.safe_load((ROOT / "examples" / "smoke.yaml").read_text())
    config["plugin_dirs"] = [str(tmp_path / "plugins")]
    config["buffer"] |= {"total_steps": BATCHES, "batch_size": TASKS, "eval_tasksets": []}
    config["buffer"]["taskset"] |= {"workflow": "judged.Judged", "workflow_args": {"port": port}}
    # the batch at which it dies waits for longer than its own time
    config["explorer"] |= {"max_timeout": 6, "max_retry_times": 1, "batch_timeout": 15, "unfinished": "drop"}
    path = tmp_path / "smoke.yaml"
    path.write_text(yaml.safe_dump(config))
    folder = tmp_path / "run"
    process = await sandbox(script, port)
    try:
        async with LocalRun(path, folder) as run:
            await run.until_progress(4, 120.0)
            process.kill()
            await process.wait()
            await run.until(lambda: "lane_paused" in events(folder), 60.0)
            done = len(run.values("trainer/step"))
            await asyncio.sleep(20.0)  # the outage: longer than a batch's time
            assert len(run.values("trainer/step")) <= done + 2, "it waits"
            process = await sandbox(script, port)
            code, output = await run.ended(120.0)
    finally:
        process.kill()
        await process.wait()
    assert code == 0, output
    assert "lane_resumed" in events(folder)
    entries = lineage(folder / "history", 1, BATCHES)
    assert [len(entry["uids"]) for entry in entries] == [TASKS * RUNS] * BATCHES, "every run of every task"
    assert sum(value for _, value in run.values("rollout/failures/sandbox")) == 0
    assert sum(value for _, value in run.values("rollout/slices/finished")) == BATCHES * TASKS
    assert sum(value for _, value in run.values("rollout/lane_pauses")) >= 1
    assert max(value for _, value in run.values("time/lane_paused")) > 10.0
