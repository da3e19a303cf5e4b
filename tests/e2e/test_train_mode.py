"""Mode train as a stranger runs it: the examples, as real processes on a real broker."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.metric_names import undocumented
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
MARGIN = "actor/pair_margin"
SHORT = ["trainer.save_interval=5", "buffer.total_steps=60", "monitor.trackers=[{kind: wandb, offline: true}]"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


async def test_preferences_are_learned_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    async with LocalRun(EXAMPLES / "dpo.yaml", tmp_path / "run", SHORT) as run:
        await run.until(lambda: len(run.values(MARGIN)) > 10, 90.0)
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        code, output = await run.ended(60.0)
    assert code == 130, output
    done = len(run.values(MARGIN))
    async with LocalRun(EXAMPLES / "dpo.yaml", tmp_path / "run", SHORT) as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    margins = dict(run.values(MARGIN))
    assert sorted(margins) == list(range(1, 61)), "every step was made"
    assert done < 60
    assert margins[1] == pytest.approx(0.0, abs=1e-6)
    assert margins[60] > 0.2
    assert margins[30] < margins[60]
    assert dict(run.values("actor/pair_accuracy"))[60] > 0.8
    assert undocumented({name for line in run.metrics() for name in line}) == set()
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert "preference margin" in output
    assert "metrics were not all sent" not in output
    sent = json.loads((tmp_path / "run" / "trackers" / "sent.json").read_text())
    assert sent["wandb"]["offset"] == (tmp_path / "run" / "metrics.jsonl").stat().st_size
    files = list((tmp_path / "run" / "trackers" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2, "a file for each start"
    assert all(MARGIN.encode() in file.read_bytes() for file in files)
