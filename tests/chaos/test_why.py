"""``trinity-mq why`` names the culprit of a staged hang of a whole run: real processes, a real broker."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.processes import command
from trinity_mq.local_broker.node import find_rabbitmq
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
NAMED_WITHIN = 15.0
"""Seconds from the moment that a hang can be seen, the start of the command included."""
SMALL = ("buffer.total_steps=5000", "buffer.batch_size=4", "buffer.eval_tasksets=[]", "runner.num_runners=1")

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]


async def test_a_frozen_engine(tmp_path: Path) -> None:
    async with LocalRun(SMOKE, tmp_path / "run", SMALL) as run:
        await run.until_progress(5, 90.0)
        pid = run.kill("engine", signal.SIGSTOP)
        try:
            began = time.monotonic()
            code, told, errors = await command("why", str(run.run_dir), "--json")
            seconds = time.monotonic() - began
        finally:
            os.kill(pid, signal.SIGCONT)
    assert told, errors
    finding = json.loads(told)
    logs = "\n".join(log.read_text()[-600:] for log in sorted((run.run_dir / "logs").glob("*.jsonl")))
    assert finding["culprit"] == "explorer-0-engine", f"{finding}\n{logs}"
    assert code == 3, finding
    assert seconds <= NAMED_WITHIN, f"{seconds:.1f} s: {finding}"
    assert "explorer-0-engine" in finding["sentence"]
    assert "has not answered its host" in finding["sentence"]
    assert "explorer.rollout_model.lease" in finding["lever"]
