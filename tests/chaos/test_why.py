"""``trinity-mq why`` names the culprit of six staged hangs of whole runs: real processes, a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]
NAMED_WITHIN = 15.0
"""Seconds from the moment that a hang can be seen, the start of the command included."""
STEPS = 5000
"""Far more than a staging lasts."""
REWARD = """
import pathlib, time

BLOCK = pathlib.Path(__file__).with_name("block")


def blocking(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    while BLOCK.exists():
        time.sleep(0.2)
    return {"accuracy": float(response == truth), "partial_credit": 0.1 * len(response)}
"""
SURROGATE = """
import pathlib, time

SLOW = pathlib.Path(__file__).with_name("slow")


def slow(log_ratio, logprob, advantage):
    while SLOW.exists():
        time.sleep(0.2)
    return -log_ratio.exp() * advantage
"""

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]


class Staging:
    """A small run that has trained for some steps, and the command that is asked about it."""

    def __init__(self, run: LocalRun, plugins: Path) -> None:
        self.run, self.plugins = run, plugins

    def told(self) -> str:
        """Return the end of the agents' logs, for the message of a failed assertion."""
        return "\n".join(log.read_text()[-600:] for log in sorted((self.run.run_dir / "logs").glob("*.jsonl")))

    async def asked(self) -> tuple[int | None, dict[str, Any]]:
        """Return exit code and finding of the command."""
        command = [sys.executable, "-m", "trinity_mq.cli.main", "why", str(self.run.run_dir), "--json"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        said, errors = await process.communicate()
        assert said, errors.decode()
        return process.returncode, json.loads(said)

    async def finding(self, culprit: str) -> dict[str, Any]:
        """Return the finding of the command, which must name ``culprit`` in time, at the first time of asking."""
        began = time.monotonic()
        code, found = await self.asked()
        seconds = time.monotonic() - began
        assert found["culprit"] == culprit, f"{found}\n{self.told()}"
        assert code == 3, found
        assert seconds <= NAMED_WITHIN, f"{seconds:.1f} s: {found}"
        assert culprit in found["sentence"]
        assert found["lever"]
        return found


@asynccontextmanager
async def staged(tmp_path: Path, *overrides: str, broker: str | None = None, **changes: Any) -> AsyncIterator[Staging]:
    """Run the smoke example until a few steps are trained; ``changes`` are merged into its sections."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "staged_reward.py").write_text(REWARD)
    (plugins / "staged_loss.py").write_text(SURROGATE)
    config = yaml.safe_load((ROOT / "examples" / "smoke.yaml").read_text())
    config["plugin_dirs"] = [str(plugins)]
    config["buffer"] |= {"total_steps": STEPS, "batch_size": 4}
    config["buffer"].pop("eval_tasksets")
    config["explorer"] = {}
    config["runner"] = {"num_runners": 1}
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    path = tmp_path / "smoke.yaml"
    path.write_text(yaml.safe_dump(config))
    words = (*overrides, *(() if broker is None else (f"broker.url={broker}",)))
    async with LocalRun(path, tmp_path / "run", words) as run:
        await run.until_progress(5, 90.0)
        yield Staging(run, plugins)


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """Freeze a process for the block, so that the run can be drained afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_frozen_engine(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        pid = stage.run.pid("engine")
        assert pid is not None
        async with stopped(pid):
            found = await stage.finding("explorer-0-engine")
    assert "has not answered its host" in found["sentence"]
    assert "explorer.rollout_model.lease" in found["lever"]


@pytest.mark.extended
async def test_a_frozen_runner(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        pid = stage.run.pid("runner-0")
        assert pid is not None
        async with stopped(pid):
            found = await stage.finding("runner-0")
    assert "has sent no heartbeat" in found["sentence"]


@pytest.mark.extended
async def test_no_operator(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        stage.run.kill("operator-0", signal.SIGTERM)  # drained: its supervisor does not start it anew
        found = await stage.finding("operator")
    assert "no operator is running" in found["sentence"]
    assert "trinity-mq operator" in found["lever"]


@pytest.mark.extended
async def test_a_broker_with_a_memory_alarm(tmp_path: Path) -> None:
    base = Path(tempfile.mkdtemp(prefix="tmq-"))
    node = PrivateNode(base / "broker")
    try:
        await node.start()
        await node.wait_ready()
        async with staged(tmp_path, broker=node.url) as stage:
            await node.ctl("set_vm_memory_high_watermark", "0.0001")
            try:
                found = await stage.finding("broker")
            finally:
                await node.ctl("set_vm_memory_high_watermark", "0.4")
    finally:
        await node.kill()
        shutil.rmtree(base, ignore_errors=True)
    assert "alarm" in found["sentence"]


@pytest.mark.extended
async def test_a_slow_trainer(tmp_path: Path) -> None:
    async with staged(tmp_path, algorithm={"surrogate": {"kind": "staged_loss.slow"}}) as stage:
        flag = stage.plugins / "slow"
        flag.touch()
        try:
            found = await stage.finding("trainer-0")
        finally:
            flag.unlink()
    assert "the train step on batch" in found["sentence"]
    assert "the median is" in found["sentence"]


@pytest.mark.extended
async def test_a_reward_function_that_blocks(tmp_path: Path) -> None:
    taskset = {
        "name": "max3",
        "storage_type": "synthetic",
        "path": "max3",
        "reward_fn": "staged_reward.blocking",
    }
    async with staged(tmp_path, buffer={"taskset": taskset, "total_steps": STEPS, "batch_size": 4}) as stage:
        code, found = await stage.asked()
        assert (code, found["state"], found["culprit"]) == (0, "moving", None), found
        flag = stage.plugins / "block"
        flag.touch()
        try:
            found = await stage.finding("runner-0")
        finally:
            flag.unlink()
    assert "explorer.over_rollout.ratio" in found["lever"] or "blocks its event loop" in found["lever"]
