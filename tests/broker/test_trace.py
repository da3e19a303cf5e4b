"""A short run with real processes leaves a whole trace of each batch, and exports one connected trace of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.otlp_receiver import Receiver, receiving, values
from trinity_mq.bus.topology import Topology
from trinity_mq.cli.main import main
from trinity_mq.observability.waterfall import MARKS, lay_out
from trinity_mq.telemetry import read_trace
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
ONCE_A_SLICE = {
    "runner": (
        *("make workflow", "make request", "ask engine", "parse answer", "make experiences", "compute reward"),
        *("finish runs", "hand over experiences", "hand over result", "acknowledge"),
    ),
    "engine": ("parse request", "wait for company", "encode answer"),
}
ONCE_A_BATCH = {
    "explorer": ("make ticket", "declare queue", "make manifest", "confirm batch_closed", "commit at engine"),
    "operator": (
        *("read parts", "decode parts", "run operators", "encode chunks"),
        *("confirm experience_chunk", "confirm batch_ready"),
    ),
    "trainer": (
        *("batch is here", "decode chunks", "train step", "pack tokens", "backward", "measure step"),
        *("confirm progress", "offer weights", "transfer weights"),
    ),
    "engine": ("receive weights", "apply weights", "score canary"),
}
SEVERAL_A_BATCH = {
    "explorer": ("encode slices", "take results"),
    "runner": ("decode slices", "encode experiences", "confirm experience_part"),
    "engine": ("generate",),
    "trainer": ("forward", "optimizer"),
}
STEPS = 4
EXPORTED = {
    "explorer": ("make ticket", "commit at engine"),
    "runner": ("make workflow", "ask engine", "hand over result"),
    "engine": ("parse request", "encode answer", "apply weights"),
    "operator": ("run operators",),
    "trainer": ("train step", "transfer weights"),
}
"""From the task to the version that a batch's train step made."""

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


def pairs(table: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    return ((who, what) for who, names in table.items() for what in names)


async def test_a_run_leaves_and_exports_a_whole_trace(
    broker_url: str, topology: Topology, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"buffer.total_steps={STEPS}", "explorer.eval_on_startup=false", "explorer.eval_interval=100")
    with receiving(Receiver()) as receiver:
        monitor = ("monitor.trace=true", f"monitor.otlp={{endpoint: {receiver.url}}}")
        overrides = (*settings, *monitor, f"broker.url={broker_url}", f"name={topology.run}")
        async with LocalRun(SMOKE, tmp_path / "run", overrides) as run:
            code, output = await run.ended(200.0)
    assert code == 0, output
    assert "not all sent" not in output
    check_what_was_exported(receiver)
    spans = read_trace(tmp_path / "run")
    for batch in ("1", "2"):
        found = lay_out(spans, batch)
        times = {(row.who, row.what): row.times for row in found.rows}
        missing = {key: times.get(key) for key in pairs(ONCE_A_SLICE) if times.get(key, 0) < 16}
        assert missing == {}, "16 tasks a batch, some of which may be asked about again"
        assert {key: times.get(key) for key in pairs(ONCE_A_BATCH) if times.get(key) != 1} == {}
        assert [key for key in pairs(SEVERAL_A_BATCH) if key not in times] == []
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


def check_what_was_exported(receiver: Receiver) -> None:
    found = receiver.batches()
    assert {f"batch {n}" for n in range(1, STEPS + 1)} <= found.keys()
    for spans in receiver.spans.values():
        orphans = [span.name for _, span in spans.values() if span.parent_span_id.hex() not in {"", *spans}]
        assert orphans == []
    for n in range(1, STEPS):
        spans = found[f"batch {n}"]
        names = Counter((service.removeprefix("trinity_mq."), span.name) for service, span in spans.values())
        assert [step for step in pairs(EXPORTED) if step not in names] == []
        (root,) = (span for _, span in spans.values() if not span.parent_span_id)
        assert values(root)["tmq.version"]
        assert all(root.start_time_unix_nano <= span.start_time_unix_nano for _, span in spans.values())
        tasks = [span for _, span in spans.values() if span.name.startswith("task ")]
        assert len(tasks) == 16
        requests = [span for _, span in spans.values() if span.name == "ask engine"]
        assert {spans[span.parent_span_id.hex()][1].name for span in requests} <= {span.name for span in tasks}
        assert values(requests[0])["gen_ai.operation.name"] == "chat"
        assert min(values(one)[f"gen_ai.usage.{of}_tokens"] for one in requests for of in ("input", "output")) > 0
