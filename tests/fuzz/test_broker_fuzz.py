"""Hostile properties and bodies at each reader of a run on a real broker, as fuzz_broker.py tries them for longer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fuzz.broker_run import FuzzedRun, FuzzError, quiet
from tests.fuzz.hostile import TARGETS

SECONDS = 25.0


@pytest.mark.broker
async def test_no_message_ends_an_agent_or_stops_its_work(broker_url: str, unique_run: str, tmp_path: Path) -> None:
    async def ends() -> None:
        raise OSError("a message has ended it")

    run = FuzzedRun(tmp_path, url=broker_url, name=unique_run, seed=1)
    with quiet():
        async with run.running():
            await run.fuzz(SECONDS)
            outcomes = {(one.hostile.target.name, one.outcome) for one in run.tries}
            print(run.summary())  # noqa: T201  # what was tried
            run.tasks["one more agent"] = asyncio.create_task(ends())
            with pytest.raises(
                FuzzError, match=r"(?s)round \d+ of seed 1: one more agent has ended: .*a message has end"
            ):
                await run.fuzz(SECONDS)
    assert {name for name, outcome in outcomes if outcome == "handled"} >= {"submitted", "results", "dead"}
    assert {name for name, _ in outcomes} == {target.name for target in TARGETS}
    assert "unread" not in {outcome for _, outcome in outcomes}
