"""Lines that agents log about a batch carry its number and its ticket."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from trinity_agents.simulation import Simulation
from trinity_mq.telemetry import setup_logging
from trinity_mq.testing.virtual_time import run_virtually


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def test_each_agent_logs_each_batch_under_its_number(tmp_path: Path) -> None:
    setup_logging("sim", "sim", tmp_path, run="maths")
    sim = Simulation(tmp_path / "run", batches=3)
    sim.folder.mkdir()
    run_virtually(sim.run(), limit=1000)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "sim.jsonl").read_text().splitlines()]
    tickets = {}
    for event in ("batch_opened", "batch_closed", "batch_processed", "batch_done"):
        found = [(line["batch"], line["ticket"]) for line in lines if line["event"] == event]
        assert [batch for batch, _ in found] == [1, 2, 3], event
        tickets[event] = found
    assert len({tuple(found) for found in tickets.values()}) == 1, "the same ticket from the beginning to the end"
    ends = [line for line in lines if line["event"] == "draining"]
    assert not any("batch" in line for line in ends)
