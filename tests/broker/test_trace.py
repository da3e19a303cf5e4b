"""A short run with real processes leaves a whole trace of each batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_mq.bus.topology import Topology
from trinity_mq.cli.main import main
from trinity_mq.observability.waterfall import MARKS, lay_out
from trinity_mq.telemetry import read_trace
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
ONCE_A_SLICE = (
    ("runner", "make workflow"),
    ("runner", "make request"),
    ("runner", "ask engine"),
    ("engine", "parse request"),
    ("engine", "wait for company"),
    ("engine", "encode answer"),
    ("runner", "parse answer"),
    ("runner", "make experiences"),
    ("runner", "compute reward"),
    ("runner", "finish runs"),
    ("runner", "hand over experiences"),
    ("runner", "hand over result"),
    ("runner", "acknowledge"),
)
ONCE_A_BATCH = (
    ("explorer", "make ticket"),
    ("explorer", "declare queue"),
    ("explorer", "make manifest"),
    ("explorer", "confirm batch_closed"),
    ("operator", "read parts"),
    ("operator", "decode parts"),
    ("operator", "run operators"),
    ("operator", "encode chunks"),
    ("operator", "confirm experience_chunk"),
    ("operator", "confirm batch_ready"),
    ("trainer", "batch is here"),
    ("trainer", "decode chunks"),
    ("trainer", "train step"),
    ("trainer", "pack tokens"),
    ("trainer", "backward"),
    ("trainer", "measure step"),
    ("trainer", "confirm progress"),
    ("trainer", "offer weights"),
    ("trainer", "transfer weights"),
    ("engine", "receive weights"),
    ("engine", "apply weights"),
    ("engine", "score canary"),
    ("explorer", "commit at engine"),
)
SEVERAL_A_BATCH = (
    ("explorer", "encode slices"),
    ("runner", "decode slices"),
    ("runner", "encode experiences"),
    ("runner", "confirm experience_part"),
    ("engine", "generate"),
    ("explorer", "take results"),
    ("trainer", "forward"),
    ("trainer", "optimizer"),
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


async def test_a_run_leaves_a_whole_trace(
    broker_url: str, topology: Topology, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("buffer.total_steps=3", "explorer.eval_on_startup=false", "explorer.eval_interval=100")
    overrides = (*settings, "monitor.trace=true", f"broker.url={broker_url}", f"name={topology.run}")
    async with LocalRun(SMOKE, tmp_path / "run", overrides) as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    spans = read_trace(tmp_path / "run")
    for batch in ("1", "2"):
        found = lay_out(spans, batch)
        times = {(row.who, row.what): row.times for row in found.rows}
        missing = {key: times.get(key) for key in ONCE_A_SLICE if times.get(key, 0) < 16}
        assert missing == {}, "16 tasks a batch, some of which may be asked about again"
        assert {key: times.get(key) for key in ONCE_A_BATCH if times.get(key) != 1} == {}
        assert [key for key in SEVERAL_A_BATCH if key not in times] == []
        assert found.stages.keys() == MARKS.keys()
        assert all(took >= 0 for took in found.stages.values()), found.stages
        by_name = {(row.who, row.what): row for row in found.rows}
        assert by_name["runner", "ask engine"].bytes >= by_name["engine", "encode answer"].bytes > 0
        assert by_name["runner", "decode slices"].bytes >= by_name["explorer", "encode slices"].bytes > 0
        slices_confirmed = [times.get(("explorer", f"confirm {kind}"), 0) for kind in ("task_slice", "task_slices")]
        assert times["explorer", "encode slices"] == sum(slices_confirmed)
        assert times["runner", "decode slices"] >= sum(slices_confirmed), "a message may come again"
        assert by_name["engine", "generate"].cpu
    assert main(["timeline", str(tmp_path / "run"), "--batch", "1-2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["batch"] == "1 to 2"
    assert shown["took"] > sum(shown["stages"].values()) / 2
