"""Mode train as a stranger runs it: the examples, as real processes on a real broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.metric_names import undocumented
from tests.processes import completed

EXAMPLES = Path(__file__).parents[2] / "examples"
MARGIN = "actor/pair_margin"
SHORT = ["trainer.save_interval=5", "buffer.total_steps=60", "monitor.trackers=[{kind: wandb, offline: true}]"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


async def test_preferences_are_learned_and_sent_to_a_tracker(tmp_path: Path) -> None:
    run, output = await completed(EXAMPLES / "dpo.yaml", tmp_path / "run", SHORT, seconds=200.0)
    margins = dict(run.values(MARGIN))
    assert sorted(margins) == list(range(1, 61)), "every step was made"
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
    [file] = (tmp_path / "run" / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    assert MARGIN.encode() in file.read_bytes()
