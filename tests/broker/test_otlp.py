"""A short run with real processes exports one connected trace of each batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.otlp_receiver import Receiver, receiving, values
from trinity_mq.bus.topology import Topology
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
STEPS = 4
PATH = (
    ("trinity_mq.explorer", "make ticket"),
    ("trinity_mq.runner", "make workflow"),
    ("trinity_mq.runner", "ask engine"),
    ("trinity_mq.engine", "parse request"),
    ("trinity_mq.engine", "encode answer"),
    ("trinity_mq.runner", "hand over result"),
    ("trinity_mq.operator", "run operators"),
    ("trinity_mq.trainer", "train step"),
    ("trinity_mq.trainer", "transfer weights"),
    ("trinity_mq.engine", "apply weights"),
    ("trinity_mq.explorer", "commit at engine"),
)
"""From the task to the version that a batch's train step made."""

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


async def test_a_run_exports_connected_traces(broker_url: str, topology: Topology, tmp_path: Path) -> None:
    settings = (f"buffer.total_steps={STEPS}", "explorer.eval_on_startup=false", "explorer.eval_interval=100")
    with receiving(Receiver()) as receiver:
        otlp = f"monitor.otlp={{endpoint: {receiver.url}}}"
        overrides = (*settings, otlp, f"broker.url={broker_url}", f"name={topology.run}")
        async with LocalRun(SMOKE, tmp_path / "run", overrides) as run:
            code, output = await run.ended(200.0)
    assert code == 0, output
    assert "not all sent" not in output
    found = receiver.batches()
    assert {f"batch {n}" for n in range(1, STEPS + 1)} <= found.keys()
    for spans in receiver.spans.values():
        orphans = [span.name for _, span in spans.values() if span.parent_span_id.hex() not in {"", *spans}]
        assert orphans == []
    for n in range(1, STEPS):
        spans = found[f"batch {n}"]
        names = Counter((service, span.name) for service, span in spans.values())
        assert [step for step in PATH if step not in names] == []
        (root,) = (span for _, span in spans.values() if not span.parent_span_id)
        assert values(root)["tmq.version"]
        assert all(root.start_time_unix_nano <= span.start_time_unix_nano for _, span in spans.values())
        tasks = [span for _, span in spans.values() if span.name.startswith("task ")]
        assert len(tasks) == 16
        asked = [span for _, span in spans.values() if span.name == "ask engine"]
        assert {spans[span.parent_span_id.hex()][1].name for span in asked} <= {span.name for span in tasks}
        assert values(asked[0])["gen_ai.operation.name"] == "chat"
        assert min(values(one)[f"gen_ai.usage.{of}_tokens"] for one in asked for of in ("input", "output")) > 0
