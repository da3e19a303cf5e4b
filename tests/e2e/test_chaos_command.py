"""``trinity-mq chaos`` on whole runs: faults are done, the run recovers, and the invariants are judged."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import command
from trinity_agents.trainer.history import last_generation, lineage
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = ("trainer.save_interval=7", "explorer.eval_interval=60", "operator.num_operators=2")
ALWAYS = {
    "the run recovers",
    "streams can be read",
    "one outcome for each task",
    "each experience trained on once",
    "committed versions rise",
    "tokens name versions that existed",
    "tokens were sampled by the weights they name",
    "audit of the newest checkpoint",
    "dead letters accounted for",
}
OF_SESSIONS = {
    "points inside agents were hit",
    "no session trained on twice",
    "one decision about each session",
    "recorded sessions are trained on",
    "answers trained on once",
    "answers to clients match the stream",
    "every session is settled",
}

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]


async def chaos(*words: str) -> tuple[int, dict[str, Any], str]:
    """Run the command; return its exit code, its report and what it told meanwhile."""
    code, out, told = await command("chaos", *words, "--json")
    assert out, told
    return code, json.loads(out), told


def judged(report: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["result"] for one in report["invariants"]}


def schedule(path: Path, *faults: dict[str, Any]) -> Path:
    lines = [{"wait": 0.2, "pick": 0.0, **fault, "number": number} for number, fault in enumerate(faults, 1)]
    path.write_text(json.dumps({"format": 1, "faults": lines}))
    return path


@pytest.mark.timeout(400)
async def test_faults_of_each_kind_cost_time_and_nothing_else(tmp_path: Path) -> None:
    batches = 90
    file = schedule(
        tmp_path / "schedule.json",
        {"role": "runner", "kind": "kill"},
        {"role": "engine", "kind": "kill", "point": "slices_in_flight"},
        {"role": "trainer", "kind": "kill", "point": "sync_commit"},
        {"role": "runner", "kind": "freeze", "seconds": 1.0, "together": True},
        {"role": "explorer", "kind": "cut", "seconds": 0.5},
        {"role": "operator", "kind": "restart"},
        {"role": "explorer", "kind": "kill"},
        {"role": "operator", "kind": "kill", "point": "batch_closed"},
        {"role": "engine", "kind": "kill"},
        {"role": "broker", "kind": "kill", "point": "batch_closed"},
    )
    run = tmp_path / "run"
    settings = (f"buffer.total_steps={batches}", *SETTINGS)
    code, report, told = await chaos(
        str(EXAMPLES / "smoke.yaml"), f"run_dir={run}", *settings, "--after", "3", "--schedule", str(file)
    )
    assert code == 0, f"{told}\n{json.dumps(report, indent=2)}"
    assert [fault["recovered"] is not None for fault in report["faults"]] == [True] * 10, report
    assert judged(report) == dict.fromkeys([*ALWAYS, "no process left"], "holds"), report
    assert report["over"]
    assert json.loads((run / "chaos" / "schedule.json").read_text())["faults"][2]["point"] == "sync_commit"
    assert "every invariant that was checked holds" in (run / "chaos" / "report.txt").read_text()
    # no run of any batch is missing in the final checkpoint, and no evaluation was done twice
    entries = lineage(run / "history", last_generation(run / "history"), batches)
    assert [(entry["batch"], entry["outcome"]) for entry in entries] == [(n + 1, "trained") for n in range(batches)]
    assert len({entry["ticket"] for entry in entries}) == batches
    assert len({uid for entry in entries for uid in entry["uids"]}) == batches * 16 * 8
    for entry in entries:
        runs = {tuple(map(int, uid.split("/")[1:3])) for uid in entry["uids"]}
        missing = {(task, number) for task in range(16) for number in range(8)} - runs
        assert (missing, len(entry["uids"])) == (set(), 16 * 8), f"batch {entry['batch']} has not (task, run)\n{told}"
    evaluated = [step for step, _ in LocalRun(file, run).values("eval/max3_held_out/accuracy/mean@1")]
    assert (evaluated[0], evaluated.count(batches)) == (0, 1)


@pytest.mark.extended
@pytest.mark.timeout(900)
async def test_a_drawn_schedule_on_a_longer_run(tmp_path: Path) -> None:
    seed = os.environ.get("SEED", "7")
    run = tmp_path / "run"
    settings = ("buffer.total_steps=700", *SETTINGS)
    words = (str(EXAMPLES / "smoke.yaml"), f"run_dir={run}", *settings, "--kills", "25", "--seed", seed, "--every", "1")
    code, report, said = await chaos(*words, "--further", "3", "--inside", "0.5")
    assert code == 0, f"{said}\n{json.dumps(report, indent=2)}"
    assert sum(fault["at"] is not None for fault in report["faults"]) >= 20, report
    assert set(judged(report).values()) == {"holds"}, report


@pytest.mark.extended
@pytest.mark.timeout(500)
@pytest.mark.parametrize("method", ["collective", "memory", "checkpoint"])
async def test_trainer_engine_and_host_are_struck_at_each_step_of_a_sync(tmp_path: Path, method: str) -> None:
    points = ("sync_prepare", "sync_go", "sync_applied", "sync_commit")
    kills = [{"role": role, "kind": "kill", "point": point} for role in ("trainer", "engine") for point in points]
    cuts = [{"role": "explorer", "kind": "cut", "seconds": 2.0, "point": point} for point in points[:2]]
    file = schedule(tmp_path / "schedule.json", *kills, *cuts)
    settings = ("buffer.total_steps=2000", *SETTINGS, f"synchronizer.sync_method={method}")
    words = (str(EXAMPLES / "smoke.yaml"), f"run_dir={tmp_path / 'run'}", *settings, "--schedule", str(file))
    code, report, said = await chaos(*words, "--after", "3", "--further", "3")
    assert code == 0, f"{said}\n{json.dumps(report, indent=2)}"
    assert [fault["note"] for fault in report["faults"]] == [""] * 10, "each at its point"
    assert set(judged(report).values()) == {"holds"}, report


@pytest.mark.extended
@pytest.mark.timeout(400)
async def test_a_run_that_runs_already_goes_on_afterwards(tmp_path: Path) -> None:
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run", ("buffer.total_steps=5000", *SETTINGS)) as run:
        await run.until_progress(3, 120.0)
        words = ("--attach", str(run.run_dir), "--kills", "4", "--seed", "1", "--every", "0.5", "--after", "1")
        code, report, said = await chaos(*words)
        assert code == 0, f"{said}\n{json.dumps(report, indent=2)}"
        assert not report["over"]
        assert (
            judged(report).items()
            >= dict.fromkeys(ALWAYS - {"tokens were sampled by the weights they name"}, "holds").items()
        )
        assert judged(report)["no process left"] == "not checked"
        assert {fault["kind"] for fault in report["faults"]} <= {"kill", "freeze", "restart"}, (
            "there is no proxy to cut"
        )
        seen = max(step for step, _ in run.values("trainer/step"))
        await run.until_progress(seen + 3, 60.0)


def neighbouring_ports() -> int:
    """Return a free port whose next one is free too."""
    ports = sorted(free_ports(20))
    return next(port for port, after in itertools.pairwise(ports) if after == port + 1)


@pytest.mark.extended
@pytest.mark.timeout(400)
async def test_two_gateways_are_killed_inside_while_agents_hold_sessions(tmp_path: Path) -> None:
    file = schedule(
        tmp_path / "schedule.json",
        {"role": "gateway", "kind": "kill", "point": "decision_confirmed"},
        {"role": "gateway", "kind": "freeze", "seconds": 1.5, "point": "answer_confirmed"},
        {"role": "runner", "kind": "kill", "point": "result_confirmed"},
        {"role": "explorer", "kind": "cut", "seconds": 0.5, "point": "submission_unacknowledged"},
        {"role": "gateway", "kind": "restart", "point": "task_confirmed"},
    )
    run = tmp_path / "run"
    words = (
        *(str(EXAMPLES / "serve.yaml"), f"run_dir={run}", "mode=serve", "gateway.num_gateways=2"),
        *(f"gateway.port={neighbouring_ports()}", "gateway.batch_wait=1", "buffer.batch_size=16"),
        *("trainer.save_interval=5", "explorer.eval_on_startup=false", "explorer.eval_interval=10000"),
        *("--after", "2", "--schedule", str(file), "--further", "3"),
    )
    code, report, said = await chaos(*words)
    assert code == 0, f"{said}\n{json.dumps(report, indent=2)}"
    assert [fault["inside"] for fault in report["faults"]] == [True] * 5, report
    assert judged(report) == dict.fromkeys([*ALWAYS, *OF_SESSIONS, "no process left"], "holds"), report
    assert report["traffic"]["recorded"] > 100
    assert report["traffic"]["repeated"] > 10
    assert report["by_role"]["gateway"] == [
        {"kill": 1, "freeze": 1, "restart": 1},
        {"decision_confirmed": 1, "answer_confirmed": 1, "task_confirmed": 1},
    ]
