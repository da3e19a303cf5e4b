"""A run whose agents are exchanged for those of another release, role by role, while it goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from tests.processes import completed
from tests.upgrade.conftest import Built
from tests.upgrade.fleet import EXCHANGE_SECONDS, ROOT, Fleet
from trinity_agents.trainer.history import last_generation, lineage
from trinity_mq.bus import Topology
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import load_config
from trinity_mq.release import VERSION

pytestmark = [pytest.mark.broker, pytest.mark.e2e, pytest.mark.chaos, pytest.mark.extended, pytest.mark.timeout(2400)]

TASKS, RUNS = 4, 4
RUNNERS_FIRST = ("runner-0", "runner-1", "operator-0", "engines-0", "explorer-0", "trainer-0")
TRAINER_FIRST = tuple(reversed(RUNNERS_FIRST))


def write_config(folder: Path, name: str) -> Path:
    """Write the smoke example as a run of small batches that is not over before the test says so."""
    settings = yaml.safe_load((ROOT / "examples" / "smoke.yaml").read_text(encoding="utf-8"))
    settings["buffer"]["eval_tasksets"] = []
    settings["buffer"] |= {"batch_size": TASKS, "total_steps": 1_000_000}
    settings["algorithm"]["repeat_times"] = RUNS
    settings["trainer"]["save_interval"] = 10
    settings["monitor"] = {"tensorboard": False}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**settings, "name": name, "run_dir": str(folder / "run")}), encoding="utf-8")
    return file


async def newer_state_is_refused(fleet: Fleet, run: Path) -> None:
    """As after a downgrade over a format that has risen: each names the file, and leaves it to the newer release."""
    database = run / "state" / "explorer.db"
    checkpoint = max((run / "checkpoints").glob("progress-*")) / "trainer.json"
    kept = {path: path.read_bytes() for path in (database, checkpoint)}
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("PRAGMA user_version = 2")
    checkpoint.write_text(json.dumps({**json.loads(kept[checkpoint]), "format": 2, "release": "9.0.0"}))
    changed = {path: path.read_bytes() for path in kept}
    said = await fleet.refused("explorer-0", VERSION)
    assert f"{database} has format 2" in said
    assert "Upgrade trinity-mq here, or restore the copy" in said
    said = await fleet.refused("trainer-0", VERSION)
    assert f"{checkpoint} has format 2, written by release 9.0.0" in said
    for path, before in kept.items():
        assert path.read_bytes() == changed[path]
        path.write_bytes(before)


async def test_each_role_is_exchanged_in_both_orders_and_back_and_nothing_is_lost(
    previous: Built, broker_url: str, topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up with the runners first, back down likewise, and up with the trainer first: in between every mixture works."""
    file = write_config(tmp_path, topology.run)
    config = load_config(file)
    fleet = Fleet(config, file, broker_url, {previous.version: previous.python}, VERSION)

    async def exchange_all(agents: Sequence[str], release: str) -> None:
        for agent in agents:
            await fleet.exchange(agent, release)

    async with fleet.watched() as bus:
        await fleet.start("explorer-0", previous.version)  # makes the model that the others load
        others = [agent for agent in RUNNERS_FIRST if agent != "explorer-0"]
        await asyncio.gather(*(fleet.start(agent, previous.version) for agent in others))
        await fleet.until(lambda: fleet.progress >= 3, EXCHANGE_SECONDS, "the run to train")
        await exchange_all(RUNNERS_FIRST, VERSION)
        await exchange_all(RUNNERS_FIRST, previous.version)
        await exchange_all(TRAINER_FIRST, VERSION)
        for agent in RUNNERS_FIRST:
            await fleet.stop(agent)
        reached = fleet.progress
        assert await bus.depth(topology.dead.name) == 0
        await newer_state_is_refused(fleet, config.path)
    last = reached + 3
    monkeypatch.setenv(URL_VARIABLE, broker_url)
    await completed(file, config.path, (f"buffer.total_steps={last}",), seconds=180.0)

    assert fleet.committed == sorted(fleet.committed), "a version of the weights was committed after a newer one"
    history = lineage(config.path / "history", last_generation(config.path / "history"), last)
    assert [entry["batch"] for entry in history] == list(range(1, last + 1))
    assert {entry["outcome"] for entry in history} == {"trained"}
    assert len({entry["ticket"] for entry in history}) == last
    wanted = set(itertools.product(range(TASKS), range(RUNS)))
    for entry in history:
        runs = [tuple(map(int, uid.split("/")[1:3])) for uid in entry["uids"]]
        assert sorted(runs) == sorted(wanted), f"batch {entry['batch']} has other runs than each of its tasks' once"
    process = await asyncio.create_subprocess_exec(
        *fleet.command(VERSION, "audit", str(config.path), "--json"),
        env=fleet.environment(VERSION),
        stdout=asyncio.subprocess.PIPE,
    )
    audited, _ = await process.communicate()
    assert process.returncode == 0, audited.decode()
    fleet.say(f"{last} batches, {last * TASKS * RUNS} runs, each trained on once")
