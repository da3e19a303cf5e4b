"""Hostile properties and bodies at each reader of a run on a real broker, as fuzz_broker.py tries them for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.broker_run import FuzzedRun, FuzzError, quiet
from tests.fuzz.hostile import TARGETS
from trinity_mq.runtime.peers import Peers

SECONDS = 25.0


@pytest.mark.broker
async def test_no_message_ends_an_agent_or_stops_its_work(broker_url: str, unique_run: str, tmp_path: Path) -> None:
    run = FuzzedRun(tmp_path, url=broker_url, name=unique_run, seed=1)
    with quiet():
        async with run.running():
            await run.fuzz(SECONDS)
    print(run.summary())  # noqa: T201  # what was tried
    outcomes = {(one.hostile.target.name, one.outcome) for one in run.tries}
    assert {name for name, outcome in outcomes if outcome == "handled"} >= {"submitted", "results", "dead"}
    assert {name for name, _ in outcomes} == {target.name for target in TARGETS}
    assert "unread" not in {outcome for _, outcome in outcomes}


@pytest.mark.broker
async def test_an_agent_that_a_message_ends_is_a_fault(
    broker_url: str, unique_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(self: Peers, message: object) -> None:
        raise OSError("a message has ended it")

    run = FuzzedRun(tmp_path, url=broker_url, name=unique_run, seed=1)
    with quiet():
        async with run.running():
            monkeypatch.setattr(Peers, "receive", ends)
            with pytest.raises(FuzzError, match=r"(?s)round \d+ of seed 1: .* has ended: .*a message has ended it"):
                await run.fuzz(SECONDS)
