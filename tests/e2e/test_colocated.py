"""Trainer and engine share a card in turns: the smoke example learns, and survives the death of whoever holds it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from trinity_agents.trainer.history import lineage
from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(500)]


def holder(folder: Path, kind: str) -> int | None:
    """Return the process that holds the lock on the card; ``kind``: WRITE for a trainer, READ for an engine."""
    inode = (folder / "engines" / "card.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and fields[3] == kind and fields[5].endswith(f":{inode}"):
            return int(fields[4])
    return None


def engine_of(folder: Path) -> int | None:
    """Return the engine's process."""
    ready = ReadyFile.read(folder / "engines" / "explorer-0-engine.ready.json")
    return ready.pid if ready is not None and ready.lives() else None


async def test_it_learns_although_trainer_and_engine_are_killed_while_they_hold_the_card(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("synchronizer.colocated=true", "trainer.save_interval=5")
    async with LocalRun(SMOKE, folder, settings) as run:
        await run.until_progress(8, 150.0)
        # the engine sleeps, and its weights are discarded: it wakes without the trainer, and gets weights from the next
        await run.until(lambda: holder(folder, "WRITE") is not None, 30.0)
        trainer = holder(folder, "WRITE")
        assert trainer is not None
        os.kill(trainer, signal.SIGKILL)
        await run.until(lambda: holder(folder, "WRITE") not in {None, trainer}, 90.0)
        await run.until_progress(20, 150.0)
        await run.until(lambda: holder(folder, "READ") == engine_of(folder) is not None, 30.0)
        first = engine_of(folder)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await run.until_progress(30, 150.0)
        # an engine dies in its sleep: its successor does not touch the card before the trainer has left it
        await run.until(lambda: holder(folder, "WRITE") is not None and engine_of(folder) is not None, 30.0)
        second = engine_of(folder)
        assert second not in {None, first}
        os.kill(second or 0, signal.SIGKILL)
        code, output = await run.ended(300.0)
    assert code == 0, output
    accuracy = dict(run.values(ACCURACY))
    assert accuracy[60] >= accuracy[0] + 0.4
    entries = lineage(folder / "history", 2, 60)
    assert [entry["batch"] for entry in entries] == list(range(1, 61))
    assert max(age for _, age in run.values("sample/staleness/max")) <= 1
