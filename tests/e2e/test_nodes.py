"""A run on two machines, which two loopback addresses stand for: ranks of the trainer and an engine on each."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import descendants
from trinity_agents.trainer.history import last_generation, lineage
from trinity_mq.telemetry import METRICS_FILE, read_metrics

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
HOSTS = ("127.0.0.1", "127.0.0.2")
BATCHES = 30
ACCURACY = "eval/max3_held_out/accuracy/mean@1"

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.timeout(900)]


async def test_two_nodes_train_together_and_meet_again_after_one_lost_a_rank(tmp_path: Path, broker_url: str) -> None:
    folder = tmp_path / "run"
    port = str(20000 + secrets.randbelow(9000))
    settings = (
        f"name=nodes{secrets.token_hex(4)}",
        f"run_dir={folder}",
        f"broker.url={broker_url}",
        f"buffer.total_steps={BATCHES}",
        f"explorer.eval_interval={BATCHES}",
        "trainer.save_interval=5",
        "trainer.rank_timeout=60",
    )
    layout = ("--trainers", ",".join(HOSTS), "--engines", ",".join(HOSTS), "--port", port)
    nodes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "trinity_mq.cli.main", "node", str(SMOKE), *settings, *layout, "--host", host),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        for host in HOSTS
    ]
    try:
        async with asyncio.timeout(840):
            while progress(folder) < 6:  # noqa: ASYNC110  # other processes write it
                await asyncio.sleep(0.2)
            rank(nodes[1].pid).kill()
            outputs = [(await node.communicate())[0].decode() for node in nodes]
    finally:
        for node in nodes:
            if node.returncode is None:
                for process, _ in descendants(node.pid):
                    process.kill()
                node.kill()
                await node.wait()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "host 127.0.0.1: explorer-0" in outputs[0]
    assert "trainer-0-node1 restarting" in outputs[1]
    assert "engines-127-0-0-2 finished" in outputs[1]
    lines = list(read_metrics(folder / METRICS_FILE))
    accuracy = {line["step"]: line[ACCURACY] for line in lines if ACCURACY in line}
    assert accuracy[BATCHES] >= accuracy[0] + 0.2
    generation = last_generation(folder / "history")
    assert generation == 2, "the trainer as a whole began again, once"
    history = lineage(folder / "history", generation, BATCHES)
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len(uids) == len(set(uids)) == BATCHES * 16 * 8
    logs = [json.loads(line) for log in (folder / "logs").glob("*.jsonl") for line in log.read_text().splitlines()]
    assert {"127.0.0.1", "127.0.0.2"} <= {str(line.get("url", "")).split("://")[-1].split(":")[0] for line in logs}


def progress(folder: Path) -> int:
    path = folder / METRICS_FILE
    return (
        max((line["step"] for line in read_metrics(path) if line.get("role") == "trainer"), default=0)
        if path.exists()
        else 0
    )


def rank(pid: int) -> psutil.Process:
    """The trainer's process below a node's torchrun."""
    return next(
        process
        for process, words in descendants(pid)
        if "trainer" in words and "trinity_mq.launch.torchrun" not in words
    )
